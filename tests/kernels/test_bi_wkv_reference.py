"""The reference of Bi-WKV against a softmax by hand, the release's tensors and its kernel's semantics."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.bi_wkv.reference import bi_wkv_formula
from kernels.tools.bi_wkv_cases import CASES, Sizes
from kernels.tools.check import relative_error

draw = CASES.draw

DATA = {name: torch.from_numpy(x) for name, x in np.load(Path(__file__).parents[1] / "data" / "vrwkv_wkv.npz").items()}
INPUTS = [DATA[name] for name in ("w_over_T", "u_over_T", "k", "v")]


def official_kernel(w, u, k, v):
    """What reference.bi_wkv_formula says that the official CUDA kernel computes, token by token."""
    T = k.shape[1]
    n, outs = math.ceil(T / 32), []
    for t in range(T):
        first = t // n * n
        weights = torch.zeros_like(k)
        for i in range(T):
            if i == t:
                weights[:, i] = (u + k[:, i]).exp()
            else:
                weights[:, i] = (k[:, i] - (t - i - 1 if first <= i < t else abs(t - i)) * w).exp()
            if first < i <= t:
                weights[:, i] += (1 - w.exp()) * ((t - i) * w + k[:, i]).exp()
        outs.append((weights * v).sum(1) / weights.sum(1))
    return torch.stack(outs, 1)


def test_the_paper_s_equation():
    assert relative_error(bi_wkv_formula(*INPUTS), DATA["y_formula"]) < 1e-6


def test_the_official_kernel_deviates_as_documented():
    official, ours = DATA["y_official_cuda_semantics"], bi_wkv_formula(*INPUTS)
    assert relative_error(official_kernel(*(x.double() for x in INPUTS)), official) < 1e-6
    # of the largest output
    assert 0.035 < (official - ours).abs().max() / ours.abs().max() < 0.045


def test_three_tokens_by_hand():
    w, u, k, v = 0.5, -0.25, [0.1, 0.7, -0.3], [1.0, -2.0, 4.0]
    expected = []
    for row in ([u, 0, -w], [0, u, 0], [-w, 0, u]):
        weights = [math.exp(s + key) for s, key in zip(row, k, strict=True)]
        expected.append(sum(a * x for a, x in zip(weights, v, strict=True)) / sum(weights))
    column = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1) for x in (k, v))
    out = bi_wkv_formula(torch.tensor([w]).double(), torch.tensor([u]).double(), *column)
    torch.testing.assert_close(out.flatten(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("shift", [-1e3, 1e3])
def test_large_keys_do_not_overflow(shift):
    """A constant added to all keys of a channel changes nothing."""
    w, u, k, v, _ = draw(0, Sizes(batch=1, tokens=9, channels=2))
    torch.testing.assert_close(bi_wkv_formula(w, u, k + shift, v), bi_wkv_formula(w, u, k, v))


def test_gradients():
    inputs = [x.requires_grad_() for x in draw(0, Sizes(batch=1, tokens=5, channels=2), decay=0.3)[:4]]
    assert torch.autograd.gradcheck(bi_wkv_formula, inputs)
