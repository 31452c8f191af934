"""TTT-Linear on CPUs, by the loops of `cpu_learner`. Shape letters as in `reference`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import threads
from ..cpu_learner import learn, learn_backward
from ..cpu_loops import Loop
from ..dispatch import compute_dtype
from .reference import Arguments, segment_length, states_shape

__all__ = ["backward", "forward", "states_shape"]


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """out (B,T,R,H,D) in q's dtype; states in the compute dtype, of shape `states_shape`."""
    given, options = _prepare(x)
    out = x.lr.new_empty(x.q.shape, dtype=compute_dtype(x.q.dtype))
    states = out.new_empty(states_shape(out.shape, x.chunk_size, keep_states))
    _run(learn, x, *given, out, states, *options)
    return out.to(x.q.dtype), states


def backward(dout: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor, ...]:
    """The gradients of q, k, ... ln_bias, each in its input's shape and dtype, from dout (B,T,R,H,D) and `forward`'s
    states.
    """
    given, options = _prepare(x)
    B, T, R, H, D = x.q.shape
    dq, dk, dv = (states.new_empty(x.q.shape) for _ in range(3))
    drate = dq.new_empty(B, T, R, H)
    dscale, dstate, dgamma, dmu = (dq.new_zeros(B, R, H, *shape) for shape in ((x.chunk_size,), (D + 1, D), (D,), (D,)))
    results = dq, dk, dv, drate, dscale, dstate, dgamma, dmu
    _run(learn_backward, x, *given, threads.lay_flat(dout.to(dq.dtype)), states, *results, *options)
    dstate = dstate.sum(0)
    dW, db = dstate[:, :, :D].clone(), dstate[:, :, D].clone()  # the results of an operator must not share memory
    gradients = dq, dk, dv, drate.sum(2), dscale.sum((0, 2)), dW, db, dgamma.sum(0), dmu.sum(0)
    return tuple(gradient.to(like.dtype) for gradient, like in zip(gradients, x[:9], strict=True))


def _prepare(x: Arguments) -> tuple[list[Any], tuple[Any, ...]]:
    """What the loops take before and behind their results, in the compute dtype; q, k and v are not copied for it."""
    dtype = compute_dtype(x.q.dtype)
    q, k, v = (threads.lay_flat(each.to(dtype)) for each in x[:3])
    lr, scale, W, b, gamma, mu = (each.to(dtype).contiguous() for each in x[3:9])
    state = torch.cat([W, b.unsqueeze(-2)], -2)
    state = (state - state.mean(-1, keepdim=True)).contiguous()
    span = segment_length(x.q.shape[1], x.chunk_size)
    options = np.array(x.reverse, np.int64), span, state.numpy().dtype.type(x.eps)
    return [q, k, v, lr, scale, state, gamma, mu], options


def _run(loop: Loop, x: Arguments, *arguments: Any) -> None:
    B, _, R, H, D = x.q.shape
    threads.run(loop, B * R * H, *arguments, constants=((False,) * D,))
