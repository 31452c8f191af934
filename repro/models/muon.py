"""Muon's orthogonalisation of matrices by Newton–Schulz iterations, with LaCT's coefficients."""

from typing import Literal

import torch
from torch import Tensor

Muon = Literal["none", "lact", "nvs", "frobenius"]
EPS = 1e-7  # keeps the division by ‖G‖ finite
# (a, b, c) of each iteration X <- aX + (bA + cA²)X with A = XXᵀ
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "lact": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "nvs": ((3.4445, -4.7750, 2.0315),) * 5,  # LaCT's model for novel views
    "frobenius": (),  # no iterations, only the division by the norm
}


def newton_schulz(G: Tensor, kind: str) -> Tensor:
    """Orthogonalise G (..., m, n): iterate X ← aX + (bA + cA²)X, A = XXᵀ, from X = G / (‖G‖_F + ε).

    The result has the shape and dtype of G, and singular values near 1; `frobenius` only divides by the norm.

    Raises:
        ValueError: G is a vector.
    """
    if G.ndim < 2 or min(G.shape[-2:]) < 2:
        raise ValueError(
            f"muon: orthogonalises matrices, and a step of shape {tuple(G.shape[-2:])} is a vector; use muon none"
        )
    wide = G.shape[-2] <= G.shape[-1]  # otherwise transpose, so that XXᵀ has the smaller side
    X = G if wide else G.mT
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + EPS)
    for a, b, c in COEFFICIENTS[kind]:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X if wide else X.mT


def newton_schulz_macs(kind: str, rows: int, columns: int) -> int:
    """Count the multiply-adds of `newton_schulz` for one matrix."""
    m, n = sorted((rows, columns))
    return len(COEFFICIENTS[kind]) * (2 * m * m * n + m**3)
