"""The selective scan of Mamba and Vim: `op` has the functions, `reference` the equations."""

from .op import selected_backend, selective_scan, selective_scan_bidir

__all__ = ["selected_backend", "selective_scan", "selective_scan_bidir"]
