"""The operators behind the models. Each has a reference that reads like its equations, and is tested against it."""

from .bi_wkv import bi_wkv
from .ttt_linear import selected_backend, ttt_linear, ttt_linear_bidir

__all__ = ["bi_wkv", "selected_backend", "ttt_linear", "ttt_linear_bidir"]
