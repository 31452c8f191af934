"""Muon's steps: matrices that Newton–Schulz makes nearly orthogonal, with LaCT's coefficients."""

from typing import Literal

import torch
from torch import Tensor

Muon = Literal["none", "lact", "nvs", "frobenius"]
EPS = 1e-7
# (a, b, c) of each step X <- aX + (bA + cA²)X with A = XXᵀ
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "lact": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "nvs": ((3.4445, -4.7750, 2.0315),) * 5,  # of its model for novel views
    "frobenius": (),  # the start of the steps alone
}


def newton_schulz(G: Tensor, kind: str) -> Tensor:
    """Steps X ← aX + (bA + cA²)X, A = XXᵀ, from X = G / (‖G‖_F + ε): singular values near 1, in the dtype of G.

    G is (..., m, n); the products are of the smaller side.

    Raises:
        ValueError: a vector, for which there is nothing to make orthogonal.
    """
    if G.ndim < 2 or min(G.shape[-2:]) < 2:
        raise ValueError(
            f"muon: orthogonalises matrices, and a step of shape {tuple(G.shape[-2:])} is a vector; use muon none"
        )
    wide = G.shape[-2] <= G.shape[-1]
    X = G if wide else G.mT
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + EPS)
    for a, b, c in COEFFICIENTS[kind]:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X if wide else X.mT


def newton_schulz_macs(kind: str, rows: int, columns: int) -> int:
    """Multiply-adds of `newton_schulz` of one matrix."""
    m, n = sorted((rows, columns))
    return len(COEFFICIENTS[kind]) * (2 * m * m * n + m**3)
