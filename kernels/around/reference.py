"""Arguments of the operators around the scan, and their equations in plain PyTorch, differentiable by autograd.

They compute in fp64 for fp64 inputs and in fp32 otherwise. The tensors of each tuple stay in front, in the order of the
gradients: backends take them by their places. Shape letters: B samples, T tokens, D width, F hidden width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype

TAPS = 4  # tokens in the window of a causal convolution; the kernels and `cpu_learner` have the four taps written out
# columns of ones that `gated_linear` appends: eight two-byte numbers keep the rows aligned to 16 bytes, as matrix
# products on a GPU want them
ONES = 8


class ConvNorm(NamedTuple):
    """Arguments of a depth-wise 3 x 3 convolution that is added to its input, and of the LayerNorm of the sum.

    tokens (B,T,D), row by row on a grid of `height` rows, which divides T; weight (D,3,3), without a bias; gamma and
    beta (D,) and eps of the norm. Parameters are fp32 or of the tokens' dtype.
    """

    tokens: Tensor
    weight: Tensor
    gamma: Tensor
    beta: Tensor
    height: int
    eps: float


class ScanConvs(NamedTuple):
    """Arguments of the causal depth-wise convolutions, over four tokens, that make keys and queries from one input.

    x (B,T,2D), the forward direction's channels first; it may be a slice of longer rows. For k and for q a weight
    (2D,4), with the taps in the order of each direction's scan, the last for the token itself, and a bias (2D,).
    """

    x: Tensor
    k_weight: Tensor
    k_bias: Tensor
    q_weight: Tensor
    q_bias: Tensor


class GatedNorm(NamedTuple):
    """Arguments of the gated LayerNorm of the sum of both directions.

    z (B,T,2,D); gate (B,T,D), which may be a slice of longer rows; weight and bias (D,) and eps of the norm.
    """

    z: Tensor
    gate: Tensor
    weight: Tensor
    bias: Tensor
    eps: float


class GatedLinear(NamedTuple):
    """Arguments of SwiGLU's input layer with its activation.

    x (B,T,D), weight (2F,D) and bias (2F,): first the rows of a, SiLU's input, then those of b, its factor. The output
    has `ONES` columns of ones after its F columns: the next matrix product adds its bias through the first of them.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor


def conv_norm_formula(x: ConvNorm) -> Tensor:
    """Return y and LN(y), (2,B,T,D), with y = tokens + their depth-wise 3 x 3 convolution, zeros around the grid."""
    dtype = compute_dtype(x.tokens.dtype)
    tokens, weight, gamma, beta = (each.to(dtype) for each in x[:4])
    image = tokens.transpose(1, 2).unflatten(2, (x.height, -1))
    y = tokens + F.conv2d(image, weight[:, None], padding=1, groups=len(weight)).flatten(2).transpose(1, 2)
    return torch.stack([y, F.layer_norm(y, gamma.shape, gamma, beta, x.eps)]).to(x.tokens.dtype)


def scan_convs_formula(x: ScanConvs) -> Tensor:
    """Return k and q, (2,B,T,2D): causal depth-wise convolutions of each direction in its own scan order."""
    dtype = compute_dtype(x.x.dtype)
    forth, back = x.x.to(dtype).chunk(2, -1)
    padded = torch.cat([F.pad(forth, (0, 0, TAPS - 1, 0)), F.pad(back, (0, 0, 0, TAPS - 1))], -1).transpose(1, 2)
    outs = []
    for weight, bias in ((x.k_weight, x.k_bias), (x.q_weight, x.q_bias)):
        # conv1d slides forward: the taps of the direction that scans backward are reversed
        ordered = torch.cat([weight[: len(weight) // 2], weight[len(weight) // 2 :].flip(1)]).to(dtype)
        outs.append(F.conv1d(padded, ordered[:, None], bias.to(dtype), groups=len(weight)).transpose(1, 2))
    return torch.stack(outs).to(x.x.dtype)


def gated_norm_formula(x: GatedNorm) -> Tensor:
    """Return GELU(gate) ⊙ LN(Σ_r z_r), (B,T,D), with the tanh approximation of GELU."""
    dtype = compute_dtype(x.z.dtype)
    z, gate, weight, bias = (each.to(dtype) for each in x[:4])
    return (F.gelu(gate, approximate="tanh") * F.layer_norm(z.sum(2), weight.shape, weight, bias, x.eps)).to(x.z.dtype)


def gated_linear_formula(x: GatedLinear) -> Tensor:
    """Return SiLU(a) ⊙ b with [a, b] = x Wᵀ + bias, then eight columns of ones: (B,T,F+8)."""
    dtype = compute_dtype(x.x.dtype)
    a, b = F.linear(x.x.to(dtype), x.weight.to(dtype), x.bias.to(dtype)).chunk(2, -1)
    out = F.silu(a) * b
    return torch.cat([out, torch.ones_like(out[..., :1]).expand(*out.shape[:-1], ONES)], -1).to(x.x.dtype)
