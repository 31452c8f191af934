"""The selective scan of Mamba, Vim and VMamba: `op` has the functions, `reference` the equations."""

from .op import selected_backend, selective_scan, selective_scan_bidir, selective_scan_routes

__all__ = ["selected_backend", "selective_scan", "selective_scan_bidir", "selective_scan_routes"]
