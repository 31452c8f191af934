"""The operators around the scan on CPUs, by the loops of `cpu_around`.

`gated_linear` and `scan_convs` have no loop here: the first is a matrix product, the second is part of the scan's loop.
The functions `run_…` are for `repro.models.fused_loops`, too, which then writes to the sum of `run_conv_norm`. Shape
letters as in `reference`.
"""

from torch import Tensor

from .. import cpu_around, threads
from ..dispatch import compute_dtype
from .reference import ConvNorm, GatedNorm

_BLOCK = 64  # tokens per task


def conv_norm(x: ConvNorm) -> Tensor:
    """Compute the sum and its LayerNorm, (2,B,T,D) in the tokens' dtype."""
    tokens, weight, gamma, beta = (each.to(compute_dtype(x.tokens.dtype)).contiguous() for each in x[:4])
    return run_conv_norm(tokens, lay_grid_taps(weight), gamma, beta, x.height, x.eps).to(x.tokens.dtype)


def lay_grid_taps(weight: Tensor) -> Tensor:
    """Return the weight (D,3,3) as (3,3,D), contiguous: neighbouring channels of a tap are neighbours in memory."""
    return weight.permute(1, 2, 0).contiguous()


def run_conv_norm(tokens: Tensor, taps: Tensor, gamma: Tensor, beta: Tensor, height: int, eps: float) -> Tensor:
    """Convolve and normalise contiguous tensors in a compute dtype; `taps` (3,3,D) come from `lay_grid_taps`."""
    out = tokens.new_empty(2, *tokens.shape)
    # the length of a tuple is part of its type, so numba compiles the loop for this D
    arrays, width = (tokens, taps, gamma, beta, out), (False,) * tokens.shape[2]
    # a Python float would be fp64 in the loop
    number = out.numpy().dtype.type(eps)
    threads.run_loop(cpu_around.conv_norm, len(tokens) * height, *arrays, height, number, constants=(width,))
    return out


def gated_norm(x: GatedNorm) -> Tensor:
    """Compute GELU(gate) ⊙ LN(Σ_r z_r), (B,T,D) in z's dtype."""
    z, gate, weight, bias = (each.to(compute_dtype(x.z.dtype)) for each in x[:4])
    return run_gated_norm(z, gate, weight.contiguous(), bias.contiguous(), x.eps).to(x.z.dtype)


def run_gated_norm(z: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise and gate tensors in a compute dtype; weight and bias are contiguous, z and gate may be strided."""
    B, T, _ = gate.shape
    out = z.new_empty(gate.shape)
    rows = threads.lay_flat(z), threads.lay_flat(gate), weight, bias
    threads.run_loop(cpu_around.gated_norm, B * -(-T // _BLOCK), _BLOCK, *rows, out, out.numpy().dtype.type(eps))
    return out
