"""The operators around the scan in Triton: the forward passes.

All are limited by memory: each reads its inputs and writes its output once. Values are fp32 in registers, one program
for a few tokens and, where a norm needs a whole row, all channels. Rows may be longer than what is used of them: gate
and x are slices of a projection's output, taken as they lie. Shape letters as in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import ceil_div, dtype_obstacle, launch, next_power_of_2
from ..triton_math import sigmoid
from .reference import ONES, ConvNorm, GatedLinear, GatedNorm, ScanConvs

INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = torch.float32, torch.float16, torch.bfloat16
_LEAST_TOKENS = 32  # of a program of the causal convolutions


@triton.jit
def normalise(y, D: tl.constexpr, inside, eps):
    """Rows of y with mean 0 and variance 1, over the D channels that are inside, and 1/σ."""
    x = tl.where(inside, y - (tl.sum(y, 1) / D)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * rstd[:, None], rstd


@triton.jit
def gelu(g):
    """GELU with the tanh approximation, and the sigmoid 1/(1 + e^{−2u}) that it is g times."""
    s = sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return g * s, s


@triton.jit
def load_wide(weight_ptr, like, D: tl.constexpr):
    """A weight (D,) in fp32, repeated for each row of `like` (rows,width), where each thread has what its own elements
    take: nothing passes between threads.
    """
    at = tl.zeros_like(like).to(tl.int32) + tl.arange(0, like.shape[1])[None, :]
    return tl.load(weight_ptr + at, mask=at < D, other=0.0).to(tl.float32)


@triton.jit
def load_column(tokens_ptr, middle, x, width, above, here, below, D: tl.constexpr):
    """Column x of the grid in three rows, whose first columns lie a row before `middle`, there, and a row behind."""
    some = (x >= 0) & (x < width)
    row = width.to(tl.int64) * D
    at = tokens_ptr + middle + tl.cast(x, tl.int64) * D
    return (
        tl.load(at - row, mask=above & some, other=0.0),
        tl.load(at, mask=here & some, other=0.0),
        tl.load(at + row, mask=below & some, other=0.0),
    )


@triton.jit(do_not_specialize=["T", "width", "bucket"])
def conv_norm_kernel(
    tokens_ptr,
    taps_ptr,
    gamma_ptr,
    beta_ptr,
    y_ptr,
    out_ptr,
    T,
    width,
    eps,
    bucket,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOOP: tl.constexpr,
):
    """ROWS rows of the grid, LOOP columns from left to right; y, and its norm in `out`. The taps are (9,D).

    A column is loaded once, one step ahead, and added to its own sum and to those of its neighbours: a thread carries
    two sums of each of its channels.
    """
    parts = (width + LOOP - 1) // LOOP
    b = tl.program_id(1).to(tl.int64)
    y = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % parts * LOOP
    c = tl.arange(0, WIDTH)
    height = T // width
    here = (y < height)[:, None] & (c < D)[None, :]
    above = here & (y > 0)[:, None]
    below = here & (y + 1 < height)[:, None]
    middle = (b * T + y[:, None] * width) * D + c[None, :]
    like = tl.zeros((ROWS, WIDTH), tl.float32)
    k00 = load_wide(taps_ptr, like, D)
    k01 = load_wide(taps_ptr + D, like, D)
    k02 = load_wide(taps_ptr + 2 * D, like, D)
    k10 = load_wide(taps_ptr + 3 * D, like, D)
    k11 = load_wide(taps_ptr + 4 * D, like, D) + 1.0  # the token itself is added too
    k12 = load_wide(taps_ptr + 5 * D, like, D)
    k20 = load_wide(taps_ptr + 6 * D, like, D)
    k21 = load_wide(taps_ptr + 7 * D, like, D)
    k22 = load_wide(taps_ptr + 8 * D, like, D)
    gamma = load_wide(gamma_ptr, like, D)
    beta = load_wide(beta_ptr, like, D)
    left0, left1, left2 = load_column(tokens_ptr, middle, first - 1, width, above, here, below, D)
    own0, own1, own2 = load_column(tokens_ptr, middle, first, width, above, here, below, D)
    new0, new1, new2 = load_column(tokens_ptr, middle, first + 1, width, above, here, below, D)
    last = k00 * left0.to(tl.float32) + k10 * left1.to(tl.float32) + k20 * left2.to(tl.float32)
    last += k01 * own0.to(tl.float32) + k11 * own1.to(tl.float32) + k21 * own2.to(tl.float32)
    current = k00 * own0.to(tl.float32) + k10 * own1.to(tl.float32) + k20 * own2.to(tl.float32)
    for j in tl.range(0, LOOP):
        x = first + j
        up, own, down = new0.to(tl.float32), new1.to(tl.float32), new2.to(tl.float32)
        new0, new1, new2 = load_column(tokens_ptr, middle, x + 2, width, above, here, below, D)
        sums = last + k02 * up + k12 * own + k22 * down
        last = current + k01 * up + k11 * own + k21 * down
        current = k00 * up + k10 * own + k20 * down
        inside = here & (x < width)
        at = middle + tl.cast(x, tl.int64) * D
        tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=inside)
        normed, _ = normalise(sums, D, (c < D)[None, :], eps)
        tl.store(out_ptr + at, (normed * gamma + beta).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "bucket"])
def scan_convs_kernel(
    x_ptr,
    taps_ptr,
    k_bias_ptr,
    q_bias_ptr,
    out_ptr,
    T,
    rows,
    size,
    bucket,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token of x has `rows` numbers, of which 2·D are used; `size` is B·T·2·D, the distance from k to q. The i-th of
    the `taps` (`lay_taps`) is 3 − i tokens back.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(2).to(tl.int64)
    some = c < 2 * D
    back = tl.where(c < D, -1, 1)
    k = tl.load(k_bias_ptr + c, mask=some, other=0.0).to(tl.float32)[None, :] + tl.zeros((TOKENS, BLOCK), tl.float32)
    q = tl.load(q_bias_ptr + c, mask=some, other=0.0).to(tl.float32)[None, :] + tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in tl.static_range(4):
        at = t[:, None] + (3 - i) * back[None, :]
        x = tl.load(x_ptr + (b * T + at) * rows + c[None, :], mask=(at >= 0) & (at < T) & some[None, :], other=0.0).to(
            tl.float32
        )
        k += x * tl.load(taps_ptr + i * 2 * D + c, mask=some, other=0.0).to(tl.float32)[None, :]
        q += x * tl.load(taps_ptr + (4 + i) * 2 * D + c, mask=some, other=0.0).to(tl.float32)[None, :]
    tile = (b * T + t[:, None]) * (2 * D) + c[None, :]
    inside = (t < T)[:, None] & some[None, :]
    tl.store(out_ptr + tile, k.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + size + tile, q.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "bucket"])
def gated_norm_kernel(
    z_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    count,
    rows,
    eps,
    bucket,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`count` is B·T; a token of the gate has `rows` numbers, of which D are used."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    here = (t < count)[:, None] & (c < D)[None, :]
    z = tl.load(z_ptr + t[:, None] * (2 * D) + c[None, :], mask=here, other=0.0).to(tl.float32)
    z += tl.load(z_ptr + t[:, None] * (2 * D) + D + c[None, :], mask=here, other=0.0).to(tl.float32)
    x, _ = normalise(z, D, here, eps)
    g, _ = gelu(tl.load(gate_ptr + t[:, None] * rows + c[None, :], mask=here, other=0.0).to(tl.float32))
    weight = tl.load(weight_ptr + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(bias_ptr + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + t[:, None] * D + c[None, :], (g * (x * weight + bias)).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["count", "bucket"])
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, count, eps, bucket, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Each of `count` rows with mean 0 and variance 1, times a weight, plus a bias."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    here = (t < count)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    x, _ = normalise(tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32), D, here, eps)
    weight = tl.load(weight_ptr + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(bias_ptr + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at, (x * weight + bias).to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def find_block(program, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of rows and of columns of a program of the product.

    Columns are fastest: programs that run at once share their rows of x, which come from memory once, and all have the
    weights, which the cache holds.
    """
    columns: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    return program // columns, program % columns


