"""Triton backward passes of the operators around the scan, which recompute what they need of the forward pass.

A program goes through LOOP blocks of tokens and writes its own partial sums of the gradients that all tokens share;
torch adds these up. There are no atomics: two runs give the same bits. The functions `sum_…` are for
`repro.models.fused_training`, too, which has gradients written to slices. Shape letters as in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import ceil_div, launch, next_power_of_2
from ..triton_math import load_fp32, mean, sigmoid
from .reference import ONES, ConvNorm, GatedLinear, GatedNorm, ScanConvs
from .triton_fwd import as_rows, gelu, lay_grid_taps, lay_taps, load_wide, normalise, rows_bucket

LOOP = 16  # blocks of tokens of a program: with more, there are fewer partial sums to add up, and fewer programs


@triton.jit
def find_neighbour(i: tl.constexpr, t, T, width, D: tl.constexpr):
    """Return the distance in memory from tokens t to their neighbours at tap i, and which of these the grid has."""
    down, right = i // 3 - 1, i % 3 - 1
    at, column = t + down * width + right, t % width + right
    return tl.cast(down * width + right, tl.int64) * D, (at >= 0) & (at < T) & (column >= 0) & (column < width)


@triton.jit
def norm_gradient(d, x, rstd, D: tl.constexpr):
    """Return the gradient by y from that by x, d, where x and `rstd` are those of `normalise(y)`."""
    return rstd[:, None] * (d - mean(d, D)[:, None] - x * mean(d * x, D)[:, None])


@triton.jit
def convolve(tokens_ptr, taps_ptr, tile, t, T, width, here, D: tl.constexpr):
    """Return the tokens t, at `tile`, plus the sum of their nine weighted neighbours on the grid."""
    y = load_fp32(tokens_ptr + tile, here)
    for i in tl.static_range(9):
        away, some = find_neighbour(i, t, T, width, D)
        x = load_fp32(tokens_ptr + tile + away, here & some[:, None])
        y += x * load_wide(taps_ptr + i * D, y, D)
    return y


@triton.jit(do_not_specialize=["T", "width", "bucket"])
def norm_backward_kernel(
    dy_ptr,
    dout_ptr,
    tokens_ptr,
    taps_ptr,
    gamma_ptr,
    g_ptr,
    partial_ptr,
    T,
    width,
    eps,
    bucket,
    CONVOLVE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Write g, the gradient of y: dy plus the gradient through LN(y). Partial sums are those of gamma and beta.

    y is the tokens, or with CONVOLVE the tokens plus their convolution. That is recomputed in fp32: the stored y is
    rounded to its dtype, and would not give gradients to fp32.
    """
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    gamma = load_fp32(gamma_ptr + c, c < D)[None, :]
    dgamma = tl.zeros((ROWS, WIDTH), tl.float32)
    dbeta = tl.zeros((ROWS, WIDTH), tl.float32)
    for j in tl.range(0, LOOP):
        t = (tl.program_id(0) * LOOP + j) * ROWS + tl.arange(0, ROWS)
        here = (t < T)[:, None] & (c < D)[None, :]
        tile = (b * T + t[:, None]) * D + c[None, :]
        if CONVOLVE:
            y = convolve(tokens_ptr, taps_ptr, tile, t, T, width, here, D)
        else:
            y = load_fp32(tokens_ptr + tile, here)
        x, rstd = normalise(y, D, here, eps)
        d = load_fp32(dout_ptr + tile, here)
        dgamma += d * x
        dbeta += d
        g = norm_gradient(d * gamma, x, rstd, D) + load_fp32(dy_ptr + tile, here)
        tl.store(g_ptr + tile, g, mask=here)
    at = partial_ptr + (b * tl.num_programs(0) + tl.program_id(0)) * 2 * D + c
    tl.store(at, tl.sum(dgamma, 0), mask=c < D)
    tl.store(at + D, tl.sum(dbeta, 0), mask=c < D)


