"""The operators behind the models. Every backend is tested against a reference that reads like its equations."""

from .ttt_linear import selected_backend, ttt_linear, ttt_linear_bidir

__all__ = ["selected_backend", "ttt_linear", "ttt_linear_bidir"]
