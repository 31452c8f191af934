"""The reference of the selective scan against the official release, a closed form, and a sum by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.selective_scan.reference import selective_scan_recurrence
from kernels.tools.check import relative_error
from kernels.tools.selective_scan_cases import CASES, Sizes, one_direction

draw = CASES.draw

OFFICIAL = Path(__file__).parents[1] / "data" / "vim_scan.npz"


def test_official_release():
    """The release has channels before tokens."""
    data = {key.split("/")[-1]: torch.from_numpy(x) for key, x in np.load(OFFICIAL).items()}
    assert data["delta_softplus"]
    u, delta, B, C, z = (data[name].mT for name in ("u", "delta", "B", "C", "z"))
    rest = data["D"], z, data["delta_bias"]
    out, last = selective_scan_recurrence(u, delta, data["A"], B, C, *rest, return_last_state=True)
    assert relative_error(out, data["out"].mT) < 1e-6
    assert relative_error(last, data["last_state"]) < 1e-6


def test_unrolled_recurrence():
    """y_t = Σ_{s≤t} Σ_n C_t B_s Δ_s u_s exp(A Σ_{s<r≤t} Δ_r) + D u_t: no recurrence at all."""
    u, delta, A, B, C, D, z, bias = one_direction(draw(0, Sizes(batch=2, tokens=9, channels=3, state_dim=4))[:-1])
    step = torch.log1p(torch.exp(delta + bias))
    expected = D * u
    for t in range(9):
        for s in range(t + 1):
            decay = torch.exp(A * step[:, s + 1 : t + 1].sum(1)[..., None])
            expected[:, t] += ((C[:, t] * B[:, s])[:, None] * decay).sum(-1) * step[:, s] * u[:, s]
    assert relative_error(selective_scan_recurrence(u, delta, A, B, C, D, None, bias), expected) < 1e-12
    gated = expected * z / (1 + torch.exp(-z))
    assert relative_error(selective_scan_recurrence(u, delta, A, B, C, D, z, bias), gated) < 1e-12


def test_one_channel_by_hand():
    """Two tokens, Δ = log 2 and log 4, A = −1: decays ½ and ¼."""
    one = torch.ones(1, 1, dtype=torch.float64)
    delta = torch.tensor([[[0.0], [np.log(3.0)]]], dtype=torch.float64)  # softplus: log 2, log 4
    u, B, C = (torch.tensor([[[a], [b]]], dtype=torch.float64) for a, b in ((3.0, 5.0), (2.0, 7.0), (1.0, -1.0)))
    h0 = np.log(2) * 2 * 3
    h1 = h0 / 4 + np.log(4) * 7 * 5
    out, last = selective_scan_recurrence(u, delta, -one, B, C, one[0], None, 0 * one[0], return_last_state=True)
    torch.testing.assert_close(out.flatten(), torch.tensor([h0 + 3, -h1 + 5], dtype=torch.float64))
    assert last.item() == pytest.approx(h1)


def test_reverse_is_flip():
    u, delta, A, B, C, D, z, bias = one_direction(draw(0, Sizes(batch=2, tokens=9, channels=3, state_dim=4))[:-1])
    flipped = (u.flip(1), delta.flip(1), A, B.flip(1), C.flip(1), D, z.flip(1), bias)
    back = selective_scan_recurrence(u, delta, A, B, C, D, z, bias, reverse=True)
    torch.testing.assert_close(back, selective_scan_recurrence(*flipped).flip(1))
