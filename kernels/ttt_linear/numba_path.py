"""TTT-Linear on CPUs, by the loops of `cpu_learner`. Shape letters as in `reference`.

`repro.models.fused_block` lays out a block's weights by `join_state` and `lay_taps`, and `fused_loops` runs the loop on
them by `run_learn`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import threads
from ..cpu_learner import learn_backward, learn_forward
from ..cpu_loops import Loop
from ..dispatch import compute_dtype
from .reference import Arguments, segment_length, states_shape

__all__ = ["backward", "forward", "states_shape"]


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """Return out (B,T,R,H,D) in q's dtype; states in the compute dtype, of shape `states_shape`."""
    given, options = _prepare(x)
    nothing = given[3].new_empty(2, 0, 0, 0, 0), given[3].new_empty(2, 0, 0, 0)
    out, states = run_learn([*given, *nothing], options, x.q.shape, states_shape(x.q.shape, x.chunk_size, keep_states))
    return out.to(x.q.dtype), states


def run_learn(
    given: Sequence[Any], options: Sequence[Any], shape: Sequence[int], kept: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return out (B,T,R,H,D) of shape `shape` and states of shape `kept`.

    `given` has the tensors of `_prepare` and then the taps of `lay_taps`, or taps without elements; `options` is that
    of `find_options`. `kept` is `states_shape` for the T and chunk size of the options, or has no elements. What has no
    elements still has all its axes, see `cpu_loops.Loop.share`.
    """
    out, states = given[3].new_empty(shape), given[3].new_empty(kept)
    _run(learn_forward, shape, *given, out, states, *options)
    return out, states


def backward(dout: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, ... ln_bias, each in its input's shape and dtype.

    `dout` is (B,T,R,H,D), `states` those of `forward`.
    """
    given, options = _prepare(x)
    B, T, R, H, D = x.q.shape
    dq, dk, dv = (states.new_empty(x.q.shape) for _ in range(3))
    drate = dq.new_empty(B, T, R, H)
    dscale, dstate, dgamma, dmu = (dq.new_zeros(B, R, H, *shape) for shape in ((x.chunk_size,), (D + 1, D), (D,), (D,)))
    results = dq, dk, dv, drate, dscale, dstate, dgamma, dmu
    _run(learn_backward, x.q.shape, *given, threads.lay_flat(dout.to(dq.dtype)), states, *results, *options)
    dstate = dstate.sum(0)
    dW, db = dstate[:, :, :D].clone(), dstate[:, :, D].clone()  # the results of an operator must not share memory
    gradients = dq, dk, dv, drate.sum(2), dscale.sum((0, 2)), dW, db, dgamma.sum(0), dmu.sum(0)
    return tuple(gradient.to(like.dtype) for gradient, like in zip(gradients, x[:9], strict=True))


def _prepare(x: Arguments) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the arguments of the loops before their results, and those after them, in the compute dtype.

    The first are [q, k, v, lr, scale, state, gamma, mu]; q, k and v are not copied if they have that dtype.
    """
    dtype = compute_dtype(x.q.dtype)
    q, k, v = (threads.lay_flat(each.to(dtype)) for each in x[:3])
    lr, scale, W, b, gamma, mu = (each.to(dtype).contiguous() for each in x[3:9])
    state = join_state(W, b)
    return [q, k, v, lr, scale, state, gamma, mu], find_options(x.q.shape[1], x.chunk_size, x.reverse, state, x.eps)


def join_state(W: Tensor, b: Tensor) -> Tensor:
    """Return the start state (R,H,D+1,D): W with b below it.

    The mean of each row is subtracted. The LayerNorms do not see it, and the loop's norm of an output subtracts none.
    """
    state = torch.cat([W, b.unsqueeze(-2)], -2)
    return (state - state.mean(-1, keepdim=True)).contiguous()


def lay_taps(
    k_weight: Tensor, k_bias: Tensor, q_weight: Tensor, q_bias: Tensor, heads: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the convolutions' weights as (2,R,H,4,D) and biases as (2,R,H,D), k's and then q's.

    The weights are given as (RHD,4), the biases as (RHD,); `heads` is (R,H,D).
    """
    weights, biases = (torch.stack(pair).unflatten(1, heads) for pair in ((k_weight, q_weight), (k_bias, q_bias)))
    return weights.mT.contiguous(), biases


def find_options(T: int, chunk_size: int, reverse: Sequence[bool], state: Tensor, eps: float) -> tuple[Any, ...]:
    """Return the last arguments of the loops: directions, tokens of a segment, and eps in the dtype of the state.

    A Python float would be fp64 in the loop.
    """
    return np.array(reverse, np.int64), segment_length(T, chunk_size), state.numpy().dtype.type(eps)


def _run(loop: Loop, shape: Sequence[int], *arguments: Any) -> None:
    """Run a loop of `cpu_learner` for q of shape (B,T,R,H,D); a task is one direction and head of one image."""
    B, _, R, H, D = shape
    # the length of a tuple is part of its type, so numba compiles the loop for this D
    threads.run_loop(loop, B * R * H, *arguments, constants=((False,) * D,))
