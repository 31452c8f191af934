"""Multi-scale deformable attention in Triton: the forward pass, and what it shares with the backward pass.

A row is one head of one query. A program takes the points of some rows one after the other. For each point, the channels of all four
neighbours are loaded at once, and a thread has a few neighbouring channels of a row, which it loads together. Rows that follow each
other are the heads of one query, and these lie side by side in the value, too.

The levels' sizes are plain arguments and not compile-time constants, so that images of a new size compile nothing; hence the bound
on the number of levels. Coordinates, samples and sums are fp32.

Shape letters: B images, S tokens of all levels, Q queries, M heads, L levels, P points, C channels of a head.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = torch.float32, torch.float16, torch.bfloat16
MAX_LEVELS = 4
MAX_HEAD_DIM = 256
SIZES = [f"{side}{level}" for level in range(MAX_LEVELS) for side in "hw"]


@triton.jit
def pixel_coordinates(locations_ptr, sample, there, h, w):
    """(x, y) of samples on a map of h rows and w columns; far outside of it for those that are not `there`."""
    x = tl.load(locations_ptr + 2 * sample, mask=there, other=-8.0)
    y = tl.load(locations_ptr + 2 * sample + 1, mask=there, other=-8.0)
    return x * w - 0.5, y * h - 0.5


@triton.jit
def cell_of(x, y, h, w):
    """The row and the column of the upper left neighbour, from −1 on, and whether any neighbour is on the map; 0, 0 where none is.

    A point that is far away need not fit an int. The shares that follow from 0, 0 are shares of zeros; those of a NaN are NaN, which
    shows in the output.
    """
    near = (x >= -1.0) & (x < w) & (y >= -1.0) & (y < h)
    return tl.where(near, tl.floor(y), 0.0).to(tl.int32), tl.where(near, tl.floor(x), 0.0).to(tl.int32), near


@triton.jit
def load_pixel(map_ptr, i, j, near, h, w, c, M: tl.constexpr, C: tl.constexpr):
    """The channels of pixel (i, j) of each row's map in fp32, zeros outside."""
    inside = near & (i >= 0) & (i < h) & (j >= 0) & (j < w)
    at = map_ptr + (i * w + j).to(tl.int64) * (M * C)
    return tl.load(at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "S", "Q", "bucket", *SIZES])
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
    tl.store(out_ptr + row[:, None] * C + c[None, :], out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (c < C)[None, :])


def unsupported(dtype: torch.dtype, head_dim: int, levels: int) -> str | None:
    """Why these kernels cannot run these sizes of this dtype, or None where they can."""
    if dtype not in DTYPES:
        return f"value is {dtype}, expected one of {', '.join(map(str, DTYPES))}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "value is torch.bfloat16, which Triton's interpreter does not have; expected torch.float32 or torch.float16"
    if head_dim > MAX_HEAD_DIM:
        return f"C is {head_dim}, expected at most {MAX_HEAD_DIM}"
    return f"there are {levels} levels, expected at most {MAX_LEVELS}" if levels > MAX_LEVELS else None


def configs(head_dim: int) -> list[triton.Config]:
    """The candidates of the kernels by rows; the first is the default, which runs untuned.

    A program has as many rows as give each thread 8 channels, 8 in four warps, 4, or 16.
    """
    width = triton.next_power_of_2(head_dim)
    found = ((max(1, channels * 32 * warps // width), warps) for channels, warps in ((8, 1), (8, 4), (4, 1), (16, 1)))
    return [triton.Config({"ROWS": rows}, num_warps=warps, num_stages=1) for rows, warps in dict.fromkeys(found)]


def launch(
    kernel,
    candidates: Callable[[int], list[triton.Config]],
    grid: Callable,
    arguments: dict[str, object],
    device: torch.device,
    config: triton.Config | None,
) -> None:
    """Run `kernel` with `config`; without one, tune it, or take the first candidate where torch is to be deterministic."""
    here: AbstractContextManager = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with here:
        if config is None and not INTERPRETED and not torch.are_deterministic_algorithms_enabled():
            tuned(kernel, candidates, arguments["C"])[grid](**arguments)
            return
        config = config or candidates(arguments["C"])[0]
        kernel[grid](**arguments, **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages)


@functools.cache
def tuned(kernel, candidates, head_dim: int):
    """The kernel with its candidates, tuned per bucket of the number of samples, heads, levels, points and dtypes; kept on disk."""
    return triton.autotune(candidates(head_dim), key=["bucket", "M", "C", "L", "P"], cache_results=True)(kernel)


def shared_arguments(value: Tensor, shapes: Sequence[int], locations: Tensor, weights: Tensor) -> dict[str, object]:
    """The arguments that the kernels by rows take: contiguous tensors, locations and weights in fp32, and the sizes.

    `bucket` is the power of two of the number of samples: the best config depends on how full the device is.
    """
    B, Q, M, L, P = weights.shape
    levels = dict(zip(SIZES, [*shapes, *[1] * (len(SIZES) - len(shapes))], strict=True))
    return {
        "value_ptr": value.contiguous(),
        "locations_ptr": locations.float().contiguous(),
        "weights_ptr": weights.float().contiguous(),
        "rows": B * Q * M,
        "S": value.shape[1],
        "Q": Q,
        "bucket": weights.numel().bit_length(),
        **levels,
        "M": M,
        "C": value.shape[3],
        "L": L,
        "P": P,
        "WIDTH": triton.next_power_of_2(value.shape[3]),
    }


def by_rows(rows: int) -> Callable:
    """The grid of the kernels by rows."""
    return lambda meta: (triton.cdiv(rows, meta["ROWS"]),)


def forward(value: Tensor, shapes: Sequence[int], locations: Tensor, weights: Tensor, config: triton.Config | None = None) -> Tensor:
    """out (B,Q,M,C) in value's dtype, of value (B,S,M,C), `shapes` h, w, h, w, …, locations (B,Q,M,L,P,2), weights (B,Q,M,L,P).

    `config` is one of `configs`; None tunes.
    """
    arguments = shared_arguments(value, shapes, locations, weights)
    out = value.new_empty((*weights.shape[:3], value.shape[3]))
    grid = by_rows(arguments["rows"])
    launch(forward_kernel, configs, grid, arguments | {"out_ptr": out}, value.device, config)
    return out
