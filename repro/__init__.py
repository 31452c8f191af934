"""Reproduction of Vision-TTT: README.md lists the verbs, docs/architecture.md has the layout."""

__version__ = "0.1.0"
