"""TTT-Linear in PyTorch operations, for any device and any size: the chunks of `reference`, all directions at once.

The backward pass has the state at the start of every segment of chunks except the first. From the last segment to the
first it repeats a segment and takes its gradients by autograd: scratch memory is that of one segment. Shape letters as
in `reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..custom_op import recording
from ..dispatch import compute_dtype
from .reference import Arguments, scan_chunks, segment_length, states_shape

__all__ = ["backward", "forward", "states_shape"]


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """Return out (B,T,R,H,D) in q's dtype; states in the compute dtype, of shape `states_shape`."""
    tokens, (W, b), shared = _arrange(x)
    outs, states = [], []
    for segment in _cut(tokens, x):
        if outs and keep_states:
            states.append(torch.cat((W, b), -2))
        chunks, W, b = scan_chunks(*segment, W, b, *shared, chunk_size=x.chunk_size, eps=x.eps)
        outs += [out for out, _, _ in chunks]
    out = scan_order(torch.cat(outs, -2).permute(0, 3, 1, 2, 4), x.reverse).to(x.q.dtype).contiguous()
    return out, torch.stack(states, 3) if states else W.new_empty(states_shape(x.q.shape, x.chunk_size, False))


def backward(dout: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, ... ln_bias, each in its input's shape and dtype.

    `dout` is (B,T,R,H,D), `states` those of `forward`.
    """
    with recording():
        given = [each.detach().requires_grad_() for each in x if isinstance(each, Tensor)]
        tokens, start, shared = _arrange(Arguments(*given, *x[len(given) :]))
        dout = scan_order(dout.to(tokens[0].dtype), x.reverse).permute(0, 2, 3, 1, 4)
        d_end: Sequence[Tensor] = [torch.zeros_like(each) for each in start]
        d_shared, d_tokens = [torch.zeros_like(each) for each in shared], []
        segments = list(zip(_cut(tokens, x), dout.split(segment_length(x.q.shape[1], x.chunk_size), -2), strict=True))
        for number, (segment, d_segment) in reversed(list(enumerate(segments))):
            state = states[:, :, :, number - 1].split(x.q.shape[-1], -2) if number else start
            leaves = [each.detach().requires_grad_() for each in (*segment, *state, *shared)]
            chunks, *end = scan_chunks(*leaves, chunk_size=x.chunk_size, eps=x.eps)
            out = torch.cat([out for out, _, _ in chunks], -2)
            found = torch.autograd.grad((out, *end), leaves, (d_segment, *d_end))
            d_tokens.append(found[:4])
            d_end = found[4:6]
            d_shared = [total + part for total, part in zip(d_shared, found[6:], strict=True)]
        joined = [torch.cat(parts[::-1], 3) for parts in zip(*d_tokens, strict=True)]
        found = torch.autograd.grad((*tokens, *start, *shared), given, (*joined, *d_end, *d_shared))
    # copies, since the results of an operator must not share memory
    return tuple(gradient.detach().clone(memory_format=torch.contiguous_format) for gradient in found)


def _arrange(x: Arguments) -> tuple[list[Tensor], tuple[Tensor, Tensor], list[Tensor]]:
    """Return tokens, start state and shared parameters, in the compute dtype and in scan order.

    Tokens: Q, K, V (B,R,H,T,D) and rates (B,R,H,T). Start state: W (B,R,H,D,D) and b (B,R,H,1,D). Shared: scales
    (R,1,chunk_size), γ and μ (R,H,1,D).
    """
    B, T, R, H, _ = x.q.shape
    dtype = compute_dtype(x.q.dtype)
    # cast before the expansion: gradients of the directions are summed before they are rounded
    rate = x.lr.to(dtype).unsqueeze(2).expand(B, T, R, H)
    tokens = [scan_order(each.to(dtype), x.reverse).transpose(1, 2).transpose(2, 3) for each in (x.q, x.k, x.v, rate)]
    W, b = (each.to(dtype).expand(B, *each.shape) for each in (x.W0, x.b0.unsqueeze(2)))
    shared = x.token_scale.unsqueeze(1), x.ln_weight.unsqueeze(2), x.ln_bias.unsqueeze(2)
    return tokens, (W, b), [each.to(dtype) for each in shared]


def scan_order(x: Tensor, reverse: Sequence[bool]) -> Tensor:
    """Return (B,T,R,...) with the directions that scan backward flipped along T; its own inverse."""
    return torch.stack([part.flip(1) if back else part for part, back in zip(x.unbind(2), reverse, strict=True)], 2)


def _cut(tokens: list[Tensor], x: Arguments) -> list[tuple[Tensor, ...]]:
    """Return Q, K, V and rates of each segment."""
    length = segment_length(x.q.shape[1], x.chunk_size)
    return list(zip(*(each.split(length, 3) for each in tokens), strict=True))
