"""Bi-WKV's torch backend against the reference and its autograd in fp64, with and without exponents, and against itself."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.bi_wkv import bi_wkv, torch_path

OFFICIAL = Path(__file__).parents[1] / "data" / "vrwkv_wkv.npz"
UNIT_ROUNDOFF = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# scales of w and u (None: 1/T), and of k
USUAL, STEEP, HUGE = (None, 1.0), (3.0, 20.0), (0.3, 1000.0)


def out_and_gradients(inputs, cotangent, backend):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = bi_wkv(*inputs, backend=backend)
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


def errors(results, expected):
    """max |a − b| over the largest element, or over 1 where a gradient vanishes: values and cotangents are of that size."""
    found = {}
    for name, a, b in zip(("out", "w", "u", "k", "v"), results, expected, strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert a.isfinite().all(), name
        found[name] = ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
    return found


def has_exponents(w, u, k, v):
    (e, _), _, _ = torch_path._tokens(w, u, k, v, torch_path._memory(k, 1)[0])
    return e is not None


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_official_tensor(relative, backend):
    data = {name: torch.from_numpy(x) for name, x in np.load(OFFICIAL).items()}
    out = bi_wkv(data["w_over_T"], data["u_over_T"], data["k"], data["v"], backend=backend)
    assert relative(out, data["y_formula"]) < 1e-6


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 15, 16, 17, 81, 196, 197])
@pytest.mark.parametrize("scales", [USUAL, STEEP], ids=["usual", "steep"])
def test_every_gradient_against_fp64(make_wkv, poisoned_memory, T, dtype, scales):
    *inputs, cotangent = make_wkv(2, T, 5, *scales, dtype=dtype)
    results = out_and_gradients(inputs, cotangent, "torch")
    expected = out_and_gradients([x.double() for x in inputs], cotangent, "reference")
    found = errors(results, expected)
    # exponents of up to about 2^10 are rounded to an fp32's 2^-24
    usual = 1e-12 if dtype == torch.float64 else 1e-5 if scales is USUAL else 2e-4
    limit = {n: usual + (UNIT_ROUNDOFF[dtype] if a.dtype == dtype else 0) for n, a in zip(found, results, strict=True)}
    assert all(found[n] < limit[n] for n in found), found
    assert [x.dtype for x in results] == [dtype, *(x.dtype for x in inputs)]


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("w", [0.3, 30.0])
def test_any_sign_and_size(make_wkv, poisoned_memory, w, sign):
    """Keys of a thousand and steep decay: finite, and right to what fp32 exponents of that size allow."""
    w0, u, k, v, cotangent = make_wkv(2, 70, 4, w, 1000.0, dtype=torch.float32)
    inputs = [sign * w0.abs(), u, k.clamp(-1000, 1000), v]
    assert has_exponents(*inputs)
    doubles = [x.double() for x in inputs]
    expected = out_and_gradients(doubles, cotangent, "reference")
    found = errors(out_and_gradients(inputs, cotangent, "torch"), expected)
    assert max(found.values()) < 5e-3, found
    exact = errors(out_and_gradients(doubles, cotangent, "torch"), expected)
    assert max(exact.values()) < 1e-10, exact


def test_exponents_are_left_out_where_they_may_be(make_wkv):
    assert not has_exponents(*make_wkv(2, 196, 4)[:4])
    assert has_exponents(*make_wkv(2, 196, 4, 3.0, 20.0)[:4])
    w, u, k, v, _ = make_wkv(2, 196, 4)
    v[0, 0, 0] = 1e30
    assert has_exponents(w, u, k, v)
    assert bi_wkv(w, u, k, v).isfinite().all()


def test_both_ways_agree(make_wkv, monkeypatch):
    *inputs, cotangent = make_wkv(2, 83, 4)
    without = out_and_gradients(inputs, cotangent, "torch")
    monkeypatch.setattr(torch_path, "_POWERS", 0)
    assert has_exponents(*inputs)
    assert max(errors(out_and_gradients(inputs, cotangent, "torch"), without).values()) < 1e-12


@pytest.mark.parametrize(("B", "T", "C", "block"), [(5, 20, 40, 2 * 2 * 20 * 40), (2, 30, 70, 64 * 32), (1, 600, 3, 2**18)])
def test_blocks_and_chunks_join(make_wkv, poisoned_memory, monkeypatch, B, T, C, block):
    """Sizes at which images and channels are cut into blocks, of unequal sizes, and at which chunks have chunks."""
    monkeypatch.setattr(torch_path, "_BLOCK", block)
    assert len(torch_path._blocks((B, T, C))) > 1 or T == 600
    *inputs, cotangent = make_wkv(B, T, C)
    found = errors(out_and_gradients(inputs, cotangent, "torch"), out_and_gradients(inputs, cotangent, "reference"))
    assert max(found.values()) < 1e-11, found


@pytest.mark.parametrize("scales", [USUAL, STEEP])
def test_gradcheck(make_wkv, scales):
    inputs = [x.requires_grad_() for x in make_wkv(1, 11, 2, *scales)[:4]]
    assert torch.autograd.gradcheck(lambda *x: bi_wkv(*x, backend="torch"), inputs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_back_to_front_is_the_same(make_wkv, relative, backend):
    w, u, k, v, _ = make_wkv(2, 19, 3)
    out = bi_wkv(w, u, k, v, backend=backend)
    assert relative(bi_wkv(w, u, k.flip(1), v.flip(1), backend=backend).flip(1), out) < 1e-12


def test_repeatable_to_the_bit(make_wkv):
    *inputs, cotangent = make_wkv(3, 100, 20, dtype=torch.float32)
    first, second = (out_and_gradients(inputs, cotangent, "torch") for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_inputs_are_left_alone_and_may_be_strided(make_wkv):
    w, u, k, v, cotangent = make_wkv(2, 18, 4)
    strided = w.repeat_interleave(2)[::2], u[:1].expand(4), k.mT.contiguous().mT, torch.stack([v, k], -1)[..., 0]
    plain, before = ([x.clone() for x in strided] for _ in range(2))
    results = out_and_gradients(strided, cotangent[:, :, :1].expand_as(k), "torch")
    expected = out_and_gradients(plain, cotangent[:, :, :1].expand_as(k).clone(), "torch")
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(map(torch.equal, strided, before))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_fills_its_channel(make_wkv, name, backend):
    inputs = dict(zip("wukv", make_wkv(2, 20, 3)[:4], strict=True))
    inputs[name][1, 9, 2] = float("nan")
    bad = bi_wkv(**inputs, backend=backend).isnan()
    assert bad[1, :, 2].all() and bad.sum() == 20
