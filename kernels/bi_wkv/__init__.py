"""Bi-WKV, the token mixing of Vision-RWKV: `op` has the function, `reference` the equation."""

from .op import bi_wkv, selected_backend

__all__ = ["bi_wkv", "selected_backend"]