@triton.jit(do_not_specialize=["T", "width", "bucket"])
def conv_backward_kernel(
    tokens_ptr,
    g_ptr,
    taps_ptr,
    dtokens_ptr,
    partial_ptr,
    T,
    width,
    bucket,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Write the gradient of the tokens, g plus the transposed convolution of g. Partial sums are those of the taps."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    n = tl.arange(0, 16)[:, None]
    # the sides of a tile are powers of two: nine taps take 16 rows
    sums = tl.zeros((16, WIDTH), tl.float32)
    for j in tl.range(0, LOOP):
        t = (tl.program_id(0) * LOOP + j) * ROWS + tl.arange(0, ROWS)
        here = (t < T)[:, None] & (c < D)[None, :]
        tile = (b * T + t[:, None]) * D + c[None, :]
        g = load_fp32(g_ptr + tile, here)
        dtokens = g
        for i in tl.static_range(9):
            away, some = find_neighbour(i, t, T, width, D)
            x = load_fp32(tokens_ptr + tile + away, here & some[:, None])
            sums += tl.where(n == i, tl.sum(g * x, 0)[None, :], 0.0)
            # the neighbour at tap i of this token sees this token at its tap 8 − i
            other = load_fp32(g_ptr + tile + away, here & some[:, None])
            dtokens += other * load_fp32(taps_ptr + (8 - i) * D + c, c < D)[None, :]
        tl.store(dtokens_ptr + tile, dtokens, mask=here)
    at = partial_ptr + (b * tl.num_programs(0) + tl.program_id(0)) * 9 * D + n * D + c[None, :]
    tl.store(at, sums, mask=(n < 9) & (c < D)[None, :])


@triton.jit(do_not_specialize=["T", "bucket"])
def scan_convs_backward_kernel(
    dk_ptr,
    dq_ptr,
    x_ptr,
    taps_ptr,
    dx_ptr,
    partial_ptr,
    T,
    rows,
    dx_rows,
    bucket,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Write dx from dk and dq. The rows of the partial sums: four taps of k, four of q, both biases.

    A token of x has `rows` numbers, and one of dx `dx_rows`, of which 2D are used.
    """
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(2).to(tl.int64)
    some = c < 2 * D
    back = tl.where(c < D, -1, 1)
    n = tl.arange(0, 16)[:, None]
    sums = tl.zeros((16, BLOCK), tl.float32)
    for j in tl.range(0, LOOP):
        t = (tl.program_id(0) * LOOP + j) * TOKENS + tl.arange(0, TOKENS)
        inside = (t < T)[:, None] & some[None, :]
        tile = (b * T + t[:, None]) * (2 * D) + c[None, :]
        dk = load_fp32(dk_ptr + tile, inside)
        dq = load_fp32(dq_ptr + tile, inside)
        sums += tl.where(n == 8, tl.sum(dk, 0)[None, :], 0.0) + tl.where(n == 9, tl.sum(dq, 0)[None, :], 0.0)
        dx = tl.zeros((TOKENS, BLOCK), tl.float32)
        for i in tl.static_range(4):
            away = (3 - i) * back[None, :]
            at = t[:, None] + away
            x = load_fp32(x_ptr + (b * T + at) * rows + c[None, :], inside & (at >= 0) & (at < T))
            sums += tl.where(n == i, tl.sum(dk * x, 0)[None, :], 0.0) + tl.where(
                n == 4 + i, tl.sum(dq * x, 0)[None, :], 0.0
            )
            # this token is at tap i of the token at the same distance on the other side
            at = t[:, None] - away
            there = inside & (at >= 0) & (at < T)
            far = (b * T + at) * (2 * D) + c[None, :]
            k_weight = load_fp32(taps_ptr + i * 2 * D + c, some)[None, :]
            q_weight = load_fp32(taps_ptr + (4 + i) * 2 * D + c, some)[None, :]
            dx += load_fp32(dk_ptr + far, there) * k_weight
            dx += load_fp32(dq_ptr + far, there) * q_weight
        tl.store(dx_ptr + (b * T + t[:, None]) * dx_rows + c[None, :], dx, mask=inside)
    at = partial_ptr + (b * tl.num_programs(0) + tl.program_id(0)) * 20 * D + n * (2 * D) + c[None, :]
    tl.store(at, sums, mask=(n < 10) & some[None, :])


@triton.jit(do_not_specialize=["count", "bucket"])
def gated_norm_backward_kernel(
    dout_ptr,
    z_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    dz_ptr,
    dgate_ptr,
    partial_ptr,
    count,
    rows,
    dgate_rows,
    eps,
    bucket,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Write dz and dgate. Partial sums are those of weight and bias.

    `count` is B·T; a token of the gate has `rows` numbers, and one of dgate `dgate_rows`, of which D are used.
    """
    c = tl.arange(0, WIDTH)
    weight = load_fp32(weight_ptr + c, c < D)[None, :]
    bias = load_fp32(bias_ptr + c, c < D)[None, :]
    dweight = tl.zeros((ROWS, WIDTH), tl.float32)
    dbias = tl.zeros((ROWS, WIDTH), tl.float32)
    for j in tl.range(0, LOOP):
        t = (tl.program_id(0).to(tl.int64) * LOOP + j) * ROWS + tl.arange(0, ROWS)
        here = (t < count)[:, None] & (c < D)[None, :]
        both = t[:, None] * (2 * D) + c[None, :]
        z = load_fp32(z_ptr + both, here)
        z += load_fp32(z_ptr + both + D, here)
        x, rstd = normalise(z, D, here, eps)
        g = load_fp32(gate_ptr + t[:, None] * rows + c[None, :], here)
        opened, s = gelu(g)
        d = load_fp32(dout_ptr + t[:, None] * D + c[None, :], here)
        # GELU(g) = g s with s = sigmoid(2u), 2u = √(8/π) (g + 0.044715 g³), so its slope is s + g s (1 − s) (2u)′
        slope = s + g * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        tl.store(dgate_ptr + t[:, None] * dgate_rows + c[None, :], d * (x * weight + bias) * slope, mask=here)
        d *= opened
        dweight += d * x
        dbias += d
        dz = norm_gradient(d * weight, x, rstd, D)
        # the norm sees the sum of both directions, which therefore have the same gradient
        tl.store(dz_ptr + both, dz, mask=here)
        tl.store(dz_ptr + both + D, dz, mask=here)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * D) + c
    tl.store(at, tl.sum(dweight, 0), mask=c < D)
    tl.store(at + D, tl.sum(dbias, 0), mask=c < D)


@triton.jit(do_not_specialize=["count", "bucket"])
def activation_backward_kernel(
    dout_ptr,
    h_ptr,
    dh_ptr,
    count,
    bucket,
    HIDDEN: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the gradient of h = [a, b] from that of SiLU(a) ⊙ b; `count` is B·T, HIDDEN F, PAD the columns of ones.

    These columns have no gradient.
    """
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (t < count)[:, None] & (c < HIDDEN)[None, :]
    tile = t[:, None] * (2 * HIDDEN) + c[None, :]
    a = load_fp32(h_ptr + tile, here)
    b = load_fp32(h_ptr + tile + HIDDEN, here)
    d = load_fp32(dout_ptr + t[:, None] * (HIDDEN + PAD) + c[None, :], here)
    s = sigmoid(a)
    tl.store(dh_ptr + tile, d * b * s * (1.0 + a * (1.0 - s)), mask=here)
    tl.store(dh_ptr + tile + HIDDEN, d * a * s, mask=here)


def row_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """Return the candidates for kernels that hold whole rows of `width` channels; the first is the untuned default."""
    rows = max(1, 1024 // next_power_of_2(width))
    return [triton.Config({"ROWS": each, "LOOP": LOOP}, num_warps=4, num_stages=1) for each in (rows, 2 * rows)]


def block_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """Return the candidates for the causal convolutions, at any dtype and width; the first is the untuned default."""
    return [
        triton.Config({"TOKENS": tokens, "BLOCK": 64, "LOOP": LOOP}, num_warps=4, num_stages=1) for tokens in (16, 32)
    ]


def activation_configs(dtype: torch.dtype, width: int) -> list[triton.Config]:
    """Return the candidates for the activation, at any dtype and width; the first is the untuned default."""
    return [
        triton.Config({"ROWS": rows, "BLOCK": block}, num_warps=4, num_stages=1) for rows, block in ((8, 256), (4, 512))
    ]


def _most_programs(count: int, candidates: list[triton.Config], name: str) -> int:
    """Return the largest number of programs along the tokens of any config.

    The partial sums have as many rows, since the config is not known yet. Programs write their own rows alone, so the
    tensor must start as zeros and be passed as `partial_ptr`, which the tuner zeroes before each candidate
    (`triton_launch.ZEROED`).
    """
    return max(ceil_div(count, config.kwargs[name] * config.kwargs["LOOP"]) for config in candidates)


def conv_norm(dout: Tensor, x: ConvNorm, config: triton.Config | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of tokens, weight, gamma and beta, each in its input's shape and dtype."""
    dtokens, taps, (dgamma, dbeta) = sum_conv_norm(*dout.unbind(0), x, config)
    # clones, since the results of an operator must not share memory
    gradients = dtokens, taps.T.reshape(x.weight.shape).contiguous(), dgamma.clone(), dbeta.clone()
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, x[:4], strict=True))


