"""Launches that are repeated for other tensors compute what the operator computes."""

import pytest
import torch

from kernels import replay
from kernels.tools import check
from kernels.tools.operators import OPERATORS

LAYS_TAPS = {"conv_norm", "scan_convs"}  # its launch takes a copy of its weights, which is not repeated


def draw(cases, seed):
    return check.cast(cases, cases.draw(seed, cases.SMALL)[:-1], torch.float32)


@pytest.mark.parametrize("name", OPERATORS)
def test_repeated_launches_are_the_operator(name, monkeypatch):
    cases = OPERATORS[name]
    operator, replays = cases.bind(cases.SMALL), replay.REPLAYS
    replays.clear()
    inputs = [draw(cases, seed) for seed in range(3)]
    with torch.inference_mode():
        expected = [operator(*x, backend="triton") for x in inputs]
        assert not replays
        monkeypatch.setattr(replay, "REPLAYED", {"cpu"})
        found = [operator(*x, backend="triton") for x in inputs]
    assert [each is None for each in replays.values()] == [name in LAYS_TAPS]
    assert all(map(torch.equal, found, expected))
