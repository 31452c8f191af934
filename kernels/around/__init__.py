"""What lies around the scan in a block of Vittt, each as one kernel: `op` has the functions, `reference` the equations."""

from .op import conv_norm, gated_linear, gated_norm, scan_convs

__all__ = ["conv_norm", "gated_linear", "gated_norm", "scan_convs"]
