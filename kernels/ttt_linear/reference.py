"""Arguments of TTT-Linear, and its dual form, against which every backend is tested.

The state of a single token is never materialised. Plain PyTorch operations, differentiable by autograd, in fp64 for
fp64 inputs and in fp32 otherwise.

Shape letters: B images, T tokens, R directions, H heads, D head width, n <= chunk_size tokens of a chunk.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..dispatch import compute_dtype

Inner = Literal["ln", "plain"]
# least tokens from one kept state to the next in the backends `torch` and `numba`: at D = 64 states take half the memory
# of the output
_SEGMENT = 128


class Arguments(NamedTuple):
    """Arguments of every backend, for R directions.

    q, k, v: (B,T,R,H,D), of one dtype. lr: (B,T,H), shared by the directions. token_scale: (R,chunk_size). W0:
    (R,H,D,D). b0, ln_weight, ln_bias: (R,H,D). reverse: R flags; a direction with True is scanned from the last token.

    The tensors stay in front: backends take them by their places, and return the gradients in this order.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lr: Tensor
    token_scale: Tensor
    W0: Tensor
    b0: Tensor
    ln_weight: Tensor
    ln_bias: Tensor
    chunk_size: int
    reverse: Sequence[bool]
    eps: float


def segment_length(T: int, chunk_size: int) -> int:
    """Return the tokens from one kept state to the next, whole chunks. Takes symbolic sizes.

    The backward pass starts from the state before each segment; that before the first is the start state itself.
    """
    n = torch.sym_min(chunk_size, T)
    return (_SEGMENT + n - 1) // n * n


def states_shape(shape: Sequence[int], chunk_size: int, keep_states: bool) -> tuple[int, int, int, int, int, int]:
    """Return the shape of the states before all segments but the first, for q of shape (B,T,R,H,D).

    A state is W with b as its last row. Without `keep_states` there are none. Takes symbolic sizes. The states of the
    backend `triton` have another shape, see `triton_fwd.states_shape`.
    """
    B, T, R, H, D = shape
    return B, R, H, (T - 1) // segment_length(T, chunk_size) if keep_states else 0, D + 1, D


class InnerLearning(NamedTuple):
    """Gradient and loss of the inner learner at each token, in the order of the input.

    Both are taken at the state with which the token's chunk starts. gradient: (B,T,H,D), G = dℓ/dZ. loss: (B,T,H), the
    reconstruction loss ℓ = ½‖LN(Z) − (V − K)‖² (`plain`: ½‖Z − V‖²).
    """

    gradient: Tensor
    loss: Tensor


def ttt_linear_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    b0: Tensor | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    chunk_size: int = 16,
    reverse: bool = False,
    eps: float = 1e-6,
    inner: Inner = "ln",
    return_inner: bool = False,
) -> Tensor | tuple[Tensor, InnerLearning]:
    """Run the dual form, O = QW + β − AG with A = tril(c lrᵀ) ⊙ (QKᵀ + 1), chunk by chunk.

    Five matrix products per chunk (KW, QW, QKᵀ, AG, KᵀG): (3D + 2n) · H·D multiply-adds per token.

    Args:
        q, k, v: (B,T,H,D), any floating dtype. lr: (B,T,H). token_scale: (chunk_size,). W0: (H,D,D).
        b0, ln_weight, ln_bias: (H,D); None for `plain`, which has none of them.
        chunk_size, reverse, eps: as of `op.ttt_linear`.
        inner: `ln`, the learner of the layer, or `plain`, the variant of the paper's Algorithm 1 and of its theorems.
        return_inner: also return gradient and loss of the inner learner.

    Returns:
        (B,T,H,D) in q's dtype; with `return_inner`, a pair with an `InnerLearning`.
    """
    dtype = compute_dtype(q.dtype)
    ordered = (x.to(dtype).flip(1) if reverse else x.to(dtype) for x in (q, k, v, lr))
    tokens = [x.transpose(1, 2) for x in ordered]  # (B,H,T,D), rates (B,H,T)
    W = W0.to(dtype).expand(q.shape[0], *W0.shape)
    b, gamma, mu = (None if x is None else x.to(dtype)[None, :, None] for x in (b0, ln_weight, ln_bias))
    how = {"chunk_size": chunk_size, "eps": eps, "inner": inner}
    chunks, _, _ = scan_chunks(*tokens, W, b, token_scale.to(dtype), gamma, mu, **how)
    outs, gradients, residuals = zip(*chunks, strict=True)
    losses = [residual.square().sum(-1) / 2 for residual in residuals]
    out = _finish(outs, reverse, q.dtype)
    if not return_inner:
        return out
    return out, InnerLearning(_finish(gradients, reverse, dtype), _finish(losses, reverse, dtype))


def scan_chunks(
    Q_all: Tensor,
    K_all: Tensor,
    V_all: Tensor,
    lr_all: Tensor,
    W: Tensor,
    b: Tensor | None,
    c: Tensor,
    gamma: Tensor | None,
    mu: Tensor | None,
    *,
    chunk_size: int,
    eps: float,
    inner: Inner = "ln",
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor, Tensor | None]:
    """Learn chunk by chunk; return (out, G, residual) of each chunk, with the loss ½‖residual‖², and the final W and b.

    Args:
        Q_all, K_all, V_all: (...,T,D), in scan order and the compute dtype. lr_all: (...,T).
        W, b: the start, (...,D,D) and (...,1,D). c: (...,chunk_size). gamma, mu: (...,1,D).
        chunk_size, eps, inner: as of `ttt_linear_dual`.
    """
    chunks = []
    for start in range(0, Q_all.shape[-2], chunk_size):
        Q, K, V = (x[..., start : start + chunk_size, :] for x in (Q_all, K_all, V_all))
        rate = lr_all[..., start : start + chunk_size]
        n = rate.shape[-1]
        E = torch.tril(c[..., :n, None] * rate[..., None, :])
        step = c[..., n - 1, None, None] * rate[..., None]
        if inner == "plain":
            G = residual = K @ W - V
            out = Q @ W - (E * (Q @ K.mT)) @ G
        else:
            G, residual = inner_gradient(K @ W + b, V - K, gamma, mu, eps)
            out = Q + gamma * normalise(Q @ W + b - (E * (Q @ K.mT + 1)) @ G, eps)[0] + mu
            b = b - (step * G).sum(-2, keepdim=True)
        W = W - K.mT @ (step * G)
        chunks.append((out, G, residual))
    return chunks, W, b


def _finish(chunks: Sequence[Tensor], reverse: bool, dtype: torch.dtype) -> Tensor:
    """Join what each chunk gave, (B,H,n,...) in scan order, to (B,T,H,...) in the order of the input."""
    joined = torch.cat(chunks, 2).transpose(1, 2)
    return (joined.flip(1) if reverse else joined).to(dtype)


def normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows with mean 0 and (biased) variance 1, and the reciprocal standard deviation."""
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd, rstd


def inner_gradient(Z: Tensor, target: Tensor, gamma: Tensor, mu: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return G = dℓ/dZ of ℓ = ½‖residual‖², and the residual, which is γ ⊙ norm(Z) + μ − target."""
    z, rstd = normalise(Z, eps)
    residual = gamma * z + mu - target
    g = residual * gamma
    return (g - g.mean(-1, keepdim=True) - z * (g * z).mean(-1, keepdim=True)) * rstd, residual
