"""Decompositions of the operators into plain PyTorch, for exported programs, which run without this package.

The number of graph nodes does not depend on the number of tokens: the recurrence along the sequence is PyTorch's
higher-order `scan` (ONNX's Scan). There is only the forward pass, for fp32 or fp64 inputs and a batch of any size. The
functions take the arguments of the custom ops: the operator's own, the backend and `keep_states`.

Shape letters: B images, T tokens, R directions, G = B·R·H groups, and those of each operator's own module.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from . import bi_wkv, selective_scan, ttt_linear  # noqa: F401  registers the operators
from .ttt_linear.reference import inner_gradient, normalise
from .ttt_linear.torch_path import scan_order


def ttt_linear_by_scan(*values: Any) -> tuple[Tensor, Tensor]:
    """Compute the dual form of `ttt_linear.reference`, one chunk per step.

    The tokens that pad the last chunk have a learning rate of 0, and therefore change nothing.
    """
    q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps, _, _ = values
    B, T, R, H, D = q.shape
    n = min(chunk_size, T)
    m = (T + n - 1) // n  # not -(-T // n): ONNX rounds the quotient of a negative dividend towards 0

    def per_group(x: Tensor) -> Tensor:
        """Repeat a parameter for every image: (R,H,...) -> (G,...)."""
        return x.expand(B, *x.shape).flatten(0, 2)

    def step(W, b, tokens, c, gamma, mu):
        """Learn from a chunk: return the next W (G,D,D) and b (G,1,D), and the outputs (G,n,D)."""
        Q, K, V, rate = tokens.split((D, D, D, 1), -1)
        G, _ = inner_gradient(torch.bmm(K, W) + b, V - K, gamma, mu, eps)
        A = c * rate.mT * (torch.bmm(Q, K.mT) + 1)
        out = Q + gamma * normalise(torch.bmm(Q, W) + b - torch.bmm(A, G), eps)[0] + mu
        learned = c[:, -1:, :1] * rate * G
        return W - torch.bmm(K.mT, learned), b - learned.sum(-2, keepdim=True), out

    c = per_group(token_scale[:, None, :n, None].expand(R, H, n, n)).tril()
    W, b, gamma, mu = (per_group(x) for x in (W0, b0.unsqueeze(2), ln_weight.unsqueeze(2), ln_bias.unsqueeze(2)))
    # q, k, v and lr of a token are one tensor, since tracing takes time for every node of the graph
    tokens = torch.cat((q, k, v, lr[:, :, None, :, None].expand(B, T, R, H, 1)), -1)
    tokens = F.pad(scan_order(tokens, reverse), (0, 0, 0, 0, 0, 0, 0, m * n - T))
    tokens = tokens.unflatten(1, (m, n)).permute(1, 0, 3, 4, 2, 5).flatten(1, 3)  # (m,G,n,·), in scan order
    out = scan_op(step, [W, b], [tokens], [c, gamma, mu])[-1]  # (m,G,n,D)
    out = out.unflatten(1, (B, R, H)).permute(1, 0, 4, 2, 3, 5).flatten(1, 2)[:, :T]
    return scan_order(out, reverse), q.new_empty(0)


def selective_scan_by_scan(*values: Any) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of `selective_scan.reference`, one token per step.

    `full_precision` changes nothing for fp32 and fp64.
    """
    u, delta, A, B, C, D, z, delta_bias, reverse, _, _, _ = values
    u = u.repeat(1, 1, len(reverse) // u.shape[2], 1)

    def step(h, u, delta, B, C, A):
        """Return the next state (B,R,E,N) and the token's output (B,R,E)."""
        h = torch.exp(delta[..., None] * A) * h + (delta * u)[..., None] * B[:, :, None]
        return h, (h * C[:, :, None]).sum(-1)

    # (T,B,R,·)
    xs = [scan_order(x, reverse).transpose(0, 1).contiguous() for x in (u, F.softplus(delta + delta_bias), B, C)]
    h = u.new_zeros(u.shape[0], *A.shape)
    y = scan_order(scan_op(step, [h], xs, [A.clone()])[-1].transpose(0, 1), reverse) + D * u
    return y if z is None else y * F.silu(z.unsqueeze(2)), u.new_empty(0)


def bi_wkv_by_scan(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, backend: str, keep_states: bool
) -> tuple[Tensor, Tensor]:
    """Compute the equation of `bi_wkv.reference` from two sums, over the tokens before t and over those after t.

    The scan runs one token per step, and keeps each sum without the factor of its largest exponent, e^p. Token t itself
    is added last.
    """

    def step(p, numerator, denominator, k, v, w):
        """Return the sums after a token, and those before it, each (B,2,C) and without the factor e^p."""
        top = torch.maximum(p - w, k)
        old, new = torch.exp(p - w - top), torch.exp(k - top)
        # `scan` allows no output that aliases an input, hence the clones
        return (
            top,
            old * numerator + new * v,
            old * denominator + new,
            p.clone(),
            numerator.clone(),
            denominator.clone(),
        )

    # (T,B,2,C)
    both = [scan_order(torch.stack((x, x), 2), (False, True)).transpose(0, 1).contiguous() for x in (k, v)]
    zero = torch.zeros_like(both[0][0])
    sums = scan_op(step, [zero - torch.inf, zero, zero.clone()], both, [w.clone()])[3:]
    p, numerator, denominator = (scan_order(x.transpose(0, 1), (False, True)) for x in sums)
    p = torch.cat((p, (k + u).unsqueeze(2)), 2)
    weight = torch.exp(p - p.amax(2, keepdim=True))
    numerator = torch.cat((numerator, v.unsqueeze(2)), 2)
    denominator = torch.cat((denominator, torch.ones_like(v).unsqueeze(2)), 2)
    return (weight * numerator).sum(2) / (weight * denominator).sum(2), k.new_empty(0)


def _conv2d(x, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    """Compute a convolution; if `groups` depends on the batch size, compute a sum over shifted images.

    Such a convolution has windows of its own for each image of the batch. ONNX requires a constant `groups`. The sum
    leaves out bias, stride and dilation, which the inner convolution of ViT³, the one such case, does not have.
    """
    if not isinstance(groups, torch.SymInt):
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, (0, 0), groups)
    channels, height, width = weight.shape[1:]
    shifts = _shifts(x, height, width, padding)
    if channels == 1:
        return sum(shifted * weight[:, 0, i, j, None, None] for i, j, shifted in shifts)
    windows = weight.unflatten(0, (-1, channels))
    products = (
        torch.einsum("bgchw,goc->bgohw", shifted.unflatten(1, (-1, channels)), windows[..., i, j])
        for i, j, shifted in shifts
    )
    return sum(products).flatten(1, 2)


def _convolution_backward(
    dout, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """Compute the weight's gradient of `_conv2d`'s own case: Σ_p x[p + offset] dout[p] for each offset.

    The forward pass of ViT³ has it, as the gradient by which its inner convolution learns. Any other case is
    NotImplemented: the exporter leaves it as it is.
    """
    if not isinstance(groups, torch.SymInt) or list(output_mask) != [False, True, False]:
        return NotImplemented
    channels, height, width = weight.shape[1:]
    shifts = [shifted for _, _, shifted in _shifts(x, height, width, padding)]
    if channels == 1:
        sums = [(shifted * dout).sum((0, -2, -1)) for shifted in shifts]
    else:
        errors = dout.unflatten(1, (-1, channels))
        sums = [torch.einsum("bgohw,bgchw->goc", errors, x.unflatten(1, (-1, channels))) for x in shifts]
    return None, torch.stack(sums, -1).view(-1, channels, height, width), None


def _shifts(x: Tensor, height: int, width: int, padding: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (row, column, image shifted by them) for each element of a window."""
    rows, columns = x.shape[-2:]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows, columns = rows + 2 * padding[0] - height + 1, columns + 2 * padding[1] - width + 1
    for i in range(height):
        for j in range(width):
            yield i, j, padded[..., i : i + rows, j : j + columns]


# for `torch.export.ExportedProgram.run_decompositions`; a program that is exported, a classifier's on a CPU, has none
# of the other operators
DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.vision_ttt.ttt_linear.default: ttt_linear_by_scan,
    torch.ops.vision_ttt.selective_scan.default: selective_scan_by_scan,
    torch.ops.vision_ttt.bi_wkv.default: bi_wkv_by_scan,
    torch.ops.aten.conv2d.default: _conv2d,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
}
