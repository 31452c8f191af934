"""The operators around the scan on CPUs, by the loops of `cpu_around`; none for `gated_linear`, which is a product, and
`scan_convs`, which is a part of the scan's loop. Shape letters as in `reference`.
"""

from torch import Tensor

from .. import cpu_around, threads
from ..dispatch import compute_dtype
from .reference import ConvNorm, GatedNorm

_BLOCK = 64  # tokens of a task


def conv_norm(x: ConvNorm) -> Tensor:
    """(2,B,T,D) in the tokens' dtype."""
    tokens, weight, gamma, beta = (each.to(compute_dtype(x.tokens.dtype)).contiguous() for each in x[:4])
    return run_conv_norm(tokens, lay_grid_taps(weight), gamma, beta, x.height, x.eps).to(x.tokens.dtype)


def lay_grid_taps(weight: Tensor) -> Tensor:
    """(D,3,3) as (3,3,D)."""
    return weight.permute(1, 2, 0).contiguous()


def run_conv_norm(tokens: Tensor, taps: Tensor, gamma: Tensor, beta: Tensor, height: int, eps: float) -> Tensor:
    """Convolve and normalise contiguous tensors in a compute dtype, with the taps of `lay_grid_taps`."""
    out = tokens.new_empty(2, *tokens.shape)
    arrays, width = (tokens, taps, gamma, beta, out), (False,) * tokens.shape[2]
    number = out.numpy().dtype.type(eps)
    threads.run_loop(cpu_around.conv_norm, len(tokens) * height, *arrays, height, number, constants=(width,))
    return out


def gated_norm(x: GatedNorm) -> Tensor:
    """(B,T,D) in z's dtype."""
    z, gate, weight, bias = (each.to(compute_dtype(x.z.dtype)) for each in x[:4])
    return run_gated_norm(z, gate, weight.contiguous(), bias.contiguous(), x.eps).to(x.z.dtype)


def run_gated_norm(z: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise and gate tensors in a compute dtype; weight and bias are contiguous."""
    B, T, _ = gate.shape
    out = z.new_empty(gate.shape)
    rows = threads.lay_flat(z), threads.lay_flat(gate), weight, bias
    threads.run_loop(cpu_around.gated_norm, B * -(-T // _BLOCK), _BLOCK, *rows, out, out.numpy().dtype.type(eps))
    return out
