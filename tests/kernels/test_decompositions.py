"""The operators as scans of plain operations, against their references in fp64."""

import pytest
import torch
from torch import Tensor

from kernels.bi_wkv.reference import bi_wkv_formula
from kernels.decompositions import bi_wkv_by_scan, selective_scan_by_scan, ttt_linear_by_scan
from kernels.selective_scan.reference import selective_scan_recurrence
from kernels.ttt_linear.reference import ttt_linear_dual


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("T", "chunk_size"), [(37, 16), (32, 16), (5, 16), (1, 4), (7, 1)])
@pytest.mark.parametrize("reverse", [[False], [True], [False, True]])
def test_ttt_linear(T, chunk_size, reverse):
    torch.manual_seed(0)
    B, R, H, D = 2, len(reverse), 3, 8
    q, k, v = random(3, B, T, R, H, D)
    lr, scale, W0 = random(B, T, H).sigmoid() / D, random(R, chunk_size).abs(), random(R, H, D, D) / D
    shared = scale, W0, *random(3, R, H, D)
    ours = ttt_linear_by_scan(q, k, v, lr, *shared, chunk_size, reverse, 1e-6, "auto", False)[0]
    for r, back in enumerate(reverse):
        one = ttt_linear_dual(q[:, :, r], k[:, :, r], v[:, :, r], lr, *(x[r] for x in shared), chunk_size=chunk_size, reverse=back)
        close(ours[:, :, r], one)


@pytest.mark.parametrize("gated", [True, False])
def test_selective_scan(gated):
    torch.manual_seed(0)
    images, T, E, N = 2, 11, 6, 4
    u, delta = random(2, images, T, 2, E)
    B, C = random(2, images, T, 2, N)
    A, D, bias = -random(2, E, N).exp(), random(2, E), random(2, E)
    z = random(images, T, E) if gated else None
    ours = selective_scan_by_scan(u, delta, A, B, C, D, z, bias, [False, True], "auto", False)[0]
    for r in (0, 1):
        parts = u[:, :, r], delta[:, :, r], A[r], B[:, :, r], C[:, :, r], D[r], z, bias[r]
        close(ours[:, :, r], selective_scan_recurrence(*parts, reverse=r == 1))


@pytest.mark.parametrize("T", [1, 2, 13])
def test_bi_wkv(T):
    """Decays of both signs, and keys whose powers would overflow."""
    torch.manual_seed(0)
    w, u = random(2, 9)
    k, v = random(2, 3, T, 9)
    k = 400 * k
    close(bi_wkv_by_scan(w, u, k, v, "auto", False)[0], bi_wkv_formula(w, u, k, v))
