"""The reference of the selective scan against the official release and a sum without a recurrence."""

import torch

from kernels.selective_scan.reference import selective_scan_recurrence
from kernels.tools.check import relative_error
from kernels.tools.selective_scan_cases import CASES, Sizes, one_direction
from tests.models.helpers import read_data


def test_official_release():
    """The release has channels before tokens."""
    data = read_data("vim_scan.npz") | read_data("vim_scan.npz", "inputs/")
    u, delta, B, C, z = (data[name].mT for name in ("u", "delta", "B", "C", "z"))
    rest = data["D"], z, data["delta_bias"]
    out, last = selective_scan_recurrence(u, delta, data["A"], B, C, *rest, return_last_state=True)
    assert relative_error(out, data["out"].mT) < 1e-6
    assert relative_error(last, data["last_state"]) < 1e-6


def test_unrolled_recurrence():
    """y_t = Σ_{s≤t} Σ_n C_t B_s Δ_s u_s exp(A Σ_{s<r≤t} Δ_r) + D u_t: no recurrence at all."""
    u, delta, A, B, C, D, z, bias = one_direction(CASES.draw(0, Sizes(batch=2, tokens=9, channels=3, state_dim=4))[:-1])
    step = torch.log1p(torch.exp(delta + bias))
    expected = D * u
    for t in range(9):
        for s in range(t + 1):
            decay = torch.exp(A * step[:, s + 1 : t + 1].sum(1)[..., None])
            expected[:, t] += ((C[:, t] * B[:, s])[:, None] * decay).sum(-1) * step[:, s] * u[:, s]
    assert relative_error(selective_scan_recurrence(u, delta, A, B, C, D, None, bias), expected) < 1e-12
    gated = expected * z / (1 + torch.exp(-z))
    assert relative_error(selective_scan_recurrence(u, delta, A, B, C, D, z, bias), gated) < 1e-12
