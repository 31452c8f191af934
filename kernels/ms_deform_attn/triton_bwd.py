"""Triton backward pass of multi-scale deformable attention, in two kernels with a sort between them.

With g the gradient of a row's output, d_ij = Σ_c g value_ij for the neighbours (i, j) of a point (x, y), and share_ij =
(1 − |x − j|) (1 − |y − i|) their shares in it,

    dweight = Σ_ij share_ij d_ij        dx, dy = weight · Σ_ij (∂share_ij / ∂x, y) d_ij
    dvalue_ij = Σ weight · share_ij g

The first kernel works by rows, as the forward kernel does. It computes the gradients of weights and locations, and
writes down each sample's cell. That is the square between four pixels in which the sample lies; a map of h by w pixels
has h + 1 by w + 1 cells.

The gradient of the value adds up over all samples around a pixel. Atomics would do that in any order. Here the samples
are sorted by their cell, with torch's stable sort of one int for each. The second kernel works by pixels: a program for
each pixel and head adds up the samples of the four cells around it in their sorted order, and two runs give the same
bits. Neighbouring cells of a row follow each other in that order: the four cells are two stretches of it. Shape letters
as in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import launch, next_power_of_2
from ..triton_math import load_fp32
from .reference import Arguments
from .triton_fwd import SIZE_NAMES, cell_of, load_pixel, pixel_coordinates, run_by_rows, shared_arguments


@triton.jit
def over_channels(g, v):
    """Return Σ_c g v of each row."""
    return tl.sum(g * v, 1)


@triton.jit(do_not_specialize=["rows", "S", "Q", "cells", "bucket", *SIZE_NAMES])
def points_kernel(
    dout_ptr,
    value_ptr,
    locations_ptr,
    weights_ptr,
    dlocations_ptr,
    dweights_ptr,
    cells_ptr,
    rows,
    S,
    Q,
    cells,
    bucket,
    h0,
    w0,
    h1,
    w1,
    h2,
    w2,
    h3,
    w3,
    M: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write dlocations, dweights, and each sample's cell.

    Each image and head has `cells` of its own. A sample off the map gets the number after the last of all cells.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    there = row < rows
    image, head = row // M // Q, row % M
    map_ptr = value_ptr + (image * S * M + head) * C
    first = (image * M + head) * cells
    none = tl.cast(rows, tl.int64) // Q * cells
    g = load_fp32(dout_ptr + row[:, None] * C + c[None, :], there[:, None] & (c < C)[None, :])
    sizes = (h0, w0, h1, w1, h2, w2, h3, w3)
    for level in tl.static_range(L):
        h = sizes[2 * level]
        w = sizes[2 * level + 1]
        for p in tl.range(0, P):
            sample = (row * L + level) * P + p
            x, y = pixel_coordinates(locations_ptr, sample, there, h, w)
            i, j, near = cell_of(x, y, h, w)
            right, down = x - j, y - i
            d00 = over_channels(g, load_pixel(map_ptr, i, j, near, h, w, c, M, C))
            d01 = over_channels(g, load_pixel(map_ptr, i, j + 1, near, h, w, c, M, C))
            d10 = over_channels(g, load_pixel(map_ptr, i + 1, j, near, h, w, c, M, C))
            d11 = over_channels(g, load_pixel(map_ptr, i + 1, j + 1, near, h, w, c, M, C))
            weight = tl.load(weights_ptr + sample, mask=there, other=0.0)
            upper = d00 * (1.0 - right) + d01 * right
            lower = d10 * (1.0 - right) + d11 * right
            dx = weight * ((d01 - d00) * (1.0 - down) + (d11 - d10) * down)
            tl.store(dweights_ptr + sample, upper * (1.0 - down) + lower * down, mask=there)
            tl.store(dlocations_ptr + 2 * sample, dx * w, mask=there)
            tl.store(dlocations_ptr + 2 * sample + 1, weight * (lower - upper) * h, mask=there)
            cell = tl.where(near, first + (i + 1) * (w + 1) + (j + 1), none)
            tl.store(cells_ptr + sample, cell, mask=there)
        map_ptr += tl.cast(h, tl.int64) * w * (M * C)
        first += (h + 1) * (w + 1)


@triton.jit(do_not_specialize=["h", "w", "first", "first_cell", "S", "cells", "bucket"])
def value_kernel(
    dout_ptr,
    locations_ptr,
    weights_ptr,
    order_ptr,
    starts_ptr,
    dvalue_ptr,
    h,
    w,
    first,
    first_cell,
    S,
    cells,
    bucket,
    M: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    SAMPLES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write dvalue of one level, from token `first` and cell `first_cell` on.

    `starts` has the place of each cell's first sample in `order`.
    """
    program = tl.program_id(0)
    head, pixel, image = program % M, program // M % (h * w), (program // M // (h * w)).to(tl.int64)
    i, j = pixel // w, pixel % w
    c = tl.arange(0, WIDTH)
    dvalue = tl.zeros((SAMPLES, WIDTH), tl.float32)
    for below in tl.static_range(2):
        cell = (image * M + head) * cells + first_cell + (i + below) * (w + 1) + j
        # this cell and its right neighbour are one stretch of the order
        end = tl.load(starts_ptr + cell + 2)
        for n in tl.range(tl.load(starts_ptr + cell), end, SAMPLES):
            at = n + tl.arange(0, SAMPLES)
            there = at < end
            sample = tl.load(order_ptr + at, mask=there, other=0)
            x, y = pixel_coordinates(locations_ptr, sample, there, h, w)
            weight = tl.load(weights_ptr + sample, mask=there, other=0.0)
            share = tl.where(there, weight * (1.0 - tl.abs(x - j)) * (1.0 - tl.abs(y - i)), 0.0)
            from_row = dout_ptr + sample // (L * P) * C
            g = tl.load(from_row[:, None] + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0)
            dvalue += share[:, None] * g.to(tl.float32)
    to = dvalue_ptr + ((image * S + first + pixel) * M + head) * C + c
    tl.store(to, tl.sum(dvalue, 0), mask=c < C)


