"""What is Bi-WKV's own: exponents of any size, blocks of images and channels, NaN in a channel; the release's tensors."""

import dataclasses
import functools
import math

import pytest
import torch

from kernels.bi_wkv import bi_wkv, torch_path
from kernels.bi_wkv.reference import Arguments, bi_wkv_formula
from kernels.decompositions import bi_wkv_by_scan
from kernels.tools.bi_wkv_cases import CASES as cases
from kernels.tools.bi_wkv_cases import Sizes
from kernels.tools.cases import DTYPES, ROUNDING
from kernels.tools.check import differentiate, relative_error, relative_errors
from tests.kernels.helpers import find_errors
from tests.models.helpers import read_data

INPUTS, draw = cases.INPUTS, cases.draw
errors = functools.partial(find_errors, cases, backend="torch", floor=cases.FLOOR)


def has_exponents(w, u, k, v):
    _, _, tokens = torch_path._tokens(Arguments(w, u, k, v), (slice(None),) * 3)
    return len(tokens) == 3


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("tokens", "decay", "keys"), [(70, 0.3, 1000.0), (70, 30.0, 1000.0), (9, 3.0, 20.0)])
def test_any_sign_and_size(tokens, decay, keys, sign):
    """Keys of a thousand and steep decay: finite, and right to what exponents of that size allow in each dtype."""
    sizes = Sizes(batch=2, tokens=tokens, channels=4, decay=decay, keys=keys)
    w, u, k, v, dout = draw(0, sizes)
    inputs = [sign * w.abs(), u, k.clamp(-1000, 1000), v, dout]
    assert has_exponents(*inputs[:-1])
    for dtype in DTYPES.values():
        given = cases.cast(inputs, dtype)
        assert max(errors(given, sizes=sizes).values()) < 5e-3 + ROUNDING[dtype]
    assert max(errors(inputs, sizes=sizes).values()) < 1e-10


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_long_sequences_lose_no_digits(backend):
    """w is about 1/T: an exponent near 1 loses a part of it in each rounding, of which there are thousands."""
    sizes = Sizes(batch=1, tokens=16_384, channels=3)
    inputs = [x.float() for x in draw(0, sizes)]
    w, u, k, v, _ = (x.double() for x in inputs)
    rows = torch.arange(0, sizes.tokens, 1021)
    between = (rows[:, None] - torch.arange(sizes.tokens)).abs()[..., None] - 1
    weights = (torch.where(between < 0, u, -between * w) + k).softmax(1)
    found = differentiate(cases, inputs, sizes, backend)
    assert relative_error(found["out"][0, rows], (weights * v).sum(1)) < 1e-6
    want = differentiate(cases, [x.double() for x in inputs], sizes, "torch")
    assert max(relative_errors(found, want, cases.FLOOR).values()) < 3e-6


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("decay", [-1e6, torch.inf])
def test_a_decay_that_rounds_exponents_away_is_refused(decay, backend):
    w, u, k, v, _ = (x.float() for x in draw(0, Sizes(batch=2, tokens=74, channels=3)))
    w[1] = decay
    with pytest.raises(ValueError, match="w: its largest size times the 74 tokens is"):
        bi_wkv(w, u, k, v, backend=backend)


@pytest.mark.parametrize("tokens", [1, 13])
def test_a_scan_with_keys_whose_powers_would_overflow(tokens):
    inputs = draw(0, Sizes(batch=3, tokens=tokens, channels=9, decay=1.0, keys=400.0))[:-1]
    out, _ = bi_wkv_by_scan(*inputs, "auto", False)
    torch.testing.assert_close(out, bi_wkv(*inputs, backend="reference"), rtol=1e-10, atol=1e-10)


def test_exponents_are_left_out_where_they_may_be():
    sizes = Sizes(batch=2, tokens=196, channels=4)
    assert not has_exponents(*draw(0, sizes)[:4])
    assert has_exponents(*draw(0, dataclasses.replace(sizes, decay=3.0, keys=20.0))[:4])
    w, u, k, v, _ = draw(0, sizes)
    v[0, 0, 0] = 1e30
    assert has_exponents(w, u, k, v)
    assert bi_wkv(w, u, k, v).isfinite().all()


@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "block"), [(5, 20, 40, 2 * 2 * 20 * 40), (2, 30, 70, 64 * 32), (1, 600, 3, 2**18)]
)
def test_blocks_and_chunks_join(monkeypatch, batch, tokens, channels, block):
    """Sizes at which images and channels are cut into blocks, of unequal sizes, and at which chunks have chunks."""
    monkeypatch.setattr(torch_path, "_BLOCK", block)
    sizes = Sizes(batch=batch, tokens=tokens, channels=channels)
    assert len(torch_path._blocks((batch, tokens, channels))) > 1 or tokens == 600
    assert max(errors(draw(0, sizes), sizes=sizes).values()) < 1e-11


@pytest.mark.parametrize("backend", ["torch", "numba", "reference"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_fills_its_channel(name, backend):
    inputs = dict(zip(INPUTS, draw(0, Sizes(batch=2, tokens=20, channels=3))[:4], strict=True))
    inputs[name][1, 9, 2] = float("nan")
    bad = bi_wkv(**inputs, backend=backend).isnan()
    assert bad[1, :, 2].all() and bad.sum() == 20


DATA = read_data("vrwkv_wkv.npz")
RELEASED = [DATA[name] for name in ("w_over_T", "u_over_T", "k", "v")]


def official_kernel(w, u, k, v):
    """What reference.bi_wkv_formula says that the official CUDA kernel computes, token by token."""
    i, length = torch.arange(k.shape[1])[:, None], math.ceil(k.shape[1] / 32)
    t = i[:, None]
    first, k = t // length * length, k[:, None]
    steps = (t - i).abs() - ((first <= i) & (i < t)).long()
    weights = torch.where(i == t, u + k, k - steps * w).exp()
    weights += ((first < i) & (i <= t)) * (1 - w.exp()) * ((t - i) * w + k).exp()
    return (weights * v[:, None]).sum(2) / weights.sum(2)


def test_the_paper_s_equation():
    assert relative_error(bi_wkv_formula(*RELEASED), DATA["y_formula"]) < 1e-6


def test_the_official_kernel_deviates_as_documented():
    official, ours = DATA["y_official_cuda_semantics"], bi_wkv_formula(*RELEASED)
    assert relative_error(official_kernel(*(x.double() for x in RELEASED)), official) < 1e-6
    # of the largest output
    assert 0.035 < (official - ours).abs().max() / ours.abs().max() < 0.045
