"""Bi-WKV on CPUs, by the loops of `cpu_wkv`. Shape letters as in `reference`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import cpu_wkv, threads
from ..dispatch import compute_dtype
from .reference import EMPTY, Arguments, check_decay


def states_shape(shape: Sequence[int], keep_states: bool) -> tuple[int, ...]:
    """Return the shape of `forward`'s states for k (B,T,C): exponent and sum of an output's weights, and the output.

    Takes symbolic sizes. Without states it has as many axes, see `cpu_loops.Loop.share`.
    """
    B, T, C = shape
    return (B, T, 3, C) if keep_states else (0, 0, 0, 0)


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """Return out (B,T,C) in k's dtype, and states of shape `states_shape` in the compute dtype."""
    w, u, k, v = _arrays(x)
    out, states = torch.empty_like(k), k.new_empty(states_shape(k.shape, keep_states))
    threads.run_loop(cpu_wkv.wkv_forward, *_tasks(k.shape), w, u, k, v, out, states)
    return out.to(x.k.dtype), states


def backward(dout: Tensor, out: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of w, u, k, v, each in its input's shape and dtype, from dout and `forward`'s results.

    `out` is not read: it is rounded to k's dtype, and `states` has it in the compute dtype.
    """
    w, u, k, v = _arrays(x)
    dw, du = (k.new_empty(len(k), len(w)) for _ in range(2))
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dout = dout.to(k.dtype).contiguous()
    threads.run_loop(cpu_wkv.wkv_backward, *_tasks(k.shape), w, u, k, v, states, dout, dw, du, dk, dv)
    return tuple(each.to(given.dtype) for each, given in zip((dw.sum(0), du.sum(0), dk, dv), x, strict=True))


def _arrays(x: Arguments) -> tuple[Tensor, ...]:
    """Return w, u and k times log₂e, and v, contiguous in the compute dtype.

    The exponents k are at least `EMPTY`, the exponent of an empty sum.
    """
    w, u, k, v = (each.to(compute_dtype(x.k.dtype)) for each in x)
    check_decay(w, k.shape[1])
    log2e = 1 / math.log(2)
    return w * log2e, u * log2e, (k * log2e).clamp(min=EMPTY).contiguous(), v.contiguous()


def _tasks(shape: Sequence[int]) -> tuple[int, int]:
    """Return (tasks, channels of a task): all channels, unless there would be fewer tasks than threads."""
    B, _, C = shape
    return threads.split(B, C, cpu_wkv.BLOCK)