@triton.jit(do_not_specialize=["count", "bucket"])
def gated_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    count,
    bucket,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`count` is B·T, HIDDEN F, PAD the columns of ones. Both products of a tile of outputs share their tile of x."""
    rows, columns = find_block(tl.program_id(0), HIDDEN, BLOCK)
    t = rows.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = columns * BLOCK + tl.arange(0, BLOCK)
    if (columns + 1) * BLOCK >= HIDDEN:  # ones take no product: who has a row's last columns writes them behind
        ones = out_ptr + t[:, None] * (HIDDEN + PAD) + HIDDEN + tl.arange(0, PAD)[None, :]
        tl.store(ones, tl.full((TOKENS, PAD), 1.0, out_ptr.dtype.element_ty), mask=(t < count)[:, None])
    a = (
        tl.zeros((TOKENS, BLOCK), tl.float32)
        + tl.load(bias_ptr + c, mask=c < HIDDEN, other=0.0).to(tl.float32)[None, :]
    )
    b = (
        tl.zeros((TOKENS, BLOCK), tl.float32)
        + tl.load(bias_ptr + HIDDEN + c, mask=c < HIDDEN, other=0.0).to(tl.float32)[None, :]
    )
    for start in tl.range(0, D, DEPTH):
        d = start + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=(t < count)[:, None] & (d < D)[None, :], other=0.0)
        tile, some = weight_ptr + c[None, :] * D + d[:, None], (c < HIDDEN)[None, :] & (d < D)[:, None]
        a = tl.dot(x, tl.load(tile, mask=some, other=0.0), acc=a, input_precision="ieee")
        b = tl.dot(x, tl.load(tile + HIDDEN * D, mask=some, other=0.0), acc=b, input_precision="ieee")
    y = a * b * sigmoid(a)
    written = (t < count)[:, None] & (c < HIDDEN)[None, :]
    tl.store(out_ptr + t[:, None] * (HIDDEN + PAD) + c[None, :], y.to(out_ptr.dtype.element_ty), mask=written)


def unsupported(dtype: torch.dtype, leading: str) -> str | None:
    """Why these kernels cannot run activations of this dtype, the first called `leading`; None where they can."""
    return dtype_obstacle(leading, dtype, DTYPES)


def row_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """The candidates of the kernels that hold whole rows of `width` channels; the first is the untuned default."""
    rows = max(1, 2048 // next_power_of_2(width))
    return [
        triton.Config({"ROWS": each}, num_warps=4, num_stages=1)
        for each in dict.fromkeys((rows, max(1, rows // 2), 2 * rows))
    ]


def block_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """The candidates of the causal convolutions."""
    return [
        triton.Config({"TOKENS": tokens, "BLOCK": 64}, num_warps=4, num_stages=1)
        for tokens in (_LEAST_TOKENS, 2 * _LEAST_TOKENS)
    ]


def product_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """The candidates of the product with its activation."""
    if dtype == torch.float32:
        return [
            triton.Config({"TOKENS": 64, "BLOCK": 32, "DEPTH": depth}, num_warps=4, num_stages=2) for depth in (16, 32)
        ]
    sizes = (128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 3)
    return [
        triton.Config({"TOKENS": tokens, "BLOCK": block, "DEPTH": 64}, num_warps=warps, num_stages=stages)
        for tokens, block, warps, stages in sizes
    ]


def row_stride(x: Tensor) -> int | None:
    """Numbers from one token of x (B,T,·) to the next, if this number describes its layout; else None."""
    B, T, _ = x.shape
    expected = (T * x.stride(1), x.stride(1), 1)
    return (
        x.stride(1)
        if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), expected, strict=True))
        else None
    )


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x (B,T,·) as it lies, or a copy where its layout has no such number, and its `row_stride`."""
    stride = row_stride(x) if x.shape[1] > 1 else None
    return (x, stride) if stride is not None else (x.contiguous(), x.shape[2])


