"""What is Bi-WKV's own among the tests of its kernels: exponents of any size, other configs, NaN in a channel."""

import functools

import pytest

from kernels.bi_wkv import bi_wkv, triton_fwd
from kernels.tools.bi_wkv_cases import CASES as cases
from kernels.tools.bi_wkv_cases import Sizes
from tests.kernels.helpers import find_errors
from tests.slow import slow

draw = cases.draw
errors = functools.partial(find_errors, cases, backend="triton", floor=cases.FLOOR)


OTHERS = [(1, 0.3, 1.0, 1e-5), (-1, 0.3, 1000.0, 5e-3), (1, 0.3, 1000.0, 5e-3)]


@pytest.mark.parametrize(
    ("sign", "decay", "keys", "limit"), [(-1, 30.0, 1000.0, 5e-3), (1, 3.0, 20.0, 2e-4), *(slow(*o) for o in OTHERS)]
)
def test_any_sign_and_size(sign, decay, keys, limit):
    sizes = Sizes(batch=1, tokens=30, channels=5, decay=decay, keys=keys)
    w, *rest = (x.float() for x in draw(0, sizes))
    assert max(errors([sign * w.abs(), *rest], sizes=sizes).values()) < limit


def test_a_decay_that_rounds_exponents_away_fills_its_channel():
    w, u, k, v, _ = (x.float() for x in draw(0, Sizes(batch=2, tokens=20, channels=3)))
    w[1] = -1e30
    assert bi_wkv(w, u, k, v, backend="triton").isnan().all((0, 1)).tolist() == [False, True, False]


def test_a_short_last_segment_has_as_many_tokens_for_the_bound_of_the_decay(monkeypatch):
    """At 33 tokens |w| T is 8.25e6, within the bound of 1e7; at the 48 of three whole segments it would not be."""
    monkeypatch.setattr(triton_fwd, "SEGMENT", 16)
    w, u, k, v, _ = (x.float() for x in draw(0, Sizes(batch=1, tokens=33, channels=3)))
    w[1] = 2.5e5
    assert bi_wkv(w, u, k, v, backend="triton").isfinite().all()


@pytest.mark.parametrize("tokens", [33, *map(slow, (32, 79))])
@pytest.mark.parametrize(("decay", "keys", "limit"), [(0.0, 1.0, 1e-5), slow(0.3, 1000.0, 5e-3), slow(3.0, 20.0, 2e-4)])
def test_sequences_that_are_cut_into_segments(tokens, decay, keys, limit, monkeypatch):
    """Two to five segments, the last of them full or short, with decays of both signs; and each kept logarithm."""
    monkeypatch.setattr(triton_fwd, "SEGMENT", 16)
    assert triton_fwd.count_segments(tokens) == -(-tokens // 16)
    sizes = Sizes(batch=1, tokens=tokens, channels=5, decay=decay, keys=keys)
    inputs = [x.float() for x in draw(0, sizes)]
    assert max(errors(inputs, sizes=sizes).values()) < limit


def test_short_sequences_are_not_cut():
    assert [triton_fwd.count_segments(tokens) for tokens in (1, 511, 512, 513, 6400)] == [1, 1, 2, 3, 25]
