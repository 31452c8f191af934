"""Triton forward passes of the operators around the scan.

All are limited by memory bandwidth: each reads its inputs and writes its output once. Values are fp32 in registers. A
program has a few tokens and, where a norm needs a whole row, all channels. Rows may be longer than the part that is
used: gate and x are slices of a projection's output, which are not copied. Shape letters as in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import INTERPRETED as INTERPRETED  # callers find it here, as in any forward module
from ..triton_launch import ceil_div, dtype_obstacle, launch, next_power_of_2
from ..triton_math import add_product, load_fp32, mean, sigmoid
from .reference import ONES, ConvNorm, GatedLinear, GatedNorm, ScanConvs

DTYPES = torch.float32, torch.float16, torch.bfloat16


@triton.jit
def normalise(y, D: tl.constexpr, inside, eps):
    """Return the rows of y with mean 0 and variance 1 over the D channels that are `inside`, and 1/σ.

    y must be 0 in the channels beyond D: the sum for the mean goes over whole rows.
    """
    x = tl.where(inside, y - mean(y, D)[:, None], 0.0)
    rstd = tl.rsqrt(mean(x * x, D) + eps)
    # a row beyond the last token has no variance: without eps, its 1/σ is infinite
    return tl.where(inside, x * rstd[:, None], 0.0), rstd


@triton.jit
def gelu(g):
    """Return GELU(g) = g s by its tanh approximation, and s = sigmoid(√(8/π) (g + 0.044715 g³))."""
    s = sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return g * s, s


@triton.jit
def load_wide(weight_ptr, like, D: tl.constexpr):
    """Load a weight (D,) in fp32, repeated for each row of `like` (rows,width).

    Each thread loads the elements that it needs itself: no data pass between threads.
    """
    at = tl.zeros_like(like).to(tl.int32) + tl.arange(0, like.shape[1])[None, :]
    return load_fp32(weight_ptr + at, at < D)


@triton.jit
def load_column(tokens_ptr, middle, x, width, above, here, below, D: tl.constexpr):
    """Load column x of the grid in three rows: one above the row that begins at `middle`, that row, and one below.

    Zeros stand for pixels beyond the grid; `above`, `here` and `below` tell which of the rows it has. Unlike those of
    `load_fp32`, the numbers keep their dtype.
    """
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
    """Write y and its norm for ROWS rows of the grid and LOOP columns, from left to right. The taps are (9,D).

    A column is loaded once, one step ahead, and added to its own sum and to those of its neighbours: a thread carries
    two sums for each of its channels.
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
    k11 = load_wide(taps_ptr + 4 * D, like, D) + 1.0  # plus one: the token itself is added too
    k12 = load_wide(taps_ptr + 5 * D, like, D)
    k20 = load_wide(taps_ptr + 6 * D, like, D)
    k21 = load_wide(taps_ptr + 7 * D, like, D)
    k22 = load_wide(taps_ptr + 8 * D, like, D)
    gamma = load_wide(gamma_ptr, like, D)
    beta = load_wide(beta_ptr, like, D)
    left0, left1, left2 = load_column(tokens_ptr, middle, first - 1, width, above, here, below, D)
    own0, own1, own2 = load_column(tokens_ptr, middle, first, width, above, here, below, D)
    new0, new1, new2 = load_column(tokens_ptr, middle, first + 1, width, above, here, below, D)
    # `last` is the sum at x without column x + 1, `current` the part of column x in the sum at x + 1
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
        tl.store(y_ptr + at, sums, mask=inside)
        normed, _ = normalise(sums, D, (c < D)[None, :], eps)
        tl.store(out_ptr + at, normed * gamma + beta, mask=inside)


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
    """Write k and q. A token of x has `rows` numbers, of which 2D are used; q begins `size` = B·T·2D after k.

    Tap i of `taps` (see `lay_taps`) is for the token 3 − i before, in scan order.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(2).to(tl.int64)
    some = c < 2 * D
    back = tl.where(c < D, -1, 1)
    k = load_fp32(k_bias_ptr + c, some)[None, :] + tl.zeros((TOKENS, BLOCK), tl.float32)
    q = load_fp32(q_bias_ptr + c, some)[None, :] + tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in tl.static_range(4):
        at = t[:, None] + (3 - i) * back[None, :]
        x = load_fp32(x_ptr + (b * T + at) * rows + c[None, :], (at >= 0) & (at < T) & some[None, :])
        k += x * load_fp32(taps_ptr + i * 2 * D + c, some)[None, :]
        q += x * load_fp32(taps_ptr + (4 + i) * 2 * D + c, some)[None, :]
    tile = (b * T + t[:, None]) * (2 * D) + c[None, :]
    inside = (t < T)[:, None] & some[None, :]
    tl.store(out_ptr + tile, k, mask=inside)
    tl.store(out_ptr + size + tile, q, mask=inside)


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
    """Write out. `count` is B·T; a token of the gate has `rows` numbers, of which D are used."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    here = (t < count)[:, None] & (c < D)[None, :]
    z = load_fp32(z_ptr + t[:, None] * (2 * D) + c[None, :], here)
    z += load_fp32(z_ptr + t[:, None] * (2 * D) + D + c[None, :], here)
    x, _ = normalise(z, D, here, eps)
    g, _ = gelu(load_fp32(gate_ptr + t[:, None] * rows + c[None, :], here))
    weight = load_fp32(weight_ptr + c, c < D)[None, :]
    bias = load_fp32(bias_ptr + c, c < D)[None, :]
    tl.store(out_ptr + t[:, None] * D + c[None, :], g * (x * weight + bias), mask=here)


