"""The equivalences of the paper's Appendix A and C in fp64, for `kernels.ttt_linear.reference`.

The right-hand sides share no code with the reference. Vectors are rows: q, k, v (T, d) are the rows of X^Q, X^K, X^V. A
token x reads the state W by x·W, where the paper writes W_t x_t; W is transposed. The paper's η = 1/2 and the factor 2
of its gradient give lr = 1.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ttt_linear.reference import Inner, ttt_linear_dual

from ..identities import apply_delta_rule, find_error

EPS = 1e-6  # of the inner LayerNorm


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleSizes:
    """The random sequences on which the equivalences are measured.

    Args:
        shapes: (tokens T, head width d) of the sequences.
        seeds: how many sequences of each shape are drawn.
        chunk_size: tokens of a chunk, for the equivalences that hold for any chunk size.
    """

    shapes: tuple[tuple[int, int], ...] = ((2, 4), (7, 8), (16, 16), (81, 16), (196, 64))
    seeds: int = 3
    chunk_size: int = 16


def measure_theorems(sizes: ExampleSizes) -> dict[str, float]:
    """Measure the largest error of each equivalence over all sequences, relative to its right-hand side's maximum.

    Returns:
        `c1_linear_attention`, `c2_delta_rule`, `c2_adapted_value_view`: Theorems C.1 and C.2.
        `c2_adapted_value_view_any_w0`: the last one for any W0.
        `primal_plain`, `primal_ln`: the dual form against one state per token, without and with the inner LayerNorm.
        `a2_corrected`: the first mini-batch of A.2 with x_sᵀx_t.
        `a2_printed_smallest`, `a2_printed_largest`: the least and the largest error with the x_sᵀx_s that A.2 prints.
    """
    errors: dict[str, list[float]] = {}
    for sequence in _draw(sizes):
        for name, error in _measure(sequence, sizes.chunk_size).items():
            errors.setdefault(name, []).append(error)
    printed = errors.pop("a2_printed")
    largest = {name: max(found) for name, found in errors.items()}
    return {**largest, "a2_printed_smallest": min(printed), "a2_printed_largest": max(printed)}


def _attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute Eq. 3 of Appendix C, causal linear attention: z_t = Σ_{s≤t} (q_t·k_s) v_s, (T, d)."""
    return torch.stack([sum((q[t] @ k[s]) * v[s] for s in range(t + 1)) for t in range(len(q))])


def _attend_to_adapted_values(q: Tensor, k: Tensor, v: Tensor, W0: Tensor) -> Tensor:
    """Compute Eq. 4 of Appendix C: z_t = q_t W0 + Σ_{s≤t} (q_t·k_s) u_s with adapted values u_s = v_s − k_s W_{s−1}.

    Since W_{s−1} = W0 + Σ_{r<s} k_rᵀ u_r, the adapted values solve (I + strict lower triangle of K Kᵀ) U = V − K W0. No
    state is computed.
    """
    U = torch.linalg.solve_triangular(torch.tril(k @ k.T, -1), v - k @ W0, upper=False, unitriangular=True)
    return q @ W0 + torch.tril(q @ k.T) @ U


def learn_by_primal_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    scale: Tensor,
    W0: Tensor,
    b0: Tensor,
    gamma: Tensor,
    mu: Tensor,
    chunk_size: int,
    inner: Inner,
) -> Tensor:
    """Compute Eq. 7 with one state per token, W_j = W − c_j Σ_{s≤j} lr_s ∂ℓ_s/∂W, with autograd for ∂ℓ_s/∂W.

    The gradients are taken at the state W with which the chunk starts.

    Args:
        q, k, v: (T, d), one head of `ttt_linear_dual`.
        lr: (T).
        scale: c, (chunk_size).
        W0: (d, d).
        b0, gamma, mu: (d).
    """
    W, b, out = W0, b0 if inner == "ln" else torch.zeros_like(b0), []
    for start in range(0, len(q), chunk_size):
        chunk = slice(start, start + chunk_size)
        K, rate = k[chunk], lr[chunk]
        Z = (K @ W + b).requires_grad_()
        error = F.layer_norm(Z, Z.shape[-1:], gamma, mu, EPS) - (v[chunk] - K) if inner == "ln" else Z - v[chunk]
        (G,) = torch.autograd.grad(error.square().sum() / 2, Z)
        steps = torch.einsum("s,sd,se->sde", rate, K, G).cumsum(0)
        c = scale[: len(K), None]
        states, biases = W - c[..., None] * steps, b - c * (rate[:, None] * G).cumsum(0) * (inner == "ln")
        read = torch.einsum("td,tde->te", q[chunk], states) + biases
        out.append(q[chunk] + F.layer_norm(read, read.shape[-1:], gamma, mu, EPS) if inner == "ln" else read)
        W, b = states[-1], biases[-1]
    return torch.cat(out)


