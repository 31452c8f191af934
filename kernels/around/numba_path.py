"""The operators around the scan on CPUs, by the loops of `cpu_around`; none for `gated_linear`, which is a product.
Shape letters as in `reference`.
"""

import torch
from torch import Tensor

from .. import cpu_around, threads
from ..dispatch import compute_dtype
from .reference import ConvNorm, GatedNorm, ScanConvs

BLOCK = 64  # tokens of a task


def conv_norm(x: ConvNorm) -> Tensor:
    """(2,B,T,D) in the tokens' dtype."""
    tokens, weight, gamma, beta = (each.to(compute_dtype(x.tokens.dtype)) for each in x[:4])
    out = tokens.new_empty(2, *tokens.shape)
    given = (each.contiguous() for each in (tokens, weight.permute(1, 2, 0), gamma, beta))
    eps = out.numpy().dtype.type(x.eps)
    tasks, width = len(tokens) * x.height, (False,) * tokens.shape[2]
    threads.run(cpu_around.conv_norm, tasks, *given, out, x.height, eps, constants=(width,))
    return out.to(x.tokens.dtype)


def scan_convs(x: ScanConvs) -> Tensor:
    """(2,B,T,2D) in x's dtype."""
    given, *of_k_and_q = (each.to(compute_dtype(x.x.dtype)) for each in x)
    B, T, _ = given.shape
    out = given.new_empty(2, *given.shape)
    weights, biases = torch.stack([each.T for each in of_k_and_q[::2]]), torch.stack(of_k_and_q[1::2])
    threads.run(
        cpu_around.scan_convs,
        B * -(-T // BLOCK),
        BLOCK,
        threads.lay_flat(given),
        weights,
        biases,
        out,
        constants=((False,) * (given.shape[2] // 2),),
    )
    return out.to(x.x.dtype)


def gated_norm(x: GatedNorm) -> Tensor:
    """(B,T,D) in z's dtype."""
    z, gate, weight, bias = (each.to(compute_dtype(x.z.dtype)) for each in x[:4])
    B, T, _ = gate.shape
    out = z.new_empty(gate.shape)
    rows = threads.lay_flat(z), threads.lay_flat(gate), weight.contiguous(), bias.contiguous()
    threads.run(cpu_around.gated_norm, B * -(-T // BLOCK), BLOCK, *rows, out, out.numpy().dtype.type(x.eps))
    return out.to(x.z.dtype)
