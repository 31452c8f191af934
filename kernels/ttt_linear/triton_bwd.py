"""TTT-Linear in Triton: the backward pass, by recomputation.

One program walks one (sample, direction, head) from its last group of chunks to its first, with the gradient of the state in
fp32 registers, transposed as the state is in `triton_fwd`. A group is done in two loops:

 1. Forth, from the group's kept state: the forward pass again, and all that needs no gradient of the state. That is dO, dA, dQ
    and shares of the gradients of lr, c, γ and μ. What loop 2 needs of each chunk goes to scratch memory: S, dO, A and dQK in the
    dtype of the products' operands, β and the share of lr's gradient in fp32; for one group, whatever T is (91 KiB a program at
    D = 64, chunk size 16 and two bytes an element).
 2. Back: with u = dL/dG, w = K dW' + dβ' for the gradient (dW', dβ') of the state after the chunk, s = c[n−1] lr and
    m(y) = mean over a row,

        u  = −Aᵀ dO − s ⊙ w                           dg = rstd (u − x m(u x))            ds = −G · w
        dZ = rstd (proj(γ² dg) − m(g x) dg − m(u x) G − m(u G) x),   proj(y) = y − m(y) − x m(y x)
        dK = dZ Wᵀ + dQKᵀ Q + γ dg − s ⊙ G dW'ᵀ       dV = −γ dg
        dW = dW' + Kᵀ dZ + Qᵀ dO                      dβ = dβ' + Σ dZ + Σ dO

    u has mean 0 as G has. The means of γ² dg and γ² dg x follow from those of γ² u and γ² u x: the means of loop 2 take one
    exchange between warps, after the one for G.

Every program writes its own partial sums of the gradients that are shared over the batch; torch adds them up. No atomics: two
runs give the same bits. Shape letters as in `triton_fwd`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_fwd import column_sums3, column_sums5, inner_statistics, launch, place, shared_arguments, start_state


@triton.jit(do_not_specialize=["T", "R", "H", "reverse", "bucket"])
def backward_kernel(
    dout_ptr, states_ptr, q_ptr, k_ptr, v_ptr, lr_ptr, scale_ptr, W0_ptr, b0_ptr, gamma_ptr, mu_ptr,
    dq_ptr, dk_ptr, dv_ptr, dlr_ptr, dscale_ptr, dW0_ptr, db0_ptr, dgamma_ptr, dmu_ptr,
    S_ptr, vectors_ptr, dO_ptr, squares_ptr, T, R, H, reverse, eps, bucket,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, v, and per program and direction those of the rest. Scratch: S_ptr to squares_ptr."""
    head, r, b, first, step = place(T, R, H, reverse)
    program = tl.program_id(0).to(tl.int64)
    row, param, chunks = (b * T * R + r) * H + head, r * H + head, tl.cdiv(T, CHUNK)
    d, n = tl.arange(0, D), tl.arange(0, BLOCK)
    dt: tl.constexpr = q_ptr.dtype.element_ty
    gamma = tl.load(gamma_ptr + param * D + d)[:, None]
    mu = tl.load(mu_ptr + param * D + d)[:, None]
    gamma2 = gamma * gamma
    c = tl.load(scale_ptr + r * CHUNK + n, mask=n < CHUNK, other=0.0)
    causal = n[:, None] >= n[None, :]
    groups = (chunks + GROUP - 1) // GROUP
    held = tl.minimum(GROUP, chunks)
    S_ptr += program * (held * D * D)
    dO_ptr += program * (held * D * BLOCK)
    squares_ptr += program * (held * 2 * BLOCK * BLOCK)
    vectors_ptr += program * (held * (D + BLOCK))

    dST = tl.zeros((D, D), tl.float32)
    dbeta = tl.zeros((D,), tl.float32)
    dgamma = tl.zeros((D,), tl.float32)
    dmu = tl.zeros((D,), tl.float32)
    dc = tl.zeros((BLOCK,), tl.float32)

    for behind in tl.range(0, groups, disable_licm=True):
        group = groups - 1 - behind
        if group == 0:
            W_ptr = W0_ptr + param * D * D
            b_ptr = b0_ptr + param * D
        else:
            W_ptr = states_ptr + (program * (groups - 1) + group - 1) * ((D + 1) * D)
            b_ptr = W_ptr + D * D
        ST, beta = start_state(W_ptr, b_ptr, D)
        length = tl.minimum(GROUP, chunks - group * GROUP)
        for j in tl.range(0, length, disable_licm=True):
            start = (group * GROUP + j) * CHUNK
            # The slot is j; so written, no address of a slot is held in registers across the loops, which would spill.
            slot = (group * GROUP + j) % GROUP
            inside = (start + n < T) & (n < CHUNK)
            token = (first + step * (start + n)).to(tl.int64)
            offsets = ((token * (R * H) + row) * D)[:, None] + d[None, :]
            k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
            q = tl.load(q_ptr + offsets, mask=inside[:, None], other=0.0)
            dy = tl.load(dout_ptr + offsets, mask=inside[:, None], other=0.0)
            lr = tl.load(lr_ptr + (b * T + token) * H + head, mask=inside, other=0.0)
            c_last = tl.load(scale_ptr + r * CHUNK + tl.minimum(CHUNK, T - start) - 1)

            S = ST.to(dt)
            tl.store(S_ptr + (slot * (D * D) + d[:, None] * D + d[None, :]), S)
            tl.store(vectors_ptr + (slot * (D + BLOCK) + d), beta)
            z = tl.dot(S, tl.trans(k), input_precision="ieee") + beta[:, None]
            e = gamma * (mu + tl.trans(k.to(tl.float32) - v.to(tl.float32)))
            rstd, m_x, m_xx, m_g, m_gx = inner_statistics(z, e, gamma2, eps, D)
            x = z * rstd[None, :]
            G = (gamma2 * x + e - m_g[None, :] - x * m_gx[None, :]) * rstd[None, :]
            Gd = G.to(dt)
            E = tl.where(causal, c[:, None] * lr[None, :], 0.0)
            QK = tl.dot(q, tl.trans(k), input_precision="ieee") + 1.0
            A = (E * QK).to(dt)
            square = squares_ptr + (slot * (2 * BLOCK * BLOCK) + n[:, None] * BLOCK + n[None, :])
            tl.store(square, A)
            o = tl.dot(S, tl.trans(q), input_precision="ieee") + beta[:, None]
            o -= tl.dot(Gd, tl.trans(A), input_precision="ieee")
            update = -G * (c_last * lr)[None, :]
            ST = tl.dot(update.to(dt), k, acc=ST, input_precision="ieee")
            beta += tl.sum(update, 1)

            dyT = tl.trans(dy.to(tl.float32))
            do = gamma * dyT
            oo, do_sum, do_o = column_sums3(o * o, do, do * o)
            o_rstd = tl.rsqrt(oo / D + eps)[None, :]
            o *= o_rstd
            dgamma += tl.sum(dyT * o, 1)
            dmu += tl.sum(dyT, 1)
            do = (do - do_sum[None, :] / D - o * (do_o[None, :] * o_rstd / D)) * o_rstd
            dod = do.to(dt)
            tl.store(dO_ptr + (slot * (D * BLOCK) + d[:, None] * BLOCK + n[None, :]), dod)

            dA = -tl.dot(tl.trans(dod), Gd, input_precision="ieee")
            dQK = (dA * E).to(dt)
            tl.store(square + BLOCK * BLOCK, dQK)
            dE = tl.where(causal, dA * QK, 0.0)
            dc += tl.sum(dE * lr[None, :], 1)
            tl.store(vectors_ptr + (slot * (D + BLOCK) + D + n), tl.sum(dE * c[:, None], 0))
            dq = tl.dot(tl.trans(S), dod, input_precision="ieee")
            dq += tl.dot(tl.trans(k), tl.trans(dQK), input_precision="ieee")
            tl.store(dq_ptr + offsets, (tl.trans(dq) + dy.to(tl.float32)).to(dt), mask=inside[:, None])

        tl.debug_barrier()  # other threads read what this one wrote to scratch memory
        for ahead in tl.range(0, length, disable_licm=True):
            j = length - 1 - ahead
            start = (group * GROUP + j) * CHUNK
            slot = (group * GROUP + j) % GROUP
            inside = (start + n < T) & (n < CHUNK)
            token = (first + step * (start + n)).to(tl.int64)
            offsets = ((token * (R * H) + row) * D)[:, None] + d[None, :]
            k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
            q = tl.load(q_ptr + offsets, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
            lr = tl.load(lr_ptr + (b * T + token) * H + head, mask=inside, other=0.0)
            last = tl.minimum(CHUNK, T - start) - 1
            c_last = tl.load(scale_ptr + r * CHUNK + last)
            S = tl.load(S_ptr + (slot * (D * D) + d[:, None] * D + d[None, :]))
            beta_c = tl.load(vectors_ptr + (slot * (D + BLOCK) + d))[:, None]
            do = tl.load(dO_ptr + (slot * (D * BLOCK) + d[:, None] * BLOCK + n[None, :]))
            square = squares_ptr + (slot * (2 * BLOCK * BLOCK) + n[:, None] * BLOCK + n[None, :])
            A = tl.load(square)
            dQK = tl.load(square + BLOCK * BLOCK)

            # G again.
            kT = tl.trans(k)
            z = tl.dot(S, kT, input_precision="ieee") + beta_c
            target = mu + tl.trans(k.to(tl.float32) - v.to(tl.float32))
            e = gamma * target
            rstd, m_x, m_xx, m_g, m_gx = inner_statistics(z, e, gamma2, eps, D)
            x = z * rstd[None, :]
            G = (gamma2 * x + e - m_g[None, :] - x * m_gx[None, :]) * rstd[None, :]

            # The gradient w of the step lr G k, u = dL/dG, and back through the inner gradient to Z.
            dS = dST.to(dt)
            lr_last = (c_last * lr)[None, :]
            w = tl.dot(dS, kT, input_precision="ieee") + dbeta[:, None]
            u = -tl.dot(do, A, input_precision="ieee") - w * lr_last
            dST = tl.dot(do, q, acc=dST, input_precision="ieee")
            gu = gamma2 * u
            ux, uG, gu_sum, gux, Gw = column_sums5(u * x, u * G, gu, gu * x, G * w)
            m_ux = ux[None, :] / D
            dg = (u - x * m_ux) * rstd[None, :]
            m_y = (gu_sum[None, :] / D - m_x[None, :] * m_ux) * rstd[None, :]
            m_yx = (gux[None, :] / D - m_xx[None, :] * m_ux) * rstd[None, :]
            dz = ((gamma2 - m_gx[None, :]) * dg - m_y - x * (m_yx + uG[None, :] / D) - m_ux * G) * rstd[None, :]
            dzd = dz.to(dt)
            dlr = tl.load(vectors_ptr + (slot * (D + BLOCK) + D + n)) - c_last * Gw
            tl.store(dlr_ptr + (b * T + token) * (R * H) + r * H + head, dlr, mask=inside)
            dc -= tl.where(n == last, tl.sum(lr * Gw, 0), 0.0)
            dtarget = gamma * dg
            dgamma += tl.sum(dg * (gamma * (x + x) + target), 1)
            dmu += tl.sum(dtarget, 1)
            tl.store(dv_ptr + offsets, tl.trans(-dtarget).to(dt), mask=inside[:, None])

            # Keys, and the state before the chunk.
            dk = tl.dot(tl.trans(S), dzd, input_precision="ieee") + tl.dot(tl.trans(q), dQK, input_precision="ieee") + dtarget
            dk -= tl.dot(tl.trans(dS), (G * lr_last).to(dt), input_precision="ieee")
            tl.store(dk_ptr + offsets, tl.trans(dk).to(dt), mask=inside[:, None])
            dST = tl.dot(dzd, k, acc=dST, input_precision="ieee")
            dbeta += tl.sum(dz + do.to(tl.float32), 1)
        tl.debug_barrier()  # the next group overwrites it

    tl.store(dW0_ptr + program * (D * D) + d[None, :] * D + d[:, None], dST)
    tl.store(db0_ptr + program * D + d, dbeta)
    tl.store(dgamma_ptr + program * D + d, dgamma)
    tl.store(dmu_ptr + program * D + d, dmu)
    tl.store(dscale_ptr + program * CHUNK + n, dc, mask=n < CHUNK)


def default_config(dtype: torch.dtype, chunk_size: int) -> triton.Config:
    """What runs untuned."""
    return triton.Config({}, num_warps=8 if dtype == torch.float32 or chunk_size > 16 else 4, num_stages=1)


def configs(dtype: torch.dtype, chunk_size: int) -> list[triton.Config]:
    """The candidates of the backward kernel, the default first."""
    default = default_config(dtype, chunk_size)
    rest = [(4, 1)] if default.num_warps == 8 else [(4, 2), (8, 1)]
    return [default, *(triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in rest)]


def backward(
    dout: Tensor, states: Tensor,
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, token_scale: Tensor, W0: Tensor, b0: Tensor, ln_weight: Tensor, ln_bias: Tensor,
    chunk_size: int, reverse: Sequence[bool], eps: float, config: triton.Config | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k, ... ln_bias, each in its input's shape and dtype, from dout (B,T,R,H,D) and `forward`'s states.

    `config` is one of `configs`; None tunes.
    """
    B, T, R, H, D = q.shape
    arguments = shared_arguments(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps)
    programs, block = B * R * H, arguments["BLOCK"]
    held = min(arguments["GROUP"], (T + chunk_size - 1) // chunk_size)

    def fp32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    dq, dk, dv = (torch.empty_like(arguments[f"{name}_ptr"]) for name in "qkv")
    dlr, dscale, dW0 = fp32(B, T, R, H), fp32(B, R, H, chunk_size), fp32(B, R, H, D, D)
    db0, dgamma, dmu = (fp32(B, R, H, D) for _ in range(3))
    arguments |= {"dout_ptr": dout.to(q.dtype).contiguous(), "states_ptr": states.contiguous()}
    arguments |= {"dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, "dlr_ptr": dlr, "dscale_ptr": dscale}
    arguments |= {"dW0_ptr": dW0, "db0_ptr": db0, "dgamma_ptr": dgamma, "dmu_ptr": dmu}
    arguments |= {"S_ptr": q.new_empty(programs, held, D, D), "vectors_ptr": fp32(programs, held, D + block)}
    arguments |= {"dO_ptr": q.new_empty(programs, held, D, block), "squares_ptr": q.new_empty(programs, held, 2, block, block)}
    launch(backward_kernel, configs, programs, arguments, q.device, config)

    gradients = dq, dk, dv, dlr.sum(2), dscale.sum((0, 2)), dW0.sum(0), db0.sum(0), dgamma.sum(0), dmu.sum(0)
    inputs = q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias
    return tuple(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))
