"""Fused kernels for the parts of a Vittt block around the scan: `op` has the operators, `reference` the equations."""
