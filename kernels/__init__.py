"""Fused operators of the models. Each backend is tested against a reference implementation of the equations."""

from .ttt_linear import selected_backend, ttt_linear, ttt_linear_bidir

__all__ = ["selected_backend", "ttt_linear", "ttt_linear_bidir"]