def sum_conv_norm(dy: Tensor, dout: Tensor, x: ConvNorm, config: triton.Config | None = None) -> tuple[Tensor, ...]:
    """Return the gradient of tokens, and in fp32 those of the taps (9,D), and of gamma and beta (2,D).

    `dy` is the gradient of the sum of tokens and convolution, `dout` that of its norm, both (B,T,D).
    """
    B, T, D = x.tokens.shape
    tokens = x.tokens.contiguous()
    g, dtokens = torch.empty_like(tokens), torch.empty_like(tokens)
    programs = B * _most_programs(T, [config] if config else row_configs(tokens.dtype, D), "ROWS")
    norm, conv = (tokens.new_zeros(programs, rows, D, dtype=torch.float32) for rows in (2, 9))
    shared = {"tokens_ptr": tokens, "taps_ptr": lay_grid_taps(x), "g_ptr": g, "T": T, "width": T // x.height}
    shared |= {"bucket": rows_bucket(tokens), "D": D, "WIDTH": next_power_of_2(D)}
    grid = lambda c: (ceil_div(T, c["ROWS"] * c["LOOP"]), B)  # noqa: E731
    arguments = {"dy_ptr": dy.contiguous(), "dout_ptr": dout.contiguous(), "gamma_ptr": x.gamma.contiguous()}
    arguments |= {"partial_ptr": norm, "eps": x.eps, "CONVOLVE": True}
    launch(norm_backward_kernel, row_configs, (tokens.dtype, D), grid, shared | arguments, tokens.device, config)
    arguments = shared | {"dtokens_ptr": dtokens, "partial_ptr": conv}
    launch(conv_backward_kernel, row_configs, (tokens.dtype, D), grid, arguments, tokens.device, config)
    return dtokens, conv.sum(0), norm.sum(0)


def sum_norm(dy: Tensor, dout: Tensor, y: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of y (B,T,D), dy plus the gradient through LN(y), and in fp32 those of gamma and beta (2,D).

    `dout` is the gradient of LN(y).
    """
    B, T, D = y.shape
    y = y.contiguous()
    g = torch.empty_like(y)
    programs = B * _most_programs(T, row_configs(y.dtype, D), "ROWS")
    sums = y.new_zeros(programs, 2, D, dtype=torch.float32)
    # without CONVOLVE the kernel reads no taps: any pointer will do
    arguments = {"dy_ptr": dy.contiguous(), "dout_ptr": dout.contiguous(), "tokens_ptr": y, "taps_ptr": gamma}
    arguments |= {"gamma_ptr": gamma, "g_ptr": g, "partial_ptr": sums, "T": T, "width": 1, "eps": eps}
    arguments |= {"bucket": rows_bucket(y), "CONVOLVE": False, "D": D, "WIDTH": next_power_of_2(D)}
    grid = lambda c: (ceil_div(T, c["ROWS"] * c["LOOP"]), B)  # noqa: E731
    launch(norm_backward_kernel, row_configs, (y.dtype, D), grid, arguments, y.device, None)
    return g, sums.sum(0)


def scan_convs(dout: Tensor, x: ScanConvs, config: triton.Config | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of x, and of k's and q's weight and bias, each in its input's shape and dtype."""
    dx = x.x.new_empty(x.x.shape)
    taps = sum_scan_convs(*dout.unbind(0), x, dx, config)
    gradients = dx, taps[:4].T.contiguous(), taps[8].clone(), taps[4:8].T.contiguous(), taps[9].clone()
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, x, strict=True))


