"""Reproduction of Vision-TTT: see README.md for the layout and the verbs."""

__version__ = "0.1.0"
