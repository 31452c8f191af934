"""Triton forward pass of TTT-Linear in two phases, for inputs with too few programs to fill a GPU.

A scan is a chain of dependent steps, and with a program for every (sample, direction, head) a single image leaves most
of a GPU idle. Only Z, G and the state must be computed in order. With the state [W; β] at the start of a block of ROWS
tokens, and C₁ the last c,

    O = QW + β − A (lr G),   A[t,s] = w (q_t · k_s + 1)
    w = c of t's place in its chunk, where s ≤ t is in the same chunk
    w = C₁, where s is in an earlier chunk of the block;   else w = 0

is the sum that the equations of `reference` give chunk by chunk, since the state before a chunk is that of the block's
start minus C₁ Σ Kᵀ lr G. Thus `state_kernel` walks the tokens and writes lr G and the states, and `output_kernel`
computes the outputs of all blocks at once. Both phases together move twice the bytes of the one phase in `triton_fwd`,
which is faster once programs fill the device.

The chain is kept short. The six sums over a token's row are taken together, and the mean and the product of g with z
follow from them; c₁ is folded into G; and the turns of a group of chunks are unrolled, which lets Triton load ahead.
Shape letters as in `reference`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import find_gpu
from ..triton_launch import launch
from ..triton_math import add_product, mean, product
from . import triton_fwd
from .reference import Arguments
from .triton_fwd import INTERPRETED as INTERPRETED  # callers find it here, as in any forward module
from .triton_fwd import alive, load_rows, place, shared_arguments, start_state, states_shape, store_state, token_rows
from .triton_fwd import unsupported as unsupported

CHUNK_SIZE, WIDEST, ROWS = 16, 64, 64


@triton.jit(do_not_specialize=["T", "R", "H", "v_rows", "reverse", "bucket"])
def state_kernel(
    k_ptr,
    v_ptr,
    lr_ptr,
    scale_ptr,
    W0_ptr,
    b0_ptr,
    gamma_ptr,
    mu_ptr,
    G_ptr,
    S_ptr,
    beta_ptr,
    states_ptr,
    T,
    R,
    H,
    v_rows,
    reverse,
    eps,
    bucket,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write lr G of every token, and the state before every block of ROWS tokens in the products' dtype.

    With KEEP, write the states from which the backward pass starts, too. A turn of the loop is a group of GROUP chunks.
    """
    head, r, b, first, step = place(T, R, H, reverse)
    program, param = tl.program_id(0).to(tl.int64), r * H + head
    groups = tl.cdiv(T, CHUNK * GROUP)
    d, n = tl.arange(0, D), tl.arange(0, CHUNK)
    dt: tl.constexpr = k_ptr.dtype.element_ty
    gamma = tl.load(gamma_ptr + param * D + d)[None, :]
    mu = tl.load(mu_ptr + param * D + d)[None, :]
    minus_c_last = -tl.load(scale_ptr + r * CHUNK + CHUNK - 1)
    ST, beta0 = start_state(W0_ptr + param * D * D, b0_ptr + param * D, D)
    beta = tl.zeros((D, CHUNK), tl.float32) + beta0[:, None]
    ones = tl.full((CHUNK, CHUNK), 1.0, dt)
    blocks = groups * (GROUP * CHUNK // ROWS)
    S_ptr += program * blocks * (D * D)
    beta_ptr += program * blocks * D
    states_ptr += program * (groups - 1) * ((D + 1) * D)

    start = (b * T + first) * (R * H) + param
    k_ptr += start * D
    v_ptr += ((b * T + first) * v_rows + param) * D
    G_ptr += start * D
    lr_ptr += (b * T + first) * H + head
    tile = (step * R * H * D) * n[:, None] + d[None, :]
    v_tile = (step * v_rows * D) * n[:, None] + d[None, :]
    for group in tl.range(0, groups, num_stages=STAGES, disable_licm=True):
        for j in tl.static_range(GROUP):
            i = group * GROUP + j
            S = ST.to(dt)
            if (j * CHUNK) % ROWS == 0:
                block = tl.cast(i // (ROWS // CHUNK), tl.int64)
                tl.store(S_ptr + block * (D * D) + d[:, None] * D + d[None, :], S)
                tl.store(beta_ptr + block * D + d[:, None] + 0 * n[None, :], beta, mask=(n == 0)[None, :])
            inside = n < tl.minimum(CHUNK, T - i * CHUNK)
            at = tl.cast(i, tl.int64) * (step * CHUNK)
            k = load_rows(k_ptr + at * (R * H * D) + tile, inside)
            lr = tl.load(lr_ptr + at * H + step * H * n, mask=inside, other=0.0)
            v = load_rows(v_ptr + at * (v_rows * D) + v_tile, inside)
            z = add_product(beta, S, tl.trans(k))
            z = tl.where(alive(v), tl.trans(z), 0.0)
            e = gamma * (mu + (k.to(tl.float32) - v.to(tl.float32)))
            y = gamma * gamma * z
            zz, yz, ez = mean(z * z, D), mean(y * z, D), mean(e * z, D)
            m_y, m_e, m_z = mean(y, D), mean(e, D), mean(z, D)
            rstd = tl.rsqrt(zz + eps)
            m_gz = (yz * rstd + ez) * (rstd * rstd)
            m_g = m_y * rstd + m_e - m_z * m_gz
            rate = lr * rstd
            G = (y * rstd[:, None] + e) * rate[:, None] - (z * (m_gz * rate)[:, None] + (m_g * rate)[:, None])
            tl.store(G_ptr + at * (R * H * D) + tile, G, mask=inside[:, None])
            GT = tl.trans((minus_c_last * G).to(dt))
            ST = add_product(ST, GT, k)
            beta = add_product(beta, GT, ones)
        if KEEP:
            if group < groups - 1:
                store_state(states_ptr, states_ptr + D * D, ST, beta, D)
                states_ptr += (D + 1) * D


@triton.jit(do_not_specialize=["T", "R", "H", "reverse", "bucket"])
def output_kernel(
    q_ptr,
    k_ptr,
    scale_ptr,
    gamma_ptr,
    mu_ptr,
    G_ptr,
    S_ptr,
    beta_ptr,
    out_ptr,
    T,
    R,
    H,
    reverse,
    eps,
    bucket,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write out of one block of ROWS tokens; axis 1 of the grid has a program for each block."""
    head, r, b, first, step = place(T, R, H, reverse)
    param, block = r * H + head, tl.program_id(1)
    d, t = tl.arange(0, D), tl.arange(0, ROWS)
    dt: tl.constexpr = q_ptr.dtype.element_ty
    token = b * T + first + step * block.to(tl.int64) * ROWS
    tile = (token * (R * H) + param) * D + (step * R * H * D) * t[:, None] + d[None, :]
    inside = (t < T - block * ROWS)[:, None]
    q = tl.load(q_ptr + tile, mask=inside, other=0.0)
    k = tl.load(k_ptr + tile, mask=inside, other=0.0)
    G = tl.load(G_ptr + tile, mask=inside, other=0.0)
    at = tl.program_id(0).to(tl.int64) * (tl.cdiv(T, CHUNK * GROUP) * (GROUP * CHUNK // ROWS)) + block
    ST = tl.load(S_ptr + at * (D * D) + d[:, None] * D + d[None, :])
    beta = tl.load(beta_ptr + at * D + d)
    c = tl.load(scale_ptr + r * CHUNK + t % CHUNK)
    c_last = tl.load(scale_ptr + r * CHUNK + CHUNK - 1)
    # the position in the block gives that in the chunk: ROWS is a multiple of CHUNK
    weight = tl.where((t // CHUNK)[:, None] == (t // CHUNK)[None, :], c[:, None], c_last)
    A = weight * (product(q, tl.trans(k)) + 1.0)
    A = tl.where(t[:, None] >= t[None, :], -A, 0.0).to(dt)
    o = product(q, tl.trans(ST)) + beta[None, :]
    o = add_product(o, A, G)
    rstd = tl.rsqrt(mean(o * o, D) + eps)
    gamma = tl.load(gamma_ptr + param * D + d)[None, :]
    mu = tl.load(mu_ptr + param * D + d)[None, :]
    y = gamma * o * rstd[:, None] + (mu + q.to(tl.float32))
    tl.store(out_ptr + tile, y, mask=inside)


def are_written_for(dtype: torch.dtype, chunk_size: int, width: int) -> bool:
    """Return whether the two phases take these sizes, which are those of the models.

    In fp32 their tiles would not fit the registers.
    """
    return dtype != torch.float32 and chunk_size == CHUNK_SIZE and width <= WIDEST


def state_configs(dtype: torch.dtype, chunk_size: int, width: int = 64) -> list[triton.Config]:
    """Return the candidates of the first phase, the untuned default first; none for sizes that it does not take."""
    written = are_written_for(dtype, chunk_size, width)
    return [triton.Config({"STAGES": stages}, num_warps=4, num_stages=1) for stages in (2, 1)] if written else []


def output_configs(dtype: torch.dtype, chunk_size: int, width: int = 64) -> list[triton.Config]:
    """Return the candidates of the second phase; none for sizes that it does not take."""
    return (
        []
        if not are_written_for(dtype, chunk_size, width)
        else [triton.Config({}, num_warps=warps, num_stages=1) for warps in (4, 8)]
    )


class TwoPhases(NamedTuple):
    """The configs of both kernels."""

    state: triton.Config
    output: triton.Config


def takes_two_phases(x: Arguments) -> bool:
    """Return whether one phase would leave multiprocessors idle, and the two phases take these sizes."""
    gpu, (B, _, R, H, D) = find_gpu(x.q.device), x.q.shape
    return gpu is not None and gpu.multi_processor_count >= B * R * H and are_written_for(x.q.dtype, x.chunk_size, D)


def forward(x: Arguments, keep_states: bool, config: triton.Config | TwoPhases | None = None) -> tuple[Tensor, Tensor]:
    """Return out and states as `triton_fwd.forward`, in one phase or two by the type of `config`.

    None tunes, and takes two phases where programs are few.
    """
    if isinstance(config, TwoPhases) or (config is None and takes_two_phases(x)):
        return run_both(x, keep_states, config)
    return triton_fwd.forward(x, keep_states, config)


def run_both(x: Arguments, keep_states: bool, config: TwoPhases | None) -> tuple[Tensor, Tensor]:
    """Run `forward` in two phases, for chunks of 16 tokens and D up to 64. None tunes."""
    B, T, R, H, D = x.q.shape
    arguments = shared_arguments(x)
    arguments["v_ptr"], rows = token_rows(x.v)
    programs, blocks = B * R * H, (T + ROWS - 1) // ROWS
    states = x.q.new_empty(states_shape(x.q.shape, x.chunk_size, keep_states), dtype=torch.float32)
    G, out = torch.empty_like(arguments["q_ptr"]), torch.empty_like(arguments["q_ptr"])
    tokens = x.chunk_size * arguments["GROUP"]
    held = (T + tokens - 1) // tokens * (tokens // ROWS)  # blocks of whole groups, also those beyond T
    S, beta = x.q.new_empty(programs, held, D, D), x.q.new_empty(programs, held, D, dtype=torch.float32)
    arguments |= {"G_ptr": G, "S_ptr": S, "beta_ptr": beta, "out_ptr": out, "states_ptr": states, "v_rows": rows}
    arguments |= {"ROWS": ROWS, "KEEP": keep_states}
    sizes = x.q.dtype, x.chunk_size, D
    kernels = (state_kernel, state_configs, (programs,)), (output_kernel, output_configs, (programs, blocks))
    for (kernel, candidates, grid), own in zip(kernels, config or (None, None), strict=True):
        taken = {name: value for name, value in arguments.items() if name in kernel.arg_names}
        launch(kernel, candidates, sizes, grid, taken, x.q.device, own)
    return out, states
