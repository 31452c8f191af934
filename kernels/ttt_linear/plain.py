"""TTT-Linear without its LayerNorm, which reduces to linear attention: chunk by chunk, and for all chunks at once.

The loss `mse` gives the `plain` learner of `reference.ttt_linear_dual`: a chunk's step is affine in the state that it
starts from. With the loss `dot` the step does not depend on the state. Both forms are PyTorch operations,
differentiable by autograd, in fp64 for fp64 inputs and in fp32 otherwise. Shape letters as in `reference`; c counts
chunks.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype


def ttt_linear_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    *,
    loss: Literal["mse", "dot"] = "mse",
    chunk_size: int = 16,
    reverse: bool = False,
    form: Literal["recurrent", "parallel"] = "recurrent",
) -> Tensor:
    """Run the inner learner without LayerNorm and bias in one direction.

    For every chunk of n ≤ chunk_size consecutive tokens, starting from W = W0, with G = KW − V for `mse` and G = −V for
    `dot`:

        A = tril(c[:n] lrᵀ) ⊙ QKᵀ,  out = QW − AG,  W ← W − Kᵀ(c[n−1] lr ⊙ G)

    Args:
        q, k, v, lr, token_scale, W0, chunk_size, reverse: as of `op.ttt_linear`.
        loss: `mse` is ½‖KW − V‖², `dot` is −⟨KW, V⟩.
        form: `recurrent` or `parallel`, the same function. In the parallel form with `dot` the states are a sum over
            the chunks before. With `mse` they are maps W ← MW + P with M = I − Kᵀ(c[n−1] lr ⊙ K), composed in pairs, in
            2·log₂(c) rounds and with 3·D³ products for each chunk.

    Returns:
        out (B,T,H,D) in q's dtype.
    """
    dtype, T = compute_dtype(q.dtype), q.shape[1]
    Q, K, V, rate = (x.to(dtype).flip(1) if reverse else x.to(dtype) for x in (q, k, v, lr.unsqueeze(-1)))
    Q, K, V, rate = (x.transpose(1, 2) for x in (Q, K, V, rate))  # (B,H,T,D), (B,H,T,1)
    c, W = token_scale.to(dtype), W0.to(dtype)
    run = _run_recurrently if form == "recurrent" else _run_in_parallel
    out = run(Q, K, V, rate, c, W, loss, chunk_size).transpose(1, 2)[:, :T]
    return (out.flip(1) if reverse else out).to(q.dtype)


def _run_recurrently(Q, K, V, rate, c, W, loss, chunk_size):
    """Return out (B,H,T,D), one chunk after the other; Q, K, V (B,H,T,D), rate (B,H,T,1), c (chunk_size,), W (H,D,D)."""
    outs, T = [], Q.shape[2]
    for start in range(0, T, chunk_size):
        q, k, v, lr = (x[:, :, start : start + chunk_size] for x in (Q, K, V, rate))
        n = q.shape[2]
        G = k @ W - v if loss == "mse" else -v
        outs.append(q @ W - (_mask(c[:n], lr) * (q @ k.mT)) @ G)
        if start + n < T:  # no output depends on the last chunk's step
            W = W - k.mT @ (c[n - 1] * lr * G)
    return torch.cat(outs, 2)


def _run_in_parallel(Q, K, V, rate, c, W, loss, chunk_size):
    """As `_run_recurrently`, for all chunks at once; out has tokens of padding behind the T of Q."""
    T, H = Q.shape[2], W.shape[0]
    n = min(chunk_size, T)
    # (B,H,c,n,·); the tokens of zeros that fill the last chunk learn nothing
    q, k, v, lr = (F.pad(x, (0, 0, 0, -T % n)).unflatten(2, (-1, n)) for x in (Q, K, V, rate))
    scaled = (k * (c[n - 1] * lr))[:, :, :-1]  # no output depends on the last chunk's step
    steps = scaled.mT @ v[:, :, :-1]  # (B,H,c-1,D,D)
    start = W.unsqueeze(1).expand(len(Q), H, 1, *W.shape[1:])
    if loss == "dot":
        states = torch.cat((start, start + steps.cumsum(2)), 2)
        G = -v
    else:
        maps = torch.eye(W.shape[1], dtype=W.dtype, device=W.device) - scaled.mT @ k[:, :, :-1]
        states = compose(maps, steps, start)
        G = k @ states - v
    out = q @ states - (_mask(c[:n], lr) * (q @ k.mT)) @ G
    return out.flatten(2, 3)


def compose(maps: Tensor, shifts: Tensor, start: Tensor) -> Tensor:
    """Return the states X_0 = start, X_{j+1} = maps_j X_j + shifts_j, as (...,c+1,D,E).

    maps, shifts and start are (...,c,D,D), (...,c,D,E) and (...,1,D,E). Neighbouring maps are composed, the pairs
    solved in the same way, and the states between them computed from their left neighbours.
    """
    count = maps.shape[-3]
    if count == 0:
        return start
    left, right = (maps[..., :-1:2, :, :], shifts[..., :-1:2, :, :]), (maps[..., 1::2, :, :], shifts[..., 1::2, :, :])
    even = compose(right[0] @ left[0], right[0] @ left[1] + right[1], start)  # X_0, X_2, ...
    odd = maps[..., ::2, :, :] @ even[..., : (count + 1) // 2, :, :] + shifts[..., ::2, :, :]  # X_1, X_3, ...
    pairs = torch.stack((even[..., : odd.shape[-3], :, :], odd), -3).flatten(-4, -3)
    return pairs if count % 2 else torch.cat((pairs, even[..., -1:, :, :]), -3)


def _mask(c: Tensor, lr: Tensor) -> Tensor:
    """Return tril(c lrᵀ): (n,), (..., n, 1) -> (..., n, n)."""
    return torch.tril(c[:, None] * lr.mT)
