"""Rooms of papers."""