@triton.jit(do_not_specialize=["count", "bucket"])
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, count, eps, bucket, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Write the LayerNorm of each of `count` rows."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    here = (t < count)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    x, _ = normalise(load_fp32(x_ptr + at, here), D, here, eps)
    weight = load_fp32(weight_ptr + c, c < D)[None, :]
    bias = load_fp32(bias_ptr + c, c < D)[None, :]
    tl.store(out_ptr + at, x * weight + bias, mask=here)


@triton.jit
def find_block(program, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row block and the column block of a program of the product.

    Columns are fastest. Programs that run at once then share their rows of x, which are read from memory once; all of
    them share the weights, which stay in the cache.
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
    """Write out. `count` is B·T, HIDDEN is F, PAD the columns of ones. Both products of a tile share its tile of x."""
    rows, columns = find_block(tl.program_id(0), HIDDEN, BLOCK)
    t = rows.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = columns * BLOCK + tl.arange(0, BLOCK)
    if (columns + 1) * BLOCK >= HIDDEN:  # the program of a row's last columns also writes the ones
        ones = out_ptr + t[:, None] * (HIDDEN + PAD) + HIDDEN + tl.arange(0, PAD)[None, :]
        tl.store(ones, tl.full((TOKENS, PAD), 1.0, out_ptr.dtype.element_ty), mask=(t < count)[:, None])
    a = tl.zeros((TOKENS, BLOCK), tl.float32) + load_fp32(bias_ptr + c, c < HIDDEN)[None, :]
    b = tl.zeros((TOKENS, BLOCK), tl.float32) + load_fp32(bias_ptr + HIDDEN + c, c < HIDDEN)[None, :]
    for start in tl.range(0, D, DEPTH):
        d = start + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=(t < count)[:, None] & (d < D)[None, :], other=0.0)
        tile, some = weight_ptr + c[None, :] * D + d[:, None], (c < HIDDEN)[None, :] & (d < D)[:, None]
        a = add_product(a, x, tl.load(tile, mask=some, other=0.0))
        b = add_product(b, x, tl.load(tile + HIDDEN * D, mask=some, other=0.0))
    y = a * b * sigmoid(a)
    written = (t < count)[:, None] & (c < HIDDEN)[None, :]
    tl.store(out_ptr + t[:, None] * (HIDDEN + PAD) + c[None, :], y, mask=written)


def unsupported(dtype: torch.dtype, leading: str) -> str | None:
    """Return why these kernels cannot run activations of this dtype, or None; `leading` names the first of them."""
    return dtype_obstacle(leading, dtype, DTYPES)


