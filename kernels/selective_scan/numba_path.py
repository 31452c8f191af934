"""The selective scan on CPUs, by the loops of `cpu_scan`.

Activations are converted to the compute dtype, some images at a time; torch sums over images. Shape letters as in
`reference`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import cpu_scan, threads
from ..cpu_loops import BLOCK, GROUP
from ..dispatch import compute_dtype
from .reference import Arguments

_ELEMENTS = 2**20  # elements of an activation that are converted at once


def states_shape(shape: Sequence[int], state_dim: int, keep_states: bool) -> tuple[int, int, int, int, int]:
    """Return the shape of `forward`'s states for delta (B,T,R,E), one per group except the first.

    Takes symbolic sizes.
    """
    images, T, R, E = shape
    return images, (T + GROUP - 1) // GROUP - 1 if keep_states else 0, R, state_dim, E


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """Return out (B,T,R,E) in `x.out_dtype`; states in the compute dtype, of shape `states_shape`."""
    shape = x.delta.shape
    out = torch.empty(shape, dtype=x.out_dtype)
    states = torch.empty(states_shape(shape, x.A.shape[-1], keep_states), dtype=compute_dtype(x.u.dtype))
    for images in _blocks(shape):
        given, back, tasks, span = _prepare(x, images)
        y = out[images] if out.dtype == states.dtype else states.new_empty(out[images].shape)
        threads.run_loop(cpu_scan.scan_forward, tasks, span, *given, y, states[images], back)
        if out.dtype != states.dtype:
            out[images] = y
    return out, states


def backward(dout: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of u, delta, ... delta_bias, each in its input's shape and dtype.

    `dout` is (B,T,R,E), `states` those of `forward`.
    """
    K, N = x.u.shape[2], x.A.shape[-1]
    du, ddelta, dB, dC = (torch.empty(like.shape, dtype=like.dtype) for like in (x.u, x.delta, x.B, x.C))
    dz = None if x.z is None else torch.empty(x.z.shape, dtype=x.z.dtype)
    dA, dD, dbias = (torch.zeros(like.shape, dtype=states.dtype) for like in (x.A.mT, x.D, x.delta_bias))
    for images in _blocks(x.delta.shape):
        given, back, tasks, span = _prepare(x, images)
        b, T, R, E = shape = x.delta[images].shape
        of_u, of_delta, of_z = (
            states.new_empty(size) for size in (shape, shape, (0, 0, 0, 0) if dz is None else shape)
        )
        of_A, of_D, of_bias = (states.new_empty((b, *like.shape)) for like in (dA, dD, dbias))
        of_B, of_C = (states.new_empty((tasks // (b * R), b, T, R, N)) for _ in range(2))
        own_dout = dout[images].to(states.dtype).contiguous()
        results = of_u, of_delta, of_A, of_B, of_C, of_D, of_bias, of_z
        threads.run_loop(cpu_scan.scan_backward, tasks, span, *given, own_dout, states[images], back, *results)
        du[images] = of_u if K == R else of_u.unflatten(2, (-1, K)).sum(2)
        ddelta[images], dB[images], dC[images] = of_delta, of_B.sum(0), of_C.sum(0)
        if dz is not None:
            dz[images] = of_z.sum(2)
        for whole, parts in ((dA, of_A), (dD, of_D), (dbias, of_bias)):
            whole += parts.sum(0)
    return du, ddelta, dA.mT.contiguous().to(x.A.dtype), dB, dC, dD.to(x.D.dtype), dz, dbias.to(x.delta_bias.dtype)


def _blocks(shape: Sequence[int]) -> list[slice]:
    """Cut the images of delta (B,T,R,E) into parts of about `_ELEMENTS` elements."""
    images, T, R, E = shape
    step = max(1, _ELEMENTS // (T * R * E))
    return [slice(first, first + step) for first in range(0, images, step)]


def _prepare(x: Arguments, images: slice) -> tuple[tuple[Tensor, ...], np.ndarray, int, int]:
    """Return what the loops take of some images: (tensors, direction of each route, tasks, channels of a task).

    The tensors are in the loops' order, contiguous in the compute dtype, with A as exponents (R,N,E) of two.
    """
    dtype = compute_dtype(x.u.dtype)
    u, delta, B, C = (each[images].to(dtype).contiguous() for each in (x.u, x.delta, x.B, x.C))
    # an empty z, as an empty dz in `backward`, has all its axes, see `cpu_loops.Loop.share`
    z = u.new_empty(0, 0, 0) if x.z is None else x.z[images].to(dtype).contiguous()
    exponents = x.A.mT.to(dtype).contiguous() * math.log2(math.e)
    given = u, delta, exponents, B, C, x.D.to(dtype).contiguous(), x.delta_bias.to(dtype).contiguous(), z
    b, _, R, E = delta.shape
    return given, np.array(x.reverse, np.int64), *threads.split(b * R, E, BLOCK)
