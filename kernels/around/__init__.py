"""Fused kernels for the parts of a Vittt block around the scan: `op` has the functions, `reference` the equations."""

from .op import conv_norm, gated_linear, gated_norm, scan_convs

__all__ = ["conv_norm", "gated_linear", "gated_norm", "scan_convs"]
