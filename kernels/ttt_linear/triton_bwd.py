"""TTT-Linear in Triton: the backward pass, by recomputation.

One program walks one (sample, direction, head) from its last group of chunks to its first, with the gradient of the state in
fp32 registers, transposed as the state is in `triton_fwd`. A group is done in two loops:

 1. Forward from the group's kept state: the forward pass again, and everything that needs no gradient of the state. That is dO, dA,
    dQ and parts of the gradients of c, γ and μ. What loop 2 needs of each chunk goes to scratch memory: S, x, G, lr G, dO, A and
    dQK in the dtype of the products' operands, rstd and mean(g x) in fp32. It is for one group, whatever T is (137 KiB a program
    at D = 64, chunk size 16 and two bytes an element). A and dQK are kept with one row per key.
 2. Backward: with h = dL/d(lr G) for the gradient (dW', dβ') of the state after the chunk, c₁ the last c and m(y) = mean over a row,

        h  = Aᵀ dO − c₁ (K dW' + dβ')                 dg = rstd lr (h − x m(h x))         dlr = G · h
        dZ = rstd (y − m(y) − x m(y x) − m(g x) dg − lr m(h x) G − lr m(h G) x),   y = γ² dg
        dK = dZ Wᵀ + dQKᵀ Q + γ dg − c₁ lr ⊙ G dW'ᵀ   dV = −γ dg
        dW = dW' + Kᵀ dZ + Qᵀ dO                      dβ = dβ' + Σ dZ + Σ dO

    A and dQK have the sign here with which A enters O.

Every program writes its own partial sums of the gradients that are shared over the batch, and torch adds them up. There are no
atomics: two runs give the same bits. `anchor` is loaded only for `alive`; its value is not used. Shape letters as in `triton_fwd`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import launch
from .reference import Arguments
from .triton_fwd import alive, place, shared_arguments, start_state


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
):
    """Write the gradients of q, k, v, and per program and direction those of the rest. S_ptr to squares_ptr are scratch memory."""
    head, r, b, first, step = place(T, R, H, reverse)
    program = tl.program_id(0).to(tl.int64)
    param, chunks = r * H + head, tl.cdiv(T, CHUNK)
    d, n = tl.arange(0, D), tl.arange(0, BLOCK)
    dt: tl.constexpr = q_ptr.dtype.element_ty
    minus_c_last = -tl.load(scale_ptr + r * CHUNK + CHUNK - 1)
    ones = tl.full((BLOCK, BLOCK), 1.0, dt)
    groups = (chunks + GROUP - 1) // GROUP
    held = tl.minimum(GROUP, chunks)
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

    for behind in tl.range(0, groups, disable_licm=True):
        group = groups - 1 - behind
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
        length = tl.minimum(GROUP, chunks - group * GROUP)
        for j in tl.range(0, length, disable_licm=True):
            chunk = group * GROUP + j
            # it is j; written like this, no address of a slot is held in registers across the loops, which would spill
            slot = chunk % GROUP
            inside = n < tl.minimum(CHUNK, T - chunk * CHUNK)
            at = tl.cast(chunk, tl.int64) * (step * CHUNK * R * H * D)
            k = tl.load(k_ptr + at + tile, mask=inside[:, None], other=0.0)
            q = tl.load(q_ptr + at + tile, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + at + tile, mask=inside[:, None], other=0.0)
            dy = tl.load(dout_ptr + at + tile, mask=inside[:, None], other=0.0)
            lr = tl.load(lr_ptr + chunk * (step * CHUNK * H) + step * H * n, mask=inside, other=0.0)

            S = ST.to(dt)
            tl.store(S_ptr + (slot * (D * D) + d[:, None] * D + d[None, :]), S)
            beta = beta0 + minus_c_last * G_sum
            z = tl.dot(S, tl.trans(k), acc=beta, input_precision="ieee")
            o = tl.dot(S, tl.trans(q), acc=beta, input_precision="ieee")
            c = tl.load(scale_ptr + r * CHUNK + n, mask=n < CHUNK, other=0.0)
            QK = tl.where(n[:, None] <= n[None, :], tl.dot(k, tl.trans(q), input_precision="ieee") + 1.0, 0.0)
            A = (-c[None, :] * QK).to(dt)
            square = squares_ptr + (slot * (2 * BLOCK * BLOCK) + n[:, None] * BLOCK + n[None, :])
            tl.store(square, A)
            anchor = tl.load(k_ptr + at + tile, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            z = tl.where(alive(anchor), tl.trans(z), 0.0)
            gamma = tl.load(gamma_ptr + param * D + d)[None, :]
            mu = tl.load(mu_ptr + param * D + d)[None, :]
            e = gamma * (mu + (k.to(tl.float32) - v.to(tl.float32)))
            k_step = (minus_c_last * k.to(tl.float32)).to(dt)
            rstd = tl.rsqrt(tl.sum(z * z, 1) / D + eps)
            x = z * rstd[:, None]
            g = gamma * gamma * x + e
            m_g = tl.sum(g, 1) / D
            m_gx = tl.sum(g * x, 1) / D
            vectors = vectors_ptr + slot * (2 * BLOCK)
            tl.store(vectors + n, rstd)
            tl.store(vectors + BLOCK + n, m_gx)
            G = g * rstd[:, None] - (x * (m_gx * rstd)[:, None] + (m_g * rstd)[:, None])
            tiles = tiles_ptr + slot * (4 * BLOCK * D) + flat
            tl.store(tiles, x.to(dt))
            tl.store(tiles + BLOCK * D, G.to(dt))
            G = (lr[:, None] * G).to(dt)
            tl.store(tiles + 2 * BLOCK * D, G)
            GT = tl.trans(G)
            o = tl.dot(GT, A, acc=o, input_precision="ieee")
            ST = tl.dot(GT, k_step, acc=ST, input_precision="ieee")
            G_sum = tl.dot(GT, ones, acc=G_sum, input_precision="ieee")

            anchor = tl.load(q_ptr + at + tile, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            o = tl.where(alive(anchor), tl.trans(o), 0.0)
            dy = dy.to(tl.float32)
            do = gamma * dy
            o_rstd = tl.rsqrt(tl.sum(o * o, 1) / D + eps)
            m_do = tl.sum(do, 1) / D
            m_doo = tl.sum(do * o, 1) / D
            dgamma += dy * (o * o_rstd[:, None])
            dmu += dy
            do = do * o_rstd[:, None] - (o * (m_doo * o_rstd * o_rstd * o_rstd)[:, None] + (m_do * o_rstd)[:, None])
            dod = do.to(dt)
            tl.store(tiles + 3 * BLOCK * D, dod)

            dA = tl.dot(G, tl.trans(dod), input_precision="ieee")
            dQK = tl.where(n[:, None] <= n[None, :], dA * -c[None, :], 0.0).to(dt)
            tl.store(square + BLOCK * BLOCK, dQK)
            dc_here += dA * QK
            dq = tl.dot(tl.trans(S), tl.trans(dod), input_precision="ieee")
            dq = tl.dot(tl.trans(k), dQK, acc=dq, input_precision="ieee")
            tl.store(dq_ptr + at + tile, (tl.trans(dq) + dy).to(dt), mask=inside[:, None])

        dc -= tl.sum(dc_here, 0)

        tl.debug_barrier()  # other threads read what this one wrote to scratch memory
        dST = tl.load(dW0_ptr + d[None, :] * D + d[:, None], mask=(d >= 0)[:, None] & (behind > 0), other=0.0)
        dbeta = tl.load(db0_ptr + d, mask=(d >= 0) & (behind > 0), other=0.0)[:, None] + tl.zeros((D, BLOCK), tl.float32)
        dc_last = tl.zeros((D, BLOCK), tl.float32)
        for ahead in tl.range(0, length, disable_licm=True):
            chunk = group * GROUP + length - 1 - ahead
            slot = chunk % GROUP
            inside = n < tl.minimum(CHUNK, T - chunk * CHUNK)
            at = tl.cast(chunk, tl.int64) * (step * CHUNK * R * H * D)
            k = tl.load(k_ptr + at + tile, mask=inside[:, None], other=0.0)
            q = tl.load(q_ptr + at + tile, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + at + tile, mask=inside[:, None], other=0.0)
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
            w = tl.dot(dS, tl.trans(k), acc=dbeta, input_precision="ieee")
            dc_last += w * tl.trans(Gd).to(tl.float32)
            h = tl.dot(tl.trans(do), tl.trans(A), acc=w * minus_c_last, input_precision="ieee")
            dST = tl.dot(tl.trans(do), q, acc=dST, input_precision="ieee")
            dbeta = tl.dot(tl.trans(do), ones, acc=dbeta, input_precision="ieee")
            anchor = tl.load(k_ptr + at + tile, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            h = tl.where(alive(anchor), tl.trans(h), 0.0)
            hG = tl.sum(h * G, 1)
            m_ux = tl.sum(h * x, 1) * lr / D
            tl.store(dlr_ptr + chunk * (step * CHUNK * R * H) + step * R * H * n, hG, mask=inside)
            gamma = tl.load(gamma_ptr + param * D + d)[None, :]
            mu = tl.load(mu_ptr + param * D + d)[None, :]
            dg = h * (lr * rstd)[:, None] - x * (m_ux * rstd)[:, None]
            dtarget = gamma * dg
            y = gamma * dtarget
            m_y = tl.sum(y, 1) / D
            m_x = tl.sum(y * x, 1) / D + hG * lr / D
            dz = (y - m_gx[:, None] * dg - (m_ux[:, None] * G + (m_x[:, None] * x + m_y[:, None]))) * rstd[:, None]
            dzd = dz.to(dt)
            dgamma += dg * (2 * gamma * x + (mu + (k.to(tl.float32) - v.to(tl.float32))))
            dmu += dtarget
            tl.store(dv_ptr + at + tile, (-dtarget).to(dt), mask=inside[:, None])

            # the keys, and the state before the chunk
            dk = tl.dot(tl.trans(dS), tl.trans(Gd), input_precision="ieee") * minus_c_last
            dk = tl.dot(tl.trans(S), tl.trans(dzd), acc=dk, input_precision="ieee")
            dk = tl.dot(tl.trans(q), tl.trans(dQK), acc=dk, input_precision="ieee")
            dST = tl.dot(tl.trans(dzd), k, acc=dST, input_precision="ieee")
            dbeta = tl.dot(tl.trans(dzd), ones, acc=dbeta, input_precision="ieee")
            tl.store(dk_ptr + at + tile, (tl.trans(dk) + dtarget).to(dt), mask=inside[:, None])
        # the gradient of the state waits in its outputs, outside the registers of loop 1
        tl.store(dW0_ptr + d[None, :] * D + d[:, None], dST)
        tl.store(db0_ptr + d[:, None] + 0 * n[None, :], dbeta, mask=(n == 0)[None, :])
        dc -= tl.where(n == CHUNK - 1, tl.sum(tl.sum(dc_last, 0), 0), 0.0)
        tl.debug_barrier()  # the next group overwrites the scratch memory

    tl.store(dgamma_ptr + program * D + d, tl.sum(dgamma, 0))
    tl.store(dmu_ptr + program * D + d, tl.sum(dmu, 0))
    tl.store(dscale_ptr + program * CHUNK + n, dc, mask=n < CHUNK)


def configs(dtype: torch.dtype, chunk_size: int, width: int = 64) -> list[triton.Config]:
    """The candidates of the backward kernel; the first is the default, which runs untuned."""
    if dtype == torch.float32 or chunk_size > 16 or width > 64:
        # without a bound ptxas compiles chunk size 64 for sm_80 with 32 registers
        options = [(8, 255), (4, 255)]
    else:
        options = [(4, None), (8, None)]
    return [triton.Config({}, num_warps=warps, num_stages=1, maxnreg=registers) for warps, registers in options]


def backward(dout: Tensor, states: Tensor, x: Arguments, config: triton.Config | None = None) -> tuple[Tensor, ...]:
    """The gradients of q, k, ... ln_bias, each in its input's shape and dtype, from dout (B,T,R,H,D) and `forward`'s states.

    `config` is one of `configs`; None tunes.
    """
    q, chunk_size = x.q, x.chunk_size
    B, T, R, H, D = q.shape
    arguments = shared_arguments(x)
    programs, block = B * R * H, arguments["BLOCK"]
    held = min(arguments["GROUP"], (T + chunk_size - 1) // chunk_size)

    def fp32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    # v's own layout would cost registers here, and spills
    arguments["v_ptr"] = x.v.contiguous()
    dq, dk, dv = (torch.empty_like(arguments[f"{name}_ptr"]) for name in "qkv")
    dlr, dscale, dW0 = fp32(B, T, R, H), fp32(B, R, H, chunk_size), fp32(B, R, H, D, D)
    db0, dgamma, dmu = (fp32(B, R, H, D) for _ in range(3))
    arguments |= {"dout_ptr": dout.to(q.dtype).contiguous(), "states_ptr": states.contiguous()}
    arguments |= {"dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "dlr_ptr": dlr, "dscale_ptr": dscale}
    arguments |= {"dW0_ptr": dW0, "db0_ptr": db0, "dgamma_ptr": dgamma, "dmu_ptr": dmu}
    arguments |= {"S_ptr": q.new_empty(programs, held, D, D), "vectors_ptr": fp32(programs, held, 2, block)}
    arguments |= {"tiles_ptr": q.new_empty(programs, held, 4, block, D)}
    arguments |= {"squares_ptr": q.new_empty(programs, held, 2, block, block)}
    launch(backward_kernel, configs, (q.dtype, chunk_size, D), (programs,), arguments, q.device, config)

    gradients = dq, dk, dv, dlr.sum(2), dscale.sum((0, 2)), dW0.sum(0), db0.sum(0), dgamma.sum(0), dmu.sum(0)
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, x[:9], strict=True))