def reconstruct(x: Tensor, W0: Tensor, lr: float, *, as_printed: bool) -> Tensor:
    """Compute the last line of A.2's display, z_t = x_t W0 − lr Σ_{s≤t} w_ts (x_s W0 − x_s) with lr = 2η.

    w_ts is x_s·x_t, which follows from z_t = W_t x_t, or with `as_printed` the paper's x_s·x_s.
    """
    error = x @ W0 - x
    weights = (x * x).sum(-1).expand(len(x), -1) if as_printed else x @ x.T
    return x @ W0 - lr * torch.tril(weights) @ error


def _draw(sizes: ExampleSizes) -> Iterator[dict[str, Tensor]]:
    """Draw sequences in fp64; with keys of length 1, the delta rule with lr = 1 does not diverge."""
    for tokens, width in sizes.shapes:
        for seed in range(sizes.seeds):
            generator = torch.Generator().manual_seed(seed)

            def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
                return torch.randn(*shape, generator=generator, dtype=torch.float64)

            q, k, v, x = (normal(tokens, width) for _ in range(4))
            yield {
                "q": q,
                "k": F.normalize(k, dim=-1),
                "v": v,
                "x": x / width**0.5,
                "W0": normal(width, width) / width**0.5,
                "b0": normal(width) / 10,
                "gamma": 1 + normal(width) / 10,
                "mu": normal(width) / 10,
                "lr": torch.sigmoid(normal(tokens)),
                "scale": 1 / torch.arange(1, sizes.chunk_size + 1).double() + normal(sizes.chunk_size).abs() / 20,
            }


def _measure(drawn: dict[str, Tensor], chunk_size: int) -> dict[str, float]:
    """Measure each equivalence on one sequence of `_draw`.

    `a2_printed` is the error with A.2's own weights, and relative to the reference, unlike all others.
    """
    q, k, v, x, W0 = (drawn[name] for name in ("q", "k", "v", "x", "W0"))
    T, zero = len(q), torch.zeros_like(W0)

    def plain(q: Tensor, k: Tensor, v: Tensor, W: Tensor, chunk_size: int) -> Tensor:
        """Run the reference with a rate of 1 for every token."""
        lr, scale = torch.ones(T, dtype=torch.float64), torch.ones(chunk_size, dtype=torch.float64)
        return _run(q, k, v, lr, scale, W, chunk_size=chunk_size, inner="plain")

    state = [drawn[name] for name in ("b0", "gamma", "mu")]
    general = [q, k, v, drawn["lr"], drawn["scale"], W0]
    primal = {inner: learn_by_primal_form(*general, *state, chunk_size, inner) for inner in ("plain", "ln")}
    reconstructed = plain(x, x, x, W0, T)
    return {
        "c1_linear_attention": find_error(plain(q, k, v, zero, T), _attend_causally(q, k, v)),
        "c2_delta_rule": find_error(plain(q, k, v, zero, 1), apply_delta_rule(q, k, v, zero)),
        "c2_adapted_value_view": find_error(plain(q, k, v, zero, 1), _attend_to_adapted_values(q, k, v, zero)),
        "c2_adapted_value_view_any_w0": find_error(plain(q, k, v, W0, 1), _attend_to_adapted_values(q, k, v, W0)),
        "primal_plain": find_error(_run(*general, chunk_size=chunk_size, inner="plain"), primal["plain"]),
        "primal_ln": find_error(_run(*general, *state, chunk_size=chunk_size, eps=EPS), primal["ln"]),
        "a2_corrected": find_error(reconstructed, reconstruct(x, W0, 1.0, as_printed=False)),
        "a2_printed": find_error(reconstruct(x, W0, 1.0, as_printed=True), reconstructed),
    }


def _run(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, scale: Tensor, *state: Tensor, **options: Any) -> Tensor:
    """Run the reference on one sequence and one head, (T, d) -> (T, d)."""
    q, k, v, lr = (each[None, :, None] for each in (q, k, v, lr))
    return ttt_linear_dual(q, k, v, lr, scale, *(each[None] for each in state), **options)[0, :, 0]
