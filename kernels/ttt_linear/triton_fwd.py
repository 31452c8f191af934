"""TTT-Linear in Triton: the forward pass, and what it shares with the backward pass.

One program scans one (sample, direction, head). Its state stays in fp32 registers for the whole sequence, transposed: with
ST = Wᵀ (outputs, inputs) every product of the scan has M = D, and ST and G are left operands whose registers the matrix
units take as they are. q, k, v and out stay (B,T,R,H,D); a back direction counts its tokens from the end.

LayerNorm does not see the mean of its input and G has mean 0, so the state is kept with mean 0 over its outputs. All that
LayerNorm and its backward need are then five sums over one column of Z, taken in one exchange between warps: with
x = Z·rstd and e = γ ⊙ (μ + K − V), g = γ² ⊙ x + e and G = rstd·(g − mean(g) − x mean(g ⊙ x)).

A chunk of fewer than BLOCK tokens is masked: a missing token has lr = 0 and so no share in any sum.
Shape letters: B batch, T tokens, R directions, H heads, D head width.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
CHUNK_SIZES = 4, 8, 16, 32, 64
WIDTHS = 16, 32, 64, 128
DTYPES = torch.float32, torch.float16, torch.bfloat16
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def column_sums3(a0, a1, a2):
    """Three sums over axis 0 in one exchange between warps. The interpreter is fast for plain sums only."""
    if _INTERPRETED:
        return tl.sum(a0, 0), tl.sum(a1, 0), tl.sum(a2, 0)
    else:
        return tl.reduce((a0, a1, a2), 0, _add3)


@triton.jit
def column_sums5(a0, a1, a2, a3, a4):
    """Five sums over axis 0, as `column_sums3`."""
    if _INTERPRETED:
        return tl.sum(a0, 0), tl.sum(a1, 0), tl.sum(a2, 0), tl.sum(a3, 0), tl.sum(a4, 0)
    else:
        return tl.reduce((a0, a1, a2, a3, a4), 0, _add5)


@triton.jit
def place(T, R, H, reverse):
    """This program's head, direction and sample (int64), and the first token and the step of its scan."""
    program = tl.program_id(0)
    head, r, b = program % H, (program // H) % R, (program // (R * H)).to(tl.int64)
    back = (reverse >> r) & 1
    return head, r, b, back * (T - 1), 1 - 2 * back


@triton.jit
def start_state(W_ptr, b_ptr, D: tl.constexpr):
    """ST (D,D) and β (D,) with mean 0 over the outputs, from a state W (D inputs, D outputs) and β in memory, all fp32."""
    d = tl.arange(0, D)
    ST = tl.trans(tl.load(W_ptr + d[:, None] * D + d[None, :]))
    beta = tl.load(b_ptr + d)
    return ST - tl.sum(ST, 0)[None, :] / D, beta - tl.sum(beta, 0) / D


@triton.jit
def inner_statistics(z, e, gamma2, eps, D: tl.constexpr):
    """Per column of z (D,n): rstd and the means of γ² x, γ² x², g and g x."""
    gz = gamma2 * z
    zz_sum, gz_sum, gzz_sum, e_sum, ez_sum = column_sums5(z * z, gz, gz * z, e, e * z)
    rstd = tl.rsqrt(zz_sum / D + eps)
    m_x, m_xx = gz_sum * rstd / D, gzz_sum * rstd * rstd / D
    return rstd, m_x, m_xx, m_x + e_sum / D, m_xx + ez_sum * rstd / D


@triton.jit(do_not_specialize=["T", "R", "H", "reverse", "bucket"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, lr_ptr, scale_ptr, W0_ptr, b0_ptr, gamma_ptr, mu_ptr, out_ptr, states_ptr,
    T, R, H, reverse, eps, bucket,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """out; with KEEP the state at the start of every group of GROUP chunks but the first. `bucket` is a key for tuning."""
    head, r, b, first, step = place(T, R, H, reverse)
    row, param, chunks = (b * T * R + r) * H + head, r * H + head, tl.cdiv(T, CHUNK)
    d, n = tl.arange(0, D), tl.arange(0, BLOCK)
    dt: tl.constexpr = q_ptr.dtype.element_ty
    gamma = tl.load(gamma_ptr + param * D + d)[:, None]
    mu = tl.load(mu_ptr + param * D + d)[:, None]
    gamma2 = gamma * gamma
    c = tl.load(scale_ptr + r * CHUNK + n, mask=n < CHUNK, other=0.0)
    causal = n[:, None] >= n[None, :]
    ST, beta = start_state(W0_ptr + param * D * D, b0_ptr + param * D, D)
    states_ptr += tl.program_id(0).to(tl.int64) * (((chunks + GROUP - 1) // GROUP - 1) * (D + 1) * D)

    inside = (n < T) & (n < CHUNK)
    offsets = (((first + step * n).to(tl.int64) * (R * H) + row) * D)[:, None] + d[None, :]
    k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
    v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
    q = tl.load(q_ptr + offsets, mask=inside[:, None], other=0.0)
    for i in tl.range(0, chunks, disable_licm=True):
        if KEEP:
            if (i > 0) & (i % GROUP == 0):
                tl.store(states_ptr + d[None, :] * D + d[:, None], ST)
                tl.store(states_ptr + D * D + d, beta)
                states_ptr += (D + 1) * D
        start = i * CHUNK
        inside = (start + n < T) & (n < CHUNK)
        token = (first + step * (start + n)).to(tl.int64)
        lr = tl.load(lr_ptr + (b * T + token) * H + head, mask=inside, other=0.0)
        c_last = tl.load(scale_ptr + r * CHUNK + tl.minimum(CHUNK, T - start) - 1)
        # The next chunk travels while this one is computed.
        ahead = (start + CHUNK + n < T) & (n < CHUNK)
        offsets_ahead = (((first + step * (start + CHUNK + n)).to(tl.int64) * (R * H) + row) * D)[:, None] + d[None, :]
        k_ahead = tl.load(k_ptr + offsets_ahead, mask=ahead[:, None], other=0.0)
        v_ahead = tl.load(v_ptr + offsets_ahead, mask=ahead[:, None], other=0.0)
        q_ahead = tl.load(q_ptr + offsets_ahead, mask=ahead[:, None], other=0.0)

        S = ST.to(dt)
        o = tl.dot(S, tl.trans(q), input_precision="ieee") + beta[:, None]
        QK = tl.dot(q, tl.trans(k), input_precision="ieee")
        A = tl.where(causal, c[:, None] * lr[None, :] * (QK + 1.0), 0.0).to(dt)
        z = tl.dot(S, tl.trans(k), input_precision="ieee") + beta[:, None]
        e = gamma * (mu + tl.trans(k.to(tl.float32) - v.to(tl.float32)))
        rstd, _, _, m_g, m_gx = inner_statistics(z, e, gamma2, eps, D)
        x = z * rstd[None, :]
        G = (gamma2 * x + e - m_g[None, :] - x * m_gx[None, :]) * rstd[None, :]

        o -= tl.dot(G.to(dt), tl.trans(A), input_precision="ieee")
        update = -G * (c_last * lr)[None, :]
        ST = tl.dot(update.to(dt), k, acc=ST, input_precision="ieee")
        beta += tl.sum(update, 1)

        o_rstd = tl.rsqrt(tl.sum(o * o, 0) / D + eps)
        y = tl.trans(gamma * o * o_rstd[None, :] + mu) + q.to(tl.float32)
        offsets = ((token * (R * H) + row) * D)[:, None] + d[None, :]
        tl.store(out_ptr + offsets, y.to(dt), mask=inside[:, None])
        k, v, q = k_ahead, v_ahead, q_ahead


def unsupported(width: int, chunk_size: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run q of this width and dtype with this chunk size, or None where they can."""
    if width not in WIDTHS:
        return f"q's last axis D is {width}, expected one of {', '.join(map(str, WIDTHS))}"
    if chunk_size not in CHUNK_SIZES:
        return f"chunk_size is {chunk_size}, expected one of {', '.join(map(str, CHUNK_SIZES))}"
    if dtype not in DTYPES:
        return f"q is {dtype}, expected one of {', '.join(map(str, DTYPES))}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "q is torch.bfloat16, which Triton's interpreter does not have; expected torch.float32 or torch.float16"
    return None


def group_chunks(width: int, chunk_size: int) -> int:
    """Chunks of a group, a power of two: at least 2·width tokens, so that the kept states stay under 0.3 × q, k, v and out."""
    return max(4, 2 * width // chunk_size)


def states_shape(shape: Sequence[int], chunk_size: int, keep_states: bool) -> tuple[int, int, int, int]:
    """The shape of `forward`'s states for q of shape (B,T,R,H,D), one per group but the first. Takes symbolic sizes."""
    B, T, R, H, D = shape
    tokens = chunk_size * group_chunks(D, chunk_size)
    return B * R * H, (T + tokens - 1) // tokens - 1 if keep_states else 0, D + 1, D


def constants(width: int, chunk_size: int) -> dict[str, int]:
    """The compile-time constants of both kernels. A product wants at least 16 rows."""
    return {"D": width, "CHUNK": chunk_size, "BLOCK": max(16, chunk_size), "GROUP": group_chunks(width, chunk_size)}


def default_config(dtype: torch.dtype, chunk_size: int) -> triton.Config:
    """What runs untuned. 168 registers let three programs of 128 threads share a multiprocessor."""
    if dtype == torch.float32 or chunk_size > 16:
        return triton.Config({}, num_warps=8, num_stages=1)
    return triton.Config({}, num_warps=4, num_stages=1, maxnreg=168)


def configs(dtype: torch.dtype, chunk_size: int) -> list[triton.Config]:
    """The candidates of the forward kernel, the default first."""
    default = default_config(dtype, chunk_size)
    rest = [(4, 1)] if default.num_warps == 8 else [(4, 1), (4, 2), (2, 1)]
    return [default, *(triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in rest)]


def launch(
    kernel, candidates: Callable[[torch.dtype, int], list[triton.Config]], programs: int, arguments: dict[str, object],
    device: torch.device, config: triton.Config | None,
) -> None:  # fmt: skip
    """Run `kernel` with `config`; without one tuned per (bucket of T, constants, dtypes), or, where torch is to be deterministic,
    with the first candidate."""
    dtype, chunk_size = arguments["q_ptr"].dtype, arguments["CHUNK"]
    here: AbstractContextManager = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with here:
        if config is None and not INTERPRETED and not torch.are_deterministic_algorithms_enabled():
            tuned(kernel, candidates, dtype, chunk_size)[(programs,)](**arguments)
            return
        config = config or candidates(dtype, chunk_size)[0]
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg}
        kernel[(programs,)](**arguments, **options)


@functools.cache
def tuned(kernel, candidates, dtype: torch.dtype, chunk_size: int):
    """The kernel with its candidates, tuned per bucket of T, constants and dtypes; the choice is kept on disk."""
    key = ["bucket", "D", "CHUNK"]
    prune = {"early_config_prune": _fitting}
    return triton.autotune(candidates(dtype, chunk_size), key=key, prune_configs_by=prune, cache_results=True)(kernel)


def _fitting(candidates: list[triton.Config], positional: dict[str, object], **named: object) -> list[triton.Config]:
    """The candidates whose stages of q, k and v fit the device's shared memory, beside two states; the first one always."""
    arguments = positional | named
    q, width, block = arguments["q_ptr"], arguments["D"], arguments["BLOCK"]
    limit = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    stage, fixed = 3 * block * width * q.element_size(), 2 * (block + width) * width * q.element_size()
    return candidates[:1] + [x for x in candidates[1:] if fixed + x.num_stages * stage <= limit]


def shared_arguments(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, token_scale: Tensor, W0: Tensor, b0: Tensor, ln_weight: Tensor, ln_bias: Tensor,
    chunk_size: int, reverse: Sequence[bool], eps: float,
) -> dict[str, object]:  # fmt: skip
    """The arguments that both kernels take: contiguous q, k, v, everything else in fp32, and the sizes."""
    _, T, R, H, D = q.shape
    inputs = {"lr": lr, "scale": token_scale, "W0": W0, "b0": b0, "gamma": ln_weight, "mu": ln_bias}
    return {
        **{f"{name}_ptr": x.contiguous() for name, x in zip("qkv", (q, k, v), strict=True)},
        **{f"{name}_ptr": x.float().contiguous() for name, x in inputs.items()},
        **{"T": T, "R": R, "H": H, "reverse": sum(flag << r for r, flag in enumerate(reverse)), "eps": eps},
        **{"bucket": min(T, 8192).bit_length(), **constants(D, chunk_size)},
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, token_scale: Tensor, W0: Tensor, b0: Tensor, ln_weight: Tensor, ln_bias: Tensor,
    chunk_size: int, reverse: Sequence[bool], eps: float, keep_states: bool, config: triton.Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs, and what the backward pass needs beside the inputs, for sizes that are not `unsupported`.

    Args:
        q, k, v: (B,T,R,H,D) of one dtype. lr: (B,T,H). token_scale: (R,chunk_size). W0: (R,H,D,D).
        b0, ln_weight, ln_bias: (R,H,D).
        reverse: R flags; a direction with True is scanned from the last token.
        keep_states: whether `backward` will follow.
        config: one of `configs`; None tunes.

    Returns:
        out (B,T,R,H,D) in q's dtype; states in fp32, of shape `states_shape`, [W; β] each.
    """
    arguments = shared_arguments(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps)
    states = q.new_empty(states_shape(q.shape, chunk_size, keep_states), dtype=torch.float32)
    out = torch.empty_like(arguments["q_ptr"])
    arguments |= {"out_ptr": out, "states_ptr": states, "KEEP": keep_states}
    launch(forward_kernel, configs, len(states), arguments, q.device, config)
    return out, states
