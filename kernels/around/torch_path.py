"""The operators around the scan by PyTorch's own operations and their backward passes: what any device can run.

Shape letters as in `reference`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import (
    ONES,
    TAPS,
    ConvNorm,
    GatedLinear,
    GatedNorm,
    ScanConvs,
    conv_norm_formula,
    gated_linear_formula,
    gated_norm_formula,
    scan_convs_formula,
)

_ops = torch.ops.aten
_BOTH = [True, True, True]  # the gradients of input, weight and bias


def conv_norm(x: ConvNorm) -> Tensor:
    """(2,B,T,D)."""
    return conv_norm_formula(x)


def conv_norm_backward(dout: Tensor, x: ConvNorm) -> tuple[Tensor, ...]:
    """The gradients of tokens, weight, gamma and beta, each in its input's shape and dtype."""
    dtype = compute_dtype(x.tokens.dtype)
    tokens, weight, gamma, beta = (each.to(dtype) for each in x[:4])
    dy, dnorm = dout.to(dtype).unbind(0)
    image = tokens.transpose(1, 2).unflatten(2, (x.height, -1))
    y = tokens + F.conv2d(image, weight[:, None], padding=1, groups=len(weight)).flatten(2).transpose(1, 2)
    var, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
    g, dgamma, dbeta = _ops.native_layer_norm_backward(
        dnorm, y, gamma.shape, mean, (var + x.eps).rsqrt(), gamma, beta, _BOTH
    )
    g = g + dy
    dimage = g.transpose(1, 2).unflatten(2, (x.height, -1))
    given = weight[:, None], None, [1, 1], [1, 1], [1, 1], False, [0, 0], len(weight), [True, True, False]
    found, dweight, _ = _ops.convolution_backward(dimage, image, *given)
    dtokens = g + found.flatten(2).transpose(1, 2)
    return _as_given((dtokens, dweight[:, 0], dgamma, dbeta), x)


def scan_convs(x: ScanConvs) -> Tensor:
    """(2,B,T,2D)."""
    return scan_convs_formula(x)


def scan_convs_backward(dout: Tensor, x: ScanConvs) -> tuple[Tensor, ...]:
    """The gradients of x, and of k's and q's weight and bias."""
    dtype, half = compute_dtype(x.x.dtype), x.x.shape[-1] // 2
    forth, back = x.x.to(dtype).chunk(2, -1)
    padded = torch.cat([F.pad(forth, (0, 0, TAPS - 1, 0)), F.pad(back, (0, 0, 0, TAPS - 1))], -1).transpose(1, 2)
    dpadded, gradients = torch.zeros_like(padded), []
    for d, weight in ((dout[0], x.k_weight), (dout[1], x.q_weight)):
        ordered = torch.cat([weight[:half], weight[half:].flip(1)]).to(dtype)[:, None]
        given = ordered, [len(weight)], [1], [0], [1], False, [0], len(weight), _BOTH
        found, dweight, dbias = _ops.convolution_backward(d.to(dtype).transpose(1, 2), padded, *given)
        dpadded = dpadded + found
        gradients += [torch.cat([dweight[:half, 0], dweight[half:, 0].flip(1)]), dbias]
    T = x.x.shape[1]
    dx = torch.cat([dpadded[:, :half, TAPS - 1 :], dpadded[:, half:, :T]], 1).transpose(1, 2)
    return _as_given((dx, *gradients), x)


def gated_norm(x: GatedNorm) -> Tensor:
    """(B,T,D)."""
    return gated_norm_formula(x)


def gated_norm_backward(dout: Tensor, x: GatedNorm) -> tuple[Tensor, ...]:
    """The gradients of z, gate, weight and bias."""
    dtype = compute_dtype(x.z.dtype)
    z, gate, weight, bias, d = (each.to(dtype) for each in (*x[:4], dout))
    z = z.sum(2)
    norm, mean, rstd = _ops.native_layer_norm(z, weight.shape, weight, bias, x.eps)
    dgate = _ops.gelu_backward(d * norm, gate, approximate="tanh")
    d = d * F.gelu(gate, approximate="tanh")
    dz, dweight, dbias = _ops.native_layer_norm_backward(d, z, weight.shape, mean, rstd, weight, bias, _BOTH)
    return _as_given((dz.unsqueeze(2).expand(x.z.shape), dgate, dweight, dbias), x)


def gated_linear(x: GatedLinear) -> Tensor:
    """(B,T,F+8)."""
    return gated_linear_formula(x)


def gated_linear_backward(dout: Tensor, x: GatedLinear) -> tuple[Tensor, ...]:
    """The gradients of x, weight and bias."""
    dtype = compute_dtype(x.x.dtype)
    tokens, weight, bias, d = (each.to(dtype) for each in (*x, dout[..., :-ONES]))
    a, b = F.linear(tokens, weight, bias).chunk(2, -1)
    dh = torch.cat([_ops.silu_backward(d * b, a), d * F.silu(a)], -1)
    return _as_given((dh @ weight, dh.flatten(0, 1).T @ tokens.flatten(0, 1), dh.sum((0, 1))), x)


def _as_given(gradients: tuple[Tensor, ...], x: tuple) -> tuple[Tensor, ...]:
    """The gradients, contiguous and in the dtypes of the first arguments."""
    return tuple(gradient.contiguous().to(given.dtype) for gradient, given in zip(gradients, x, strict=False))
