"""Multi-scale deformable attention of the ViT-Adapter: `op` has the function, `reference` the equation."""

from .op import ms_deform_attn, selected_backend

__all__ = ["ms_deform_attn", "selected_backend"]