def rows_bucket(x: Tensor) -> int:
    """The power of two of B·T, x (B,T,·): the best config depends on how full the device is."""
    return (x.shape[0] * x.shape[1]).bit_length()


def grid_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """The candidates of the convolution on the grid: a thread has eight channels, for which it holds the taps."""
    channels = next_power_of_2(width)
    return [
        triton.Config({"ROWS": max(1, 1024 // channels), "LOOP": loop}, num_warps=max(4, channels // 256), num_stages=1)
        for loop in (16, 8, 4)
    ]


def lay_taps(x: ScanConvs) -> Tensor:
    """The weights as (2,4,2D), k's and q's: neighbouring channels are loaded at once. No copy where they lie so."""
    k, q = x.k_weight.T, x.q_weight.T
    if k.is_contiguous() and q.is_contiguous() and q.data_ptr() == k.data_ptr() + k.nbytes and _share_memory(k, q):
        return k.as_strided((2, *k.shape), (k.numel(), *k.stride()))
    return torch.stack([k, q])


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def lay_grid_taps(x: ConvNorm) -> Tensor:
    """The weight as (9,D), row by row of the taps, likewise."""
    return x.weight.flatten(1).T.contiguous()


def conv_norm(x: ConvNorm, config: triton.Config | None = None) -> Tensor:
    """(2,B,T,D)."""
    out = x.tokens.new_empty(2, *x.tokens.shape)
    write_conv_norm(x, *out.unbind(0), config)
    return out


def write_conv_norm(x: ConvNorm, y: Tensor, out: Tensor, config: triton.Config | None = None) -> None:
    """Write the sum to y and its norm to out, both (B,T,D) and each in its own dtype."""
    B, T, D = x.tokens.shape
    tokens = x.tokens.contiguous()
    width = T // x.height
    arguments = {"taps_ptr": lay_grid_taps(x), "gamma_ptr": x.gamma.contiguous(), "beta_ptr": x.beta.contiguous()}
    arguments |= {"tokens_ptr": tokens, "y_ptr": y, "out_ptr": out, "T": T, "width": width, "eps": x.eps}
    arguments |= {"bucket": rows_bucket(tokens), "D": D, "WIDTH": next_power_of_2(D)}
    grid = lambda c: (ceil_div(x.height, c["ROWS"]) * ceil_div(width, c["LOOP"]), B)  # noqa: E731
    launch(conv_norm_kernel, grid_configs, (tokens.dtype, D), grid, arguments, tokens.device, config)


def scan_convs(x: ScanConvs, config: triton.Config | None = None) -> Tensor:
    """(2,B,T,2D)."""
    B, T, E = x.x.shape
    given, rows = as_rows(x.x)
    out = x.x.new_empty(2, B, T, E)
    arguments = {"taps_ptr": lay_taps(x), "k_bias_ptr": x.k_bias.contiguous(), "q_bias_ptr": x.q_bias.contiguous()}
    arguments |= {"x_ptr": given, "out_ptr": out, "T": T, "rows": rows, "size": B * T * E, "D": E // 2}
    arguments["bucket"] = rows_bucket(out[0])
    grid = lambda c: (ceil_div(T, c["TOKENS"]), ceil_div(E, c["BLOCK"]), B)  # noqa: E731
    launch(scan_convs_kernel, block_configs, (out.dtype, E), grid, arguments, out.device, config)
    return out


def gated_norm(x: GatedNorm, config: triton.Config | None = None) -> Tensor:
    """(B,T,D)."""
    B, T, D = x.gate.shape
    gate, rows = as_rows(x.gate)
    out = x.z.new_empty(B, T, D)
    arguments = {
        "z_ptr": x.z.contiguous(),
        "gate_ptr": gate,
        "weight_ptr": x.weight.contiguous(),
        "bias_ptr": x.bias.contiguous(),
    }
    arguments |= {
        "out_ptr": out,
        "count": B * T,
        "rows": rows,
        "eps": x.eps,
        "bucket": rows_bucket(gate),
        "D": D,
        "WIDTH": next_power_of_2(D),
    }
    launch(
        gated_norm_kernel,
        row_configs,
        (out.dtype, D),
        lambda c: (ceil_div(B * T, c["ROWS"]),),
        arguments,
        out.device,
        config,
    )
    return out


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """LayerNorm over the last axis of x (B,T,D), in `dtype`, unseen by autograd: faster than PyTorch's on short rows."""
    B, T, D = x.shape
    out = x.new_empty(x.shape, dtype=dtype)
    arguments = {"x_ptr": x.contiguous(), "weight_ptr": weight.contiguous(), "bias_ptr": bias.contiguous()}
    arguments |= {"out_ptr": out, "count": B * T, "eps": eps, "bucket": rows_bucket(x)}
    arguments |= {"D": D, "WIDTH": next_power_of_2(D)}
    grid = lambda c: (ceil_div(B * T, c["ROWS"]),)  # noqa: E731
    launch(norm_kernel, row_configs, (x.dtype, D), grid, arguments, x.device, None)
    return out


def gated_linear(x: GatedLinear, config: triton.Config | None = None) -> Tensor:
    """(B,T,F+8)."""
    (B, T, D), hidden = x.x.shape, len(x.weight) // 2
    out = x.x.new_empty(B, T, hidden + ONES)
    arguments = {
        "x_ptr": x.x.contiguous(),
        "weight_ptr": x.weight.to(out.dtype).contiguous(),
        "bias_ptr": x.bias.contiguous(),
    }
    arguments |= {"out_ptr": out, "count": B * T, "D": D, "HIDDEN": hidden, "PAD": ONES}
    arguments["bucket"] = rows_bucket(out)
    grid = lambda c: (ceil_div(B * T, c["TOKENS"]) * ceil_div(hidden, c["BLOCK"]),)  # noqa: E731
    launch(gated_linear_kernel, product_configs, (out.dtype, D), grid, arguments, out.device, config)
    return out
