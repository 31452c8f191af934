"""Triton backward pass of TTT-Linear, by recomputation.

One program walks one (sample, direction, head) from its last group of chunks to its first, with the gradient of the
state in fp32 registers, transposed as the state is in `triton_fwd`. A group is done in two loops. Loop 1 depends on
nothing but the kept states. Where there are few programs it is therefore a launch of its own, with a program for every
group, and loop 2 is another. That halves the chain of dependent steps, for scratch memory for all groups instead of
one.

 1. Forward from the group's kept state: the forward pass again, and everything that needs no gradient of the state.
     That is dO, dA, dQ and parts of the gradients of c, γ and μ. The inputs of loop 2 from each chunk go to scratch
     memory: S, x, G, lr G, dO, A and dQK in the dtype of the products' operands, rstd and mean(g x) in fp32. The memory
     is for one group, whatever T is (137 KiB a program at D = 64, chunk size 16 and two bytes an element), or in two
     launches for all. A and dQK are kept with one row per key.
 2. Backward: with h = dL/d(lr G) for the gradient (dW', dβ') of the state after the chunk, c₁ the last c and m(y) =
     mean over a row,

        h  = Aᵀ dO − c₁ (K dW' + dβ')                 dg = rstd lr (h − m(h) − x m(h x))  dlr = G · h
        dZ = rstd (y − m(y) − x m(y x) − m(g x) dg − lr m(h x) G − lr m(h G) x),   y = γ² dg
        dK = dZ Wᵀ + dQKᵀ Q + γ dg − c₁ lr ⊙ G dW'ᵀ   dV = −γ dg
        dW = dW' + Kᵀ dZ + Qᵀ dO                      dβ = dβ' + Σ dZ + Σ dO

    A and dQK have the sign here with which A enters O.

Every program writes its own partial sums of the gradients that are shared over the batch, and torch adds them up. There
are no atomics: two runs give the same bits. `anchor` is loaded only for `alive`; its value is not used. Shape letters
as in `triton_fwd`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import find_gpu
from ..triton_launch import launch
from ..triton_math import add_product, mean, product
from .reference import Arguments
from .triton_fwd import alive, is_large, load_rows, place, shared_arguments, start_state, store_state

# the loops of a launch: both, group by group; the first alone, with a program for each group; the second alone
BOTH, REPLAY, BACK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["T", "R", "H", "reverse", "bucket"])
def backward_kernel(
    dout_ptr,
    states_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lr_ptr,
    scale_ptr,
    W0_ptr,
    b0_ptr,
    gamma_ptr,
    mu_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dlr_ptr,
    dscale_ptr,
    dW0_ptr,
    db0_ptr,
    dgamma_ptr,
    dmu_ptr,
    S_ptr,
    vectors_ptr,
    tiles_ptr,
    squares_ptr,
    T,
    R,
    H,
    reverse,
    eps,
    bucket,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PASS: tl.constexpr,
):
    """Write the gradients of q, k, v, and those of the rest for each program and direction.

    PASS is BOTH, REPLAY or BACK. S_ptr, vectors_ptr, tiles_ptr and squares_ptr are scratch memory.
    """
    head, r, b, first, step = place(T, R, H, reverse)
    program = tl.program_id(0).to(tl.int64)
    param, chunks = r * H + head, tl.cdiv(T, CHUNK)
    d, n = tl.arange(0, D), tl.arange(0, BLOCK)
    dt: tl.constexpr = q_ptr.dtype.element_ty
    minus_c_last = -tl.load(scale_ptr + r * CHUNK + CHUNK - 1)
    ones = tl.full((BLOCK, BLOCK), 1.0, dt)
    groups = (chunks + GROUP - 1) // GROUP
    # scratch memory for all groups can have more than 2³¹ elements
    held = tl.minimum(GROUP, chunks) if PASS == BOTH else tl.cast(chunks, tl.int64)
    begin = groups - 1 - tl.program_id(1) if PASS == REPLAY else 0
    end = begin + 1 if PASS == REPLAY else groups
    row = program * groups + tl.program_id(1) if PASS == REPLAY else program
    S_ptr += program * (held * D * D)
    tiles_ptr += program * (held * 4 * BLOCK * D)
    squares_ptr += program * (held * 2 * BLOCK * BLOCK)
    vectors_ptr += program * (held * 2 * BLOCK)
    start = (b * T + first) * (R * H) + param
    q_ptr += start * D
    k_ptr += start * D
    v_ptr += start * D
    dout_ptr += start * D
    dq_ptr += start * D
    dk_ptr += start * D
    dv_ptr += start * D
    lr_ptr += (b * T + first) * H + head
    dlr_ptr += start
    tile = (step * R * H * D) * n[:, None] + d[None, :]
    flat = n[:, None] * D + d[None, :]

    dgamma = tl.zeros((BLOCK, D), tl.float32)
    dmu = tl.zeros((BLOCK, D), tl.float32)
    dc = tl.zeros((BLOCK,), tl.float32)
    dW0_ptr += program * (D * D)
    db0_ptr += program * D

    for behind in tl.range(begin, end, disable_licm=True):
        group = groups - 1 - behind
        length = tl.minimum(GROUP, chunks - group * GROUP)
        if PASS != BACK:
            if group == 0:
                W_ptr = W0_ptr + param * D * D
                b_ptr = b0_ptr + param * D
            else:
                W_ptr = states_ptr + (program * (groups - 1) + group - 1) * ((D + 1) * D)
                b_ptr = W_ptr + D * D
            ST, beta0 = start_state(W_ptr, b_ptr, D)
            beta0 = beta0[:, None]
            G_sum = tl.zeros((D, BLOCK), tl.float32)
            dc_here = tl.zeros((BLOCK, BLOCK), tl.float32)
            for j in tl.range(0, length, disable_licm=True):
                chunk = group * GROUP + j
                # equal to j; written like this, no address of a slot stays in registers across the loops, which would
                # spill
                slot = chunk % GROUP if PASS == BOTH else tl.cast(chunk, tl.int64)
                inside = n < tl.minimum(CHUNK, T - chunk * CHUNK)
                at = tl.cast(chunk, tl.int64) * (step * CHUNK * R * H * D)
                k = load_rows(k_ptr + at + tile, inside)
                q = load_rows(q_ptr + at + tile, inside)
                v = load_rows(v_ptr + at + tile, inside)
                dy = load_rows(dout_ptr + at + tile, inside)
                lr = tl.load(lr_ptr + chunk * (step * CHUNK * H) + step * H * n, mask=inside, other=0.0)

                S = ST.to(dt)
                tl.store(S_ptr + (slot * (D * D) + d[:, None] * D + d[None, :]), S)
                beta = beta0 + minus_c_last * G_sum
                z = add_product(beta, S, tl.trans(k))
                o = add_product(beta, S, tl.trans(q))
                c = tl.load(scale_ptr + r * CHUNK + n, mask=n < CHUNK, other=0.0)
                QK = tl.where(n[:, None] <= n[None, :], product(k, tl.trans(q)) + 1.0, 0.0)
                A = (-c[None, :] * QK).to(dt)
                square = squares_ptr + (slot * (2 * BLOCK * BLOCK) + n[:, None] * BLOCK + n[None, :])
                tl.store(square, A)
                anchor = tl.load(k_ptr + at + tile, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
                z = tl.where(alive(anchor), tl.trans(z), 0.0)
                gamma = tl.load(gamma_ptr + param * D + d)[None, :]
                mu = tl.load(mu_ptr + param * D + d)[None, :]
                e = gamma * (mu + (k.to(tl.float32) - v.to(tl.float32)))
                k_step = (minus_c_last * k.to(tl.float32)).to(dt)
                rstd = tl.rsqrt(mean(z * z, D) + eps)
                x = z * rstd[:, None]
                g = gamma * gamma * x + e
                m_gx = mean(g * x, D)
                m_g = mean(g, D) - mean(x, D) * m_gx
                vectors = vectors_ptr + slot * (2 * BLOCK)
                tl.store(vectors + n, rstd)
                tl.store(vectors + BLOCK + n, m_gx)
                G = g * rstd[:, None] - (x * (m_gx * rstd)[:, None] + (m_g * rstd)[:, None])
                tiles = tiles_ptr + slot * (4 * BLOCK * D) + flat
                tl.store(tiles, x)
                tl.store(tiles + BLOCK * D, G)
                G = (lr[:, None] * G).to(dt)
                tl.store(tiles + 2 * BLOCK * D, G)
                GT = tl.trans(G)
                o = add_product(o, GT, A)
                ST = add_product(ST, GT, k_step)
                G_sum = add_product(G_sum, GT, ones)

                anchor = tl.load(q_ptr + at + tile, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
                o = tl.where(alive(anchor), tl.trans(o), 0.0)
                dy = dy.to(tl.float32)
                do = gamma * dy
                o_rstd = tl.rsqrt(mean(o * o, D) + eps)
                m_do = mean(do, D)
                m_doo = mean(do * o, D)
                dgamma += dy * (o * o_rstd[:, None])
                dmu += dy
                do = do * o_rstd[:, None] - (o * (m_doo * o_rstd * o_rstd * o_rstd)[:, None] + (m_do * o_rstd)[:, None])
                dod = do.to(dt)
                tl.store(tiles + 3 * BLOCK * D, dod)

                dA = product(G, tl.trans(dod))
                dQK = tl.where(n[:, None] <= n[None, :], dA * -c[None, :], 0.0).to(dt)
                tl.store(square + BLOCK * BLOCK, dQK)
                dc_here += dA * QK
                dq = product(tl.trans(S), tl.trans(dod))
                dq = add_product(dq, tl.trans(k), dQK)
                tl.store(dq_ptr + at + tile, tl.trans(dq) + dy, mask=inside[:, None])

            dc -= tl.sum(dc_here, 0)

        if PASS == BOTH:
            tl.debug_barrier()  # other threads read this one's scratch memory
        if PASS != REPLAY:
            # the first group starts from zero, the others from the gradient that the group before stored there
            dST = tl.load(dW0_ptr + d[None, :] * D + d[:, None], mask=(d >= 0)[:, None] & (behind > 0), other=0.0)
            dbeta = tl.load(db0_ptr + d, mask=(d >= 0) & (behind > 0), other=0.0)[:, None] + tl.zeros(
                (D, BLOCK), tl.float32
            )
            dc_last = tl.zeros((D, BLOCK), tl.float32)
            for ahead in tl.range(0, length, disable_licm=True):
                chunk = group * GROUP + length - 1 - ahead
                slot = chunk % GROUP if PASS == BOTH else tl.cast(chunk, tl.int64)
                inside = n < tl.minimum(CHUNK, T - chunk * CHUNK)
                at = tl.cast(chunk, tl.int64) * (step * CHUNK * R * H * D)
                k = load_rows(k_ptr + at + tile, inside)
                q = load_rows(q_ptr + at + tile, inside)
                v = load_rows(v_ptr + at + tile, inside)
                lr = tl.load(lr_ptr + chunk * (step * CHUNK * H) + step * H * n, mask=inside, other=0.0)
                S = tl.load(S_ptr + (slot * (D * D) + d[:, None] * D + d[None, :]))
                tiles = tiles_ptr + slot * (4 * BLOCK * D) + flat
                x = tl.load(tiles).to(tl.float32)
                G = tl.load(tiles + BLOCK * D).to(tl.float32)
                Gd = tl.load(tiles + 2 * BLOCK * D)
                do = tl.load(tiles + 3 * BLOCK * D)
                square = squares_ptr + (slot * (2 * BLOCK * BLOCK) + n[:, None] * BLOCK + n[None, :])
                A = tl.load(square)
                dQK = tl.load(square + BLOCK * BLOCK)
                vectors = vectors_ptr + slot * (2 * BLOCK)
                rstd = tl.load(vectors + n)
                m_gx = tl.load(vectors + BLOCK + n)

                # the gradient h of lr G, and from there through the inner gradient to Z
                dS = dST.to(dt)
                w = add_product(dbeta, dS, tl.trans(k))
                dc_last += w * tl.trans(Gd).to(tl.float32)
                h = add_product(w * minus_c_last, tl.trans(do), tl.trans(A))
                dST = add_product(dST, tl.trans(do), q)
                dbeta = add_product(dbeta, tl.trans(do), ones)
                anchor = tl.load(k_ptr + at + tile, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
                h = tl.where(alive(anchor), tl.trans(h), 0.0)
                hG = tl.sum(h * G, 1)
                m_ux = tl.sum(h * x, 1) * lr / D
                tl.store(dlr_ptr + chunk * (step * CHUNK * R * H) + step * R * H * n, hG, mask=inside)
                gamma = tl.load(gamma_ptr + param * D + d)[None, :]
                mu = tl.load(mu_ptr + param * D + d)[None, :]
                m_h = mean(h, D)
                dg = (h - m_h[:, None]) * (lr * rstd)[:, None] - x * (m_ux * rstd)[:, None]
                dtarget = gamma * dg
                y = gamma * dtarget
                m_y = mean(y, D)
                m_x = mean(y * x, D) + hG * lr / D
                dz = (y - m_gx[:, None] * dg - (m_ux[:, None] * G + (m_x[:, None] * x + m_y[:, None]))) * rstd[:, None]
                dzd = dz.to(dt)
                dgamma += dg * (2 * gamma * x + (mu + (k.to(tl.float32) - v.to(tl.float32))))
                dmu += dtarget
                tl.store(dv_ptr + at + tile, -dtarget, mask=inside[:, None])

                # the keys, and the state before the chunk
                dk = product(tl.trans(dS), tl.trans(Gd)) * minus_c_last
                dk = add_product(dk, tl.trans(S), tl.trans(dzd))
                dk = add_product(dk, tl.trans(q), tl.trans(dQK))
                dST = add_product(dST, tl.trans(dzd), k)
                dbeta = add_product(dbeta, tl.trans(dzd), ones)
                tl.store(dk_ptr + at + tile, tl.trans(dk) + dtarget, mask=inside[:, None])
            # between groups the gradient of the state is kept in its outputs, which leaves the registers to loop 1
            store_state(dW0_ptr, db0_ptr, dST, dbeta, D)
            dc -= tl.where(n == CHUNK - 1, tl.sum(tl.sum(dc_last, 0), 0), 0.0)
        if PASS != REPLAY:
            # other threads read this one's part of the state's gradient; the next group overwrites the scratch memory
            tl.debug_barrier()

    tl.store(dgamma_ptr + row * D + d, tl.sum(dgamma, 0))
    tl.store(dmu_ptr + row * D + d, tl.sum(dmu, 0))
    tl.store(dscale_ptr + row * CHUNK + n, dc, mask=n < CHUNK)


def configs(dtype: torch.dtype, chunk_size: int, width: int = 64) -> list[triton.Config]:
    """Return the candidates of the kernel in one pass; the first is the default, which runs untuned.

    168 registers let three programs of 128 threads share a multiprocessor. This pass has many programs: the spilled
    registers cost less than a second wave.
    """
    if is_large(dtype, chunk_size, width):
        return _large_configs(dtype, chunk_size)
    return [
        triton.Config({}, num_warps=warps, num_stages=1, maxnreg=registers)
        for warps, registers in ((4, 168), (4, None), (8, None))
    ]


def replay_configs(dtype: torch.dtype, chunk_size: int, width: int = 64) -> list[triton.Config]:
    """Return the candidates of the pass REPLAY.

    Here and in BACK there are registers and shared memory to load ahead.
    """
    if is_large(dtype, chunk_size, width):
        return _large_configs(dtype, chunk_size)
    return [triton.Config({}, num_warps=4, num_stages=stages) for stages in (2, 1)]


def back_configs(dtype: torch.dtype, chunk_size: int, width: int = 64) -> list[triton.Config]:
    """Return the candidates of the pass BACK."""
    if is_large(dtype, chunk_size, width):
        return _large_configs(dtype, chunk_size)
    return [triton.Config({}, num_warps=4, num_stages=stages) for stages in (3, 1)]


def _large_configs(dtype: torch.dtype, chunk_size: int) -> list[triton.Config]:
    """Return the candidates of every pass for sizes that are `is_large`."""
    # for chunks of 32 tokens of two-byte elements, Triton 3.6's code for 8 warps leaves the bounds of its shared memory
    several = (4,) if chunk_size == 32 and dtype != torch.float32 else (8, 4)
    # without a bound ptxas compiles chunk size 64 for sm_80 with 32 registers
    return [triton.Config({}, num_warps=warps, num_stages=1, maxnreg=255) for warps in several]


class TwoPasses(NamedTuple):
    """The configs of the passes REPLAY and BACK."""

    replay: triton.Config
    back: triton.Config


def takes_two_passes(programs: int, device: torch.device) -> bool:
    """Return whether programs are so few that the pass REPLAY, with one for each group, fills the device better.

    That is so for up to two programs a multiprocessor; the scratch memory of all groups is then at most 1/4 GiB per
    thousand tokens.
    """
    gpu = find_gpu(device)
    return gpu is not None and programs <= 2 * gpu.multi_processor_count


def backward(
    dout: Tensor, states: Tensor, x: Arguments, config: triton.Config | TwoPasses | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, ... ln_bias, each in its input's shape and dtype.

    `dout` is (B,T,R,H,D), `states` those of `forward`. `config` is one of `configs`, for one pass, or a pair of those
    of two; None chooses the passes by `takes_two_passes`, and tunes.
    """
    q, chunk_size = x.q, x.chunk_size
    B, T, R, H, D = q.shape
    arguments = shared_arguments(x)
    programs, block, chunks = B * R * H, arguments["BLOCK"], (T + chunk_size - 1) // chunk_size
    groups = (chunks + arguments["GROUP"] - 1) // arguments["GROUP"]
    two = takes_two_passes(programs, q.device) if config is None else isinstance(config, TwoPasses)
    held = chunks if two else min(arguments["GROUP"], chunks)

    def fp32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    # addresses by v's own strides would cost registers here, and spill; dv has the layout of this copy
    arguments["v_ptr"] = x.v.contiguous()
    dq, dk, dv = (torch.empty_like(arguments[f"{name}_ptr"]) for name in "qkv")
    dlr, dW0, db0 = fp32(B, T, R, H), fp32(B, R, H, D, D), fp32(B, R, H, D)
    arguments |= {"dout_ptr": dout.to(q.dtype).contiguous(), "states_ptr": states.contiguous()}
    arguments |= {"dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "dlr_ptr": dlr, "dW0_ptr": dW0, "db0_ptr": db0}
    arguments |= {"S_ptr": q.new_empty(programs, held, D, D), "vectors_ptr": fp32(programs, held, 2, block)}
    arguments |= {"tiles_ptr": q.new_empty(programs, held, 4, block, D)}
    arguments |= {"squares_ptr": q.new_empty(programs, held, 2, block, block)}
    shared = []  # for each pass the partial sums of c, γ and μ, with the groups as the fourth axis
    sizes = q.dtype, chunk_size, D
    passes = [(REPLAY, groups, replay_configs), (BACK, 1, back_configs)] if two else [(BOTH, 1, configs)]
    chosen = config if isinstance(config, TwoPasses) else (config,) * len(passes)
    for (which, parts, candidates), own in zip(passes, chosen, strict=True):
        sums = [fp32(B, R, H, parts, width) for width in (chunk_size, D, D)]
        own_arguments = (
            arguments | dict(zip(("dscale_ptr", "dgamma_ptr", "dmu_ptr"), sums, strict=True)) | {"PASS": which.value}
        )
        launch(backward_kernel, candidates, sizes, (programs, parts), own_arguments, q.device, own)
        shared.append(sums)
    dscale, dgamma, dmu = (each[0] if len(each) == 1 else torch.cat(each, 3) for each in zip(*shared, strict=True))

    inner = dscale.sum((0, 2, 3)), dW0.sum(0), db0.sum(0), dgamma.sum((0, 3)), dmu.sum((0, 3))
    gradients = dq, dk, dv, dlr.sum(2), *inner
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, x[:9], strict=True))