def row_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """Return the candidates for kernels that hold whole rows of `width` channels; the first is the untuned default."""
    rows = max(1, 2048 // next_power_of_2(width))
    return [
        triton.Config({"ROWS": each}, num_warps=4, num_stages=1)
        for each in dict.fromkeys((rows, max(1, rows // 2), 2 * rows))
    ]


def block_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """Return the candidates for the causal convolutions, at any dtype and width; the first is the untuned default."""
    return [triton.Config({"TOKENS": tokens, "BLOCK": 64}, num_warps=4, num_stages=1) for tokens in (32, 64)]


def product_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """Return the candidates for the product with its activation, the untuned default first; tiles of fp32 are smaller."""
    if dtype == torch.float32:
        return [
            triton.Config({"TOKENS": 64, "BLOCK": 32, "DEPTH": depth}, num_warps=4, num_stages=2) for depth in (16, 32)
        ]
    sizes = (128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 3)
    return [
        triton.Config({"TOKENS": tokens, "BLOCK": block, "DEPTH": 64}, num_warps=warps, num_stages=stages)
        for tokens, block, warps, stages in sizes
    ]


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x (B,T,·) and the elements from one token to the next.

    x is copied where that number does not describe its layout, and at T = 1.
    """
    (_, T, width), stride = x.shape, x.stride(1)
    expected = (T * stride, stride, 1)
    # the stride of an axis of size 1 is arbitrary
    fits = T > 1 and all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), expected, strict=True))
    return (x, stride) if fits else (x.contiguous(), width)


def rows_bucket(x: Tensor) -> int:
    """Return the bit length of B·T for x (B,T,·), a tuning key: the best config depends on how full the device is."""
    return (x.shape[0] * x.shape[1]).bit_length()


def grid_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """Return the candidates for the convolution on the grid: a thread has eight channels, and holds their taps."""
    channels = next_power_of_2(width)
    return [
        triton.Config({"ROWS": max(1, 1024 // channels), "LOOP": loop}, num_warps=max(4, channels // 256), num_stages=1)
        for loop in (16, 8, 4)
    ]


def lay_taps(x: ScanConvs) -> Tensor:
    """Return both weights as (2,4,2D), k's and then q's, without a copy where they already lie like that in memory.

    They lie like that in a frozen model, see `arrange_taps` of `repro.models.fused_launches`. Neighbouring channels of a tap are
    neighbours in memory, and are loaded together.
    """
    k, q = x.k_weight.T, x.q_weight.T
    one_storage = k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    if k.is_contiguous() and q.is_contiguous() and q.data_ptr() == k.data_ptr() + k.nbytes and one_storage:
        return k.as_strided((2, *k.shape), (k.numel(), *k.stride()))
    return torch.stack([k, q])


def lay_grid_taps(x: ConvNorm) -> Tensor:
    """Return the weight (D,3,3) as (9,D), with neighbouring channels of a tap side by side in memory."""
    return x.weight.flatten(1).T.contiguous()


def conv_norm(x: ConvNorm, config: triton.Config | None = None) -> Tensor:
    """Compute the sum and its norm, (2,B,T,D) in the tokens' dtype."""
    out = x.tokens.new_empty(2, *x.tokens.shape)
    write_conv_norm(x, *out.unbind(0), config)
    return out


def write_conv_norm(x: ConvNorm, y: Tensor, out: Tensor, config: triton.Config | None = None) -> None:
    """Write the sum to y and its norm to out, both (B,T,D), contiguous, and each in its own dtype.

    For `repro.models.fused_training`: under autocast its y is fp32, and its out is not.
    """
    B, T, D = x.tokens.shape
    tokens = x.tokens.contiguous()
    width = T // x.height
    arguments = {"taps_ptr": lay_grid_taps(x), "gamma_ptr": x.gamma.contiguous(), "beta_ptr": x.beta.contiguous()}
    arguments |= {"tokens_ptr": tokens, "y_ptr": y, "out_ptr": out, "T": T, "width": width, "eps": x.eps}
    arguments |= {"bucket": rows_bucket(tokens), "D": D, "WIDTH": next_power_of_2(D)}
    grid = lambda c: (ceil_div(x.height, c["ROWS"]) * ceil_div(width, c["LOOP"]), B)  # noqa: E731
    launch(conv_norm_kernel, grid_configs, (tokens.dtype, D), grid, arguments, tokens.device, config)


def scan_convs(x: ScanConvs, config: triton.Config | None = None) -> Tensor:
    """Compute keys and queries, (2,B,T,2D) in x's dtype."""
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
    """Compute GELU(gate) ⊙ LN(Σ_r z_r), (B,T,D) in z's dtype."""
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
    """Return LayerNorm over x's last axis (B,T,D) in `dtype`, without autograd; faster than PyTorch's on short rows."""
    B, T, D = x.shape
    out = x.new_empty(x.shape, dtype=dtype)
    arguments = {"x_ptr": x.contiguous(), "weight_ptr": weight.contiguous(), "bias_ptr": bias.contiguous()}
    arguments |= {"out_ptr": out, "count": B * T, "eps": eps, "bucket": rows_bucket(x)}
    arguments |= {"D": D, "WIDTH": next_power_of_2(D)}
    grid = lambda c: (ceil_div(B * T, c["ROWS"]),)  # noqa: E731
    launch(norm_kernel, row_configs, (x.dtype, D), grid, arguments, x.device, None)
    return out


def gated_linear(x: GatedLinear, config: triton.Config | None = None) -> Tensor:
    """Compute SiLU(a) ⊙ b and the columns of ones, (B,T,F+8) in x's dtype."""
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