def sum_scan_convs(dk: Tensor, dq: Tensor, x: ScanConvs, dx: Tensor, config: triton.Config | None = None) -> Tensor:
    """Write the gradient of x to dx, whose rows may be longer than x's 2D numbers; return those of the parameters.

    They are (10,2D) in fp32: k's four taps, q's four taps, k's bias, q's bias.
    The tokens of dx must lie dx.stride(1) apart over all images, not only within one; this is not checked.
    """
    B, T, E = x.x.shape
    given, rows = as_rows(x.x)
    programs = B * _most_programs(T, [config] if config else block_configs(dx.dtype, E), "TOKENS")
    sums = dx.new_zeros(programs, 10, E, dtype=torch.float32)
    arguments = {"dk_ptr": dk.contiguous(), "dq_ptr": dq.contiguous(), "x_ptr": given, "taps_ptr": lay_taps(x)}
    arguments |= {"dx_ptr": dx, "partial_ptr": sums, "T": T, "rows": rows, "dx_rows": dx.stride(1), "D": E // 2}
    arguments["bucket"] = rows_bucket(dx)
    grid = lambda c: (ceil_div(T, c["TOKENS"] * c["LOOP"]), ceil_div(E, c["BLOCK"]), B)  # noqa: E731
    launch(scan_convs_backward_kernel, block_configs, (dx.dtype, E), grid, arguments, dx.device, config)
    return sums.sum(0)


def gated_norm(dout: Tensor, x: GatedNorm, config: triton.Config | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of z, gate, weight and bias, each in its input's shape and dtype."""
    dgate = x.gate.new_empty(x.gate.shape)
    dz, sums = sum_gated_norm(dout, x, dgate, config)
    gradients = dz, dgate, *(each.clone() for each in sums)
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, x[:4], strict=True))