def configs(head_dim: int) -> list[triton.Config]:
    """Return the candidates of the kernel by pixels; the first is the default, which runs untuned."""
    found = (max(1, channels * 32 // next_power_of_2(head_dim)) for channels in (8, 16, 4))
    return [triton.Config({"SAMPLES": samples}, num_warps=1, num_stages=1) for samples in dict.fromkeys(found)]


def backward(
    dout: Tensor, x: Arguments, points_config: triton.Config | None = None, value_config: triton.Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of value, locations and weights, each in its input's shape and dtype, from dout (B,Q,M,C).

    `points_config` is one of `triton_fwd.configs`, `value_config` one of `configs`; None tunes.
    """
    value, shapes, locations, weights = x
    B, _, M, _, _ = weights.shape
    device = value.device
    levels = list(zip(shapes[::2], shapes[1::2], strict=True))
    cells = sum((h + 1) * (w + 1) for h, w in levels)
    arguments = shared_arguments(x)
    arguments |= {"dout_ptr": dout.to(value.dtype).contiguous(), "cells": cells}
    dvalue = value.new_empty(value.shape)
    dlocations, dweights = (like.new_empty(like.shape, dtype=torch.float32) for like in (locations, weights))
    # int32 halves the work of the sort where the cells fit it
    index = torch.int32 if B * M * cells < 2**31 else torch.int64
    cell_of_sample = torch.empty(weights.numel(), dtype=index, device=device)
    to_points = {"dlocations_ptr": dlocations, "dweights_ptr": dweights, "cells_ptr": cell_of_sample}
    run_by_rows(points_kernel, arguments | to_points, points_config)

    ordered, order = cell_of_sample.sort(stable=True)
    # one more than there are cells: the end of the last one
    starts = torch.searchsorted(ordered, torch.arange(B * M * cells + 1, dtype=index, device=device))
    taken = "dout_ptr", "locations_ptr", "weights_ptr", "S", "cells", "bucket", "M", "C", "L", "P", "WIDTH"
    arguments = {name: arguments[name] for name in taken} | {
        "order_ptr": order,
        "starts_ptr": starts,
        "dvalue_ptr": dvalue,
    }
    first = first_cell = 0
    for h, w in levels:
        arguments |= {"h": h, "w": w, "first": first, "first_cell": first_cell}
        launch(value_kernel, configs, (arguments["C"],), (B * h * w * M,), arguments, device, value_config)
        first, first_cell = first + h * w, first_cell + (h + 1) * (w + 1)
    return dvalue, dlocations.to(locations.dtype), dweights.to(weights.dtype)
