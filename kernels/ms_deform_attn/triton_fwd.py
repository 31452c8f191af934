"""Triton forward pass of multi-scale deformable attention, and the parts that it shares with the backward pass.

A row is one head of one query. A program takes the points of some rows in sequence. For each point, the channels of all
four neighbours are loaded at once. A thread has a few neighbouring channels of a row, which it loads together.
Consecutive rows are the heads of one query, which are also neighbours in the value.

The levels' sizes are plain arguments and not compile-time constants: images of a new size compile nothing. Therefore
the number of levels is bounded. Coordinates, samples and sums are fp32. Shape letters as in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import INTERPRETED as INTERPRETED  # callers find it here, as in any forward module
from ..triton_launch import ceil_div, dtype_obstacle, launch, next_power_of_2
from ..triton_math import load_fp32
from .reference import Arguments

DTYPES = torch.float32, torch.float16, torch.bfloat16
MAX_LEVELS = 4  # the kernels have arguments for the sides of as many
MAX_HEAD_DIM = 256
# the kernels' arguments h0, w0, h1, …; they are not compiled in, so that a new size of images compiles nothing
SIZE_NAMES = [f"{side}{level}" for level in range(MAX_LEVELS) for side in "hw"]


@triton.jit
def pixel_coordinates(locations_ptr, sample, there, h, w):
    """Return (x, y) of samples on a map of h rows and w columns; far off the map for those that are not `there`."""
    x = tl.load(locations_ptr + 2 * sample, mask=there, other=-8.0)
    y = tl.load(locations_ptr + 2 * sample + 1, mask=there, other=-8.0)
    return x * w - 0.5, y * h - 0.5


@triton.jit
def cell_of(x, y, h, w):
    """Return row and column of the upper left neighbour, from −1 on, and whether any neighbour is on the map.

    If none is, they are 0, 0. The coordinates of a point far off the map need not fit an int. Its shares then weight
    pixels that load as zeros; those of a NaN are NaN, which shows in the output.
    """
    near = (x >= -1.0) & (x < w) & (y >= -1.0) & (y < h)
    return tl.where(near, tl.floor(y), 0.0).to(tl.int32), tl.where(near, tl.floor(x), 0.0).to(tl.int32), near


@triton.jit
def load_pixel(map_ptr, i, j, near, h, w, c, M: tl.constexpr, C: tl.constexpr):
    """Load the channels of pixel (i, j) of each row's map in fp32, zeros outside."""
    inside = near & (i >= 0) & (i < h) & (j >= 0) & (j < w)
    at = map_ptr + (i * w + j).to(tl.int64) * (M * C)
    return load_fp32(at[:, None] + c[None, :], inside[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["rows", "S", "Q", "bucket", *SIZE_NAMES])
def forward_kernel(
    value_ptr,
    locations_ptr,
    weights_ptr,
    out_ptr,
    rows,
    S,
    Q,
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
    """Write out. `bucket` is a key for tuning; WIDTH is C or the next power of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    there = row < rows
    map_ptr = value_ptr + (row // M // Q * S * M + row % M) * C
    sizes = (h0, w0, h1, w1, h2, w2, h3, w3)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for level in tl.static_range(L):
        h = sizes[2 * level]
        w = sizes[2 * level + 1]
        for p in tl.range(0, P):
            sample = (row * L + level) * P + p
            x, y = pixel_coordinates(locations_ptr, sample, there, h, w)
            i, j, near = cell_of(x, y, h, w)
            right, down = (x - j)[:, None], (y - i)[:, None]
            v00 = load_pixel(map_ptr, i, j, near, h, w, c, M, C)
            v01 = load_pixel(map_ptr, i, j + 1, near, h, w, c, M, C)
            v10 = load_pixel(map_ptr, i + 1, j, near, h, w, c, M, C)
            v11 = load_pixel(map_ptr, i + 1, j + 1, near, h, w, c, M, C)
            weight = tl.load(weights_ptr + sample, mask=there, other=0.0)[:, None]
            upper = v00 * (1.0 - right) + v01 * right
            lower = v10 * (1.0 - right) + v11 * right
            out += weight * (upper * (1.0 - down) + lower * down)
        map_ptr += tl.cast(h, tl.int64) * w * (M * C)
    tl.store(out_ptr + row[:, None] * C + c[None, :], out, mask=there[:, None] & (c < C)[None, :])


def unsupported(dtype: torch.dtype, head_dim: int, levels: int) -> str | None:
    """Return why these kernels cannot run these sizes of this dtype, or None."""
    if obstacle := dtype_obstacle("value", dtype, DTYPES):
        return obstacle
    if head_dim > MAX_HEAD_DIM:
        return f"C is {head_dim}, expected at most {MAX_HEAD_DIM}"
    return f"there are {levels} levels, expected at most {MAX_LEVELS}" if levels > MAX_LEVELS else None


def configs(head_dim: int) -> list[triton.Config]:
    """Return the candidates of the kernels by rows; the first is the default, which runs untuned.

    A program has as many rows as give each thread 8 channels in one warp, 8 in four warps, 4 in one, or 16 in one.
    """
    width = next_power_of_2(head_dim)
    found = ((max(1, channels * 32 * warps // width), warps) for channels, warps in ((8, 1), (8, 4), (4, 1), (16, 1)))
    return [triton.Config({"ROWS": rows}, num_warps=warps, num_stages=1) for rows, warps in dict.fromkeys(found)]


def shared_arguments(x: Arguments) -> dict[str, object]:
    """Return the arguments that the kernels by rows take.

    These are contiguous tensors, locations and weights in fp32, and the sizes. `bucket` is the bit length of the number
    of samples: the best config depends on how full the device is.
    """
    B, Q, M, L, P = x.weights.shape
    _, S, _, C = x.value.shape
    sizes = {"rows": B * Q * M, "S": S, "Q": Q, "M": M, "C": C, "L": L, "P": P, "WIDTH": next_power_of_2(C)}
    # sizes of levels that do not exist are 1; the kernels loop over L levels
    levels = dict(zip(SIZE_NAMES, [*x.shapes, *[1] * (len(SIZE_NAMES) - len(x.shapes))], strict=True))
    return {
        "value_ptr": x.value.contiguous(),
        "locations_ptr": x.locations.float().contiguous(),
        "weights_ptr": x.weights.float().contiguous(),
        "bucket": x.weights.numel().bit_length(),
        **sizes,
        **levels,
    }


def run_by_rows(kernel, arguments: dict[str, object], config: triton.Config | None) -> None:
    """Launch one of the kernels by rows, with the arguments of `shared_arguments` and its own."""

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (ceil_div(arguments["rows"], meta["ROWS"]),)

    launch(kernel, configs, (arguments["C"],), grid, arguments, arguments["value_ptr"].device, config)


def forward(x: Arguments, config: triton.Config | None = None) -> Tensor:
    """Return out (B,Q,M,C) in value's dtype. `config` is one of `configs`; None tunes."""
    out = x.value.new_empty((*x.weights.shape[:3], x.value.shape[3]))
    run_by_rows(forward_kernel, shared_arguments(x) | {"out_ptr": out}, config)
    return out