def sum_gated_norm(
    dout: Tensor, x: GatedNorm, dgate: Tensor, config: triton.Config | None = None
) -> tuple[Tensor, Tensor]:
    """Write the gradient of gate to dgate, whose rows may be longer than D; return those of z, weight and bias.

    That of z has z's shape and dtype; those of weight and bias are (2,D) in fp32.
    The tokens of dgate must lie dgate.stride(1) apart over all images, not only within one; this is not checked.
    """
    B, T, D = x.gate.shape
    gate, rows = as_rows(x.gate)
    dz = x.z.new_empty(x.z.shape)
    programs = _most_programs(B * T, [config] if config else row_configs(dz.dtype, D), "ROWS")
    sums = dz.new_zeros(programs, 2, D, dtype=torch.float32)
    arguments = {
        "dout_ptr": dout.contiguous(),
        "z_ptr": x.z.contiguous(),
        "gate_ptr": gate,
        "dz_ptr": dz,
        "dgate_ptr": dgate,
    }
    arguments |= {
        "weight_ptr": x.weight.contiguous(),
        "bias_ptr": x.bias.contiguous(),
        "partial_ptr": sums,
        "count": B * T,
        "rows": rows,
        "dgate_rows": dgate.stride(1),
    }
    arguments |= {"eps": x.eps, "bucket": rows_bucket(gate), "D": D, "WIDTH": next_power_of_2(D)}
    grid = lambda c: (ceil_div(B * T, c["ROWS"] * c["LOOP"]),)  # noqa: E731
    launch(gated_norm_backward_kernel, row_configs, (dz.dtype, D), grid, arguments, dz.device, config)
    return dz, sums.sum(0)


def gated_linear(dout: Tensor, x: GatedLinear, config: triton.Config | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias, each in its input's shape and dtype.

    The forward pass does not store h = x Wᵀ + bias; PyTorch's product computes it again.
    """
    (B, T, D), hidden = x.x.shape, len(x.weight) // 2
    dtype, tokens, weight = x.x.dtype, x.x.reshape(B * T, D), x.weight.to(x.x.dtype)
    h = torch.addmm(x.bias.to(dtype), tokens, weight.T)
    dh = torch.empty_like(h)
    arguments = {"dout_ptr": dout.contiguous(), "h_ptr": h, "dh_ptr": dh, "count": B * T, "HIDDEN": hidden, "PAD": ONES}
    arguments["bucket"] = rows_bucket(x.x)
    grid = lambda c: (ceil_div(B * T, c["ROWS"]), ceil_div(hidden, c["BLOCK"]))  # noqa: E731
    launch(activation_backward_kernel, activation_configs, (dtype, hidden), grid, arguments, dh.device, config)
    gradients = (dh @ weight).view(B, T, D), dh.T @ tokens, dh.sum(0, dtype=torch.float32)
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, x, strict=True))
