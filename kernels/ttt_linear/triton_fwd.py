"""Triton forward pass of TTT-Linear, and the parts that it shares with the backward pass.

One program scans one (sample, direction, head). Its state stays in fp32 registers for the whole sequence, transposed:
with ST = Wᵀ (outputs, inputs) every product of the scan has M = D, and ST and G are left operands, which the matrix
units take from registers without a change of layout. q, k, v and out keep the layout (B,T,R,H,D). v may be a slice of a
projection's output, with `v_rows` rows of D from one token to the next. A backward direction counts its tokens from the
end.

LayerNorm does not see the mean of its input and G has mean 0, so the state starts with mean 0 over its outputs. Then,
with x = Z·rstd and e = γ ⊙ (μ + K − V), g = γ² ⊙ x + e and G = rstd·(g − mean(g) − x mean(g ⊙ x)). Rounding gives Z a
mean, which x would pass on to the next state, larger each time. Therefore mean(x) mean(g ⊙ x) is added: with it G has
mean 0 whatever the mean of x.

All element-wise work is done token by token, (n,D), in the layout of the loads: there eight neighbouring threads hold a
token (D = 64, two bytes an element), and a sum over D takes three shuffles and no exchange between warps. Z and O pass
once through shared memory to get there. Triton would keep such values in the layout of the product that they come from;
`alive` makes it give them the other one. The bias β is the same for all tokens of a chunk. It is kept as an accumulator
(D,n) whose columns are equal: a product with ones sums over the tokens without a shuffle. Only full chunks change a
state that is still used, and therefore the state's step is always the last c. Where G is an operand it includes lr; A
does not.

A chunk of fewer than BLOCK tokens is masked: a missing token has lr = 0 and contributes to no sum. Shape letters as in
`reference`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import INTERPRETED as INTERPRETED  # callers find it here, as in any forward module
from ..triton_launch import direction_bits, dtype_obstacle, launch
from ..triton_math import add_product, mean, product
from .reference import Arguments

CHUNK_SIZES = 4, 8, 16, 32, 64
WIDTHS = 16, 32, 64, 128
DTYPES = torch.float32, torch.float16, torch.bfloat16
# shared memory of the backward kernel's default config, in KiB by (D, BLOCK), where it exceeds the 99 KiB of the
# smallest GPUs, which it does in fp32 alone
SHARED_KIB = {(64, 64): 128, (128, 16): 162, (128, 32): 200, (128, 64): 288}


@triton.jit
def place(T, R, H, reverse):
    """Return this program's head, direction and sample (int64), and the first token and the step of its scan."""
    program = tl.program_id(0)
    head, r, b = program % H, (program // H) % R, (program // (R * H)).to(tl.int64)
    back = (reverse >> r) & 1
    return head, r, b, back * (T - 1), 1 - 2 * back


@triton.jit
def load_rows(pointer, inside):
    """Load a tile (n,D) in its own dtype, zeros in the rows of tokens that are not `inside`."""
    return tl.load(pointer, mask=inside[:, None], other=0.0)


@triton.jit
def start_state(W_ptr, b_ptr, D: tl.constexpr):
    """Return ST (D,D) and β (D,), with mean 0 over the outputs, in fp32.

    They are loaded from a state W (D inputs, D outputs) and β in memory, both fp32.
    The kernels rely on the mean 0: their norm of O subtracts no mean.
    """
    d = tl.arange(0, D)
    ST = tl.trans(tl.load(W_ptr + d[:, None] * D + d[None, :]))
    beta = tl.load(b_ptr + d)
    return ST - tl.sum(ST, 0)[None, :] / D, beta - tl.sum(beta, 0) / D


@triton.jit
def store_state(W_ptr, b_ptr, ST, beta, D: tl.constexpr):
    """Store a state for `start_state`, from ST (D,D) and the accumulator β (D,n).

    The columns of β are equal: the first is stored, without a change of layout.
    """
    d, n = tl.arange(0, D), tl.arange(0, beta.shape[1])
    tl.store(W_ptr + d[None, :] * D + d[:, None], ST)
    tl.store(b_ptr + d[:, None] + 0 * n[None, :], beta, mask=(n == 0)[None, :])


@triton.jit
def alive(x):
    """Return a mask like x (n,D) that is true everywhere: a hint for Triton's layouts.

    `tl.where(alive(x), y, 0.0)` equals y, and LLVM removes it. Triton cannot see that, and converts y to the layout
    with which x was loaded. x, or its value in the next turn of the loop, must be loaded below the product that y comes
    from.
    """
    if x.dtype == tl.float32:
        return (x.to(tl.int32, bitcast=True) | 1) != 0
    else:
        return (x.to(tl.int16, bitcast=True) | 1) != 0


@triton.jit(do_not_specialize=["T", "R", "H", "v_rows", "reverse", "bucket"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lr_ptr,
    scale_ptr,
    W0_ptr,
    b0_ptr,
    gamma_ptr,
    mu_ptr,
    out_ptr,
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
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write out and, with KEEP, the state before each group of GROUP chunks but the first. `bucket` keys the tuning."""
    head, r, b, first, step = place(T, R, H, reverse)
    param, chunks = r * H + head, tl.cdiv(T, CHUNK)
    d, n = tl.arange(0, D), tl.arange(0, BLOCK)
    dt: tl.constexpr = q_ptr.dtype.element_ty
    gamma = tl.load(gamma_ptr + param * D + d)[None, :]
    mu = tl.load(mu_ptr + param * D + d)[None, :]
    gamma2 = gamma * gamma
    c = tl.load(scale_ptr + r * CHUNK + n, mask=n < CHUNK, other=0.0)
    minus_c = tl.where(n[:, None] <= n[None, :], -c[None, :], 0.0)
    minus_c_last = -tl.load(scale_ptr + r * CHUNK + CHUNK - 1)
    ST, beta0 = start_state(W0_ptr + param * D * D, b0_ptr + param * D, D)
    beta0 = beta0[:, None]
    G_sum = tl.zeros((D, BLOCK), tl.float32)
    ones = tl.full((BLOCK, BLOCK), 1.0, dt)
    states_ptr += tl.program_id(0).to(tl.int64) * ((chunks + GROUP - 1) // GROUP - 1) * ((D + 1) * D)

    start = (b * T + first) * (R * H) + param
    q_ptr += start * D
    k_ptr += start * D
    v_ptr += ((b * T + first) * v_rows + param) * D
    out_ptr += start * D
    lr_ptr += (b * T + first) * H + head
    tile = (step * R * H * D) * n[:, None] + d[None, :]
    v_tile = (step * v_rows * D) * n[:, None] + d[None, :]
    inside = n < tl.minimum(CHUNK, T)
    k = load_rows(k_ptr + tile, inside)
    v = load_rows(v_ptr + v_tile, inside)
    q = load_rows(q_ptr + tile, inside)
    lr = tl.load(lr_ptr + step * H * n, mask=inside, other=0.0)
    # the next chunk is loaded while this one is computed; its v last, see `alive`
    for i in tl.range(0, chunks, disable_licm=True):
        beta = beta0 + minus_c_last * G_sum
        if KEEP:
            if (i > 0) & (i % GROUP == 0):
                store_state(states_ptr, states_ptr + D * D, ST, beta, D)
                states_ptr += (D + 1) * D
        ahead = n < tl.minimum(CHUNK, T - i * CHUNK - CHUNK)
        at = tl.cast(i, tl.int64) * (step * CHUNK * R * H * D)
        at_ahead = at + step * CHUNK * R * H * D
        k_ahead = load_rows(k_ptr + at_ahead + tile, ahead)
        q_ahead = load_rows(q_ptr + at_ahead + tile, ahead)
        lr_ahead = tl.load(lr_ptr + (i + 1) * (step * CHUNK * H) + step * H * n, mask=ahead, other=0.0)

        S = ST.to(dt)
        z = add_product(beta, S, tl.trans(k))
        o = add_product(beta, S, tl.trans(q))
        A = (minus_c * product(k, tl.trans(q)) + minus_c).to(dt)
        z = tl.where(alive(v), tl.trans(z), 0.0)
        e = gamma * (mu + (k.to(tl.float32) - v.to(tl.float32)))
        rstd = tl.rsqrt(mean(z * z, D) + eps)
        # x = z·rstd is never formed: m_gz is mean(g ⊙ x)·rstd, and m_g is mean(g) − mean(x) mean(g ⊙ x)
        g = gamma2 * z * rstd[:, None] + e
        m_gz = mean(g * z, D) * rstd * rstd
        m_g = mean(g, D) - mean(z, D) * m_gz
        scale = lr * rstd
        G = g * scale[:, None] - (z * (m_gz * scale)[:, None] + (m_g * scale)[:, None])
        G = tl.trans(G.to(dt))
        k_step = (minus_c_last * k.to(tl.float32)).to(dt)
        o = add_product(o, G, A)
        v_at = tl.cast(i + 1, tl.int64) * (step * CHUNK * v_rows * D)
        v_ahead = load_rows(v_ptr + v_at + v_tile, ahead)
        ST = add_product(ST, G, k_step)
        G_sum = add_product(G_sum, G, ones)

        o = tl.where(alive(v_ahead), tl.trans(o), 0.0)
        o_rstd = tl.rsqrt(mean(o * o, D) + eps)
        y = gamma * o * o_rstd[:, None] + (mu + q.to(tl.float32))
        tl.store(out_ptr + at + tile, y, mask=(n < tl.minimum(CHUNK, T - i * CHUNK))[:, None])
        k, v, q, lr = k_ahead, v_ahead, q_ahead, lr_ahead


def unsupported(width: int, chunk_size: int, dtype: torch.dtype, shared_kib: int | None = None) -> str | None:
    """Return why these kernels cannot run q of this width and dtype with this chunk size, or None.

    `shared_kib` is the shared memory of the device for one program, in KiB; None leaves that out.
    """
    if width not in WIDTHS:
        return f"q's last axis D is {width}, expected one of {', '.join(map(str, WIDTHS))}"
    if chunk_size not in CHUNK_SIZES:
        return f"chunk_size is {chunk_size}, expected one of {', '.join(map(str, CHUNK_SIZES))}"
    if obstacle := dtype_obstacle("q", dtype, DTYPES):
        return obstacle
    needed = SHARED_KIB.get((width, max(16, chunk_size)), 0) if dtype == torch.float32 else 0
    if shared_kib is not None and needed > shared_kib:
        return f"D {width} with chunk_size {chunk_size} in fp32 needs {needed} KiB of shared memory, the device has {shared_kib}"
    return None


def group_chunks(width: int, chunk_size: int) -> int:
    """Return the chunks of a group, a power of two.

    A group has at least 2·width tokens: the kept states take less than 0.3 of the memory of q, k, v and out.
    It has at least four chunks, since with chunks of 16 tokens `triton_phases` needs whole blocks of ROWS = 64 tokens.
    """
    return max(4, 2 * width // chunk_size)


def states_shape(shape: Sequence[int], chunk_size: int, keep_states: bool) -> tuple[int, int, int, int]:
    """Return the shape of `forward`'s states for q of shape (B,T,R,H,D), one per group except the first.

    Takes symbolic sizes. `forward` takes its grid from the first axis, the number of programs, also without states.
    """
    B, T, R, H, D = shape
    tokens = chunk_size * group_chunks(D, chunk_size)
    return B * R * H, (T + tokens - 1) // tokens - 1 if keep_states else 0, D + 1, D


def constants(width: int, chunk_size: int) -> dict[str, int]:
    """Return the compile-time constants of both kernels. BLOCK is at least 16, the fewest rows of a `tl.dot`."""
    return {"D": width, "CHUNK": chunk_size, "BLOCK": max(16, chunk_size), "GROUP": group_chunks(width, chunk_size)}


def is_large(dtype: torch.dtype, chunk_size: int, width: int) -> bool:
    """Return whether the tiles of these sizes take more registers than those of the models in low precision."""
    return dtype == torch.float32 or chunk_size > 16 or width > 64


def configs(dtype: torch.dtype, chunk_size: int, width: int = 64) -> list[triton.Config]:
    """Return the candidates of the forward kernel; the first is the default, which runs untuned.

    168 registers let three programs of 128 threads share a multiprocessor. There is one stage: the kernel loads ahead
    itself, and Triton's own pipelining would give its tiles another layout.
    """
    # without a bound ptxas compiles some of the large ones with 32 registers
    options = [(8, 255), (4, 255)] if is_large(dtype, chunk_size, width) else [(4, 168), (4, None), (2, None)]
    return [triton.Config({}, num_warps=warps, num_stages=1, maxnreg=registers) for warps, registers in options]


def shared_arguments(x: Arguments) -> dict[str, object]:
    """Return the arguments that both kernels take: contiguous q and k, v uncopied, the rest in fp32, and the sizes.

    `bucket` combines the bit lengths of T and of the number of programs, which decide the best config.
    """
    B, T, R, H, D = x.q.shape
    in_fp32 = {"lr": x.lr, "scale": x.token_scale, "W0": x.W0, "b0": x.b0, "gamma": x.ln_weight, "mu": x.ln_bias}
    return {
        "q_ptr": x.q.contiguous(),
        "k_ptr": x.k.contiguous(),
        "v_ptr": x.v,
        **{f"{name}_ptr": tensor.float().contiguous() for name, tensor in in_fp32.items()},
        "T": T,
        "R": R,
        "H": H,
        "reverse": direction_bits(x.reverse),
        "eps": x.eps,
        "bucket": 64 * (B * R * H).bit_length() + T.bit_length(),
        **constants(D, x.chunk_size),
    }


def token_rows(v: Tensor) -> tuple[Tensor, int]:
    """Return v (B,T,R,H,D) and the rows of D elements from one token to the next.

    v is copied where that number does not describe its layout.
    """
    _, T, R, H, D = v.shape
    rows, rest = divmod(v.stride(1), D)
    expected = (T * rows * D, rows * D, H * D, D, 1)
    # the stride of an axis of size 1 is arbitrary
    same = all(size == 1 or a == b for size, a, b in zip(v.shape, v.stride(), expected, strict=True))
    return (v, rows) if same and not rest and rows >= R * H else (v.contiguous(), R * H)


def forward(x: Arguments, keep_states: bool, config: triton.Config | None = None) -> tuple[Tensor, Tensor]:
    """Return out (B,T,R,H,D) in q's dtype, and the states [W; β] in fp32, of shape `states_shape`.

    For sizes that are not `unsupported`. `config` is one of `configs`; None tunes. `triton_phases.forward` calls it for
    one phase.
    """
    arguments = shared_arguments(x)
    arguments["v_ptr"], rows = token_rows(x.v)
    states = x.q.new_empty(states_shape(x.q.shape, x.chunk_size, keep_states), dtype=torch.float32)
    out = torch.empty_like(arguments["q_ptr"])
    arguments |= {"out_ptr": out, "states_ptr": states, "v_rows": rows, "KEEP": keep_states}
    launch(
        forward_kernel, configs, (out.dtype, x.chunk_size, out.shape[-1]), (len(states),), arguments, out.device, config
    )
    return out, states
