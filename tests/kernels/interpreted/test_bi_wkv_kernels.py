"""Bi-WKV's Triton kernels against the reference and its autograd in fp64 on the same rounded inputs."""

import pytest
import torch

from kernels.bi_wkv import bi_wkv, triton_bwd, triton_fwd
from kernels.bi_wkv.op import _backward_op, _forward_op

NAMES = ("out", "w", "u", "k", "v")
UNIT_ROUNDOFF = {torch.float32: 0.0, torch.float16: 2.0**-11}


def out_and_gradients(inputs, cotangent, backend):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = bi_wkv(*inputs, backend=backend)
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


def errors(results, expected):
    """max |a − b| over the largest element, or over 1 where a gradient vanishes: values and cotangents are of that size."""
    found = {}
    for name, a, b in zip(NAMES, results, expected, strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert a.isfinite().all(), name
        found[name] = ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
    return found


def test_they_are_interpreted():
    assert triton_fwd.INTERPRETED


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=["fp32", "fp16"])
@pytest.mark.parametrize(("T", "C"), [(1, 3), (2, 33), (8, 32), (9, 5), (41, 7)])
def test_out_and_every_gradient(make_wkv, poisoned_memory, T, C, dtype):
    *inputs, cotangent = make_wkv(2, T, C, dtype=dtype)
    results = out_and_gradients(inputs, cotangent, "triton")
    expected = out_and_gradients([x.double() for x in inputs], cotangent, "reference")
    found = errors(results, expected)
    # the kept output, which the backward pass uses, is rounded to the dtype
    limit = {n: 1e-5 + UNIT_ROUNDOFF[dtype] * (2 if n in ("w", "u", "k") else 1) for n in NAMES}
    assert all(found[n] < limit[n] for n in NAMES), found
    assert [x.dtype for x in results] == [dtype, *(x.dtype for x in inputs)]


@pytest.mark.parametrize(("w", "k", "limit"), [(0.3, 1.0, 1e-5), (0.3, 1000.0, 5e-3), (3.0, 20.0, 2e-4), (30.0, 1000.0, 5e-3)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_any_sign_and_size(make_wkv, poisoned_memory, w, k, limit, sign):
    w0, u, keys, v, cotangent = make_wkv(1, 30, 5, w, k, dtype=torch.float32)
    inputs = [sign * w0.abs(), u, keys, v]
    expected = out_and_gradients([x.double() for x in inputs], cotangent, "reference")
    found = errors(out_and_gradients(inputs, cotangent, "triton"), expected)
    assert max(found.values()) < limit, found


@pytest.mark.parametrize("number", [1, 3])
def test_other_configs(make_wkv, poisoned_memory, number):
    w, u, k, v, dout = make_wkv(1, 19, 35, dtype=torch.float32)
    results = []
    for i in (0, number):
        out, states = triton_fwd.forward(w, u, k, v, True, triton_fwd.configs()[i])
        results.append((out, *triton_bwd.backward(dout, out, states, w, u, k, v, triton_bwd.configs()[i])))
    assert max(errors(*results).values()) < 2e-6


def test_repeatable_to_the_bit(make_wkv):
    *inputs, cotangent = make_wkv(2, 20, 5, dtype=torch.float16)
    assert all(map(torch.equal, *(out_and_gradients(inputs, cotangent, "triton") for _ in range(2))))


def test_strided_and_low_precision_inputs(make_wkv):
    """w and u in k's dtype, other strides, and what sum() hands back: the bits of plain ones of the same values."""
    w, u, k, v, _ = (x.half() for x in make_wkv(2, 10, 4))
    dout = torch.ones((), dtype=torch.float16).expand_as(k)
    plain = out_and_gradients([w.float(), u.float(), k, v], dout.clone(), "triton")
    other = out_and_gradients([w, u, k.mT.contiguous().mT, v.mT.contiguous().mT], dout, "triton")
    assert other[1].dtype == torch.float16
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(plain, other, strict=True))


def test_nothing_is_kept_without_backward(make_wkv):
    w, u, k, v, _ = make_wkv(1, 10, 4, dtype=torch.float32)
    out, states = triton_fwd.forward(w, u, k, v, True)
    again, none = triton_fwd.forward(w, u, k, v, False)
    assert torch.equal(out, again) and none.numel() == 0 and states.shape == out.shape


def test_nan_fills_its_channel(make_wkv):
    w, u, k, v, _ = make_wkv(2, 20, 3, dtype=torch.float32)
    k[1, 9, 2] = float("nan")
    bad = bi_wkv(w, u, k, v, backend="triton").isnan()
    assert bad[1, :, 2].all() and bad.sum() == 20


def test_opcheck(make_wkv):
    plain = [x.float() for x in make_wkv(1, 5, 3)[:4]]
    torch.library.opcheck(_forward_op, (*(x.clone().requires_grad_() for x in plain), "triton", True))
    out, states = _forward_op(*plain, "triton", True)
    torch.library.opcheck(_backward_op, (out, out, states, *plain, "triton"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_that_the_kernels_do_not_take(make_wkv, dtype):
    w, u, k, v, _ = make_wkv(1, 4, 2, dtype=dtype)
    with pytest.raises(ValueError, match=f"k has shape .*: .*k is {dtype}.*; use auto, torch or reference"):
        bi_wkv(w, u, k, v, backend="triton")
