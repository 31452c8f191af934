"""The operators behind the models. Each has a reference that reads like its equations, and every backend is tested
against it.
"""

from .ttt_linear import selected_backend, ttt_linear, ttt_linear_bidir

__all__ = ["selected_backend", "ttt_linear", "ttt_linear_bidir"]
