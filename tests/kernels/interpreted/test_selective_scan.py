"""The selective scan's Triton kernels against the fp64 reference and its autograd on the same inputs, and as an operator."""

import pytest
import torch

from kernels.selective_scan import selected_backend, selective_scan, selective_scan_bidir, triton_fwd
from kernels.selective_scan.op import _backward_op, _forward_op

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
UNIT_ROUNDOFF = {torch.float32: 0.0, torch.float16: 2.0**-11}
BOTH = [False, True]


def out_and_gradients(op, inputs, cotangent, **options):
    inputs = tuple(x if x is None else x.detach().requires_grad_() for x in inputs)
    out = op(*inputs, **options)
    return out, *torch.autograd.grad(out, [x for x in inputs if x is not None], cotangent.to(out.dtype))


def wave(x):
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape)


def assert_near_fp64(relative, op, inputs, **options):
    dtype = inputs[0].dtype
    cotangent = wave(inputs[0]).to(dtype)
    results = out_and_gradients(op, inputs, cotangent, backend="triton", **options)
    expected = out_and_gradients(op, [x if x is None else x.double() for x in inputs], cotangent, backend="reference", **options)
    names = ["out", *(name for name, x in zip(NAMES, inputs, strict=True) if x is not None)]
    for name, a, b in zip(names, results, expected, strict=True):
        if b.any():
            assert relative(a, b) < 1e-5 + (UNIT_ROUNDOFF[dtype] if a.dtype == dtype else 0), name
        else:
            assert not a.any(), name


def test_they_are_interpreted():
    assert triton_fwd.INTERPRETED
    assert selected_backend("triton", "cpu") == "triton"


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=["fp32", "fp16"])
@pytest.mark.parametrize(("B", "T", "E"), [(1, 1, 8), (2, 5, 33), (1, 19, 8)])
def test_out_and_every_gradient(make_scan_inputs, relative, poisoned_memory, monkeypatch, B, T, E, dtype):
    """One token, two blocks of channels of which one is short, and three groups of tokens."""
    monkeypatch.setattr(triton_fwd, "GROUP", 8)
    assert triton_fwd.states_shape((B, T, 2, E), 16, True)[2] == (2 if T == 19 else 0)
    assert_near_fp64(relative, selective_scan_bidir, make_scan_inputs(B, T, E, R=2, dtype=dtype))


@pytest.mark.parametrize(("T", "N", "reverse", "gate"), [(66, 16, True, True), (5, 8, False, False), (3, 32, True, True)])
def test_one_direction(make_scan_inputs, relative, poisoned_memory, T, N, reverse, gate):
    """Groups of tokens of the length that runs; other numbers of states; no gate."""
    inputs = make_scan_inputs(1, T, 8, N, dtype=torch.float32, gate=gate)
    assert_near_fp64(relative, selective_scan, inputs, reverse=reverse)


def test_small_steps_keep_their_accuracy(make_scan_inputs, relative):
    """Δ about e^−10 and no skip: log(1 + e) as it stands would have three digits."""
    u, delta, A, B, C, D, z, bias = make_scan_inputs(1, 3, 8, R=2, dtype=torch.float32)
    assert_near_fp64(relative, selective_scan_bidir, (u, 0.1 * delta, A, B, C, 0 * D, z, 0 * bias - 10))


def test_repeat_runs_are_bitwise_equal(make_scan_inputs):
    inputs = make_scan_inputs(1, 3, 8, R=2, dtype=torch.float32)
    first, second = (out_and_gradients(selective_scan_bidir, inputs, inputs[0], backend="triton") for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_parts_of_a_projection_are_taken_as_they_are(make_scan_inputs, monkeypatch):
    """u, delta, B, C and z by their strides, without a copy, with the bits of their contiguous copies; nothing is written to."""
    u, delta, A, B, C, D, z, bias = make_scan_inputs(2, 3, 8, R=2, dtype=torch.float16)
    strided = (
        u.transpose(1, 2).contiguous().transpose(1, 2),
        delta.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        A,
        *torch.cat([u, B, C], -1).split((8, 16, 16), -1)[1:],
        D,
        torch.cat([z, z], -1).chunk(2, -1)[1],
        bias,
    )
    before = tuple(x.clone() for x in strided)
    arguments = triton_fwd.shared_arguments(*strided, BOTH)
    assert all(arguments[f"{name}_ptr"] is strided[NAMES.index(name)] for name in ("u", "delta", "B", "C", "z"))
    results = out_and_gradients(selective_scan_bidir, strided, u[:, :1].expand_as(u), backend="triton")
    expected = out_and_gradients(selective_scan_bidir, before, u[:, :1].expand_as(u).clone(), backend="triton")
    assert all(map(torch.equal, results, expected)) and all(map(torch.equal, strided, before))
    unlike = (u.mT.contiguous().mT, delta, A.mT.contiguous().mT, *before[3:])
    assert torch.equal(selective_scan_bidir(*unlike, backend="triton"), expected[0])


@pytest.mark.parametrize("name", ["delta", "B", "C"])
def test_nan_stays_where_it_belongs(make_scan_inputs, name):
    """From a token to those scanned after it (C: to its own output), of its own image."""
    inputs = dict(zip(NAMES, make_scan_inputs(2, 9, 8, R=2, dtype=torch.float32), strict=True))
    inputs[name][0, 4] = float("nan")
    bad = selective_scan_bidir(*inputs.values(), backend="triton").isnan().all(-1)
    own = name == "C"
    assert not bad[1].any()
    assert bad[0, :, 0].tolist() == [t == 4 if own else t >= 4 for t in range(9)]
    assert bad[0, :, 1].tolist() == [t == 4 if own else t <= 4 for t in range(9)]


def test_no_states_without_backward(make_scan_inputs, monkeypatch):
    monkeypatch.setattr(triton_fwd, "GROUP", 8)
    inputs = make_scan_inputs(1, 10, 8, R=2, dtype=torch.float32)
    kept, states = triton_fwd.forward(*inputs, BOTH, True)
    out, none = triton_fwd.forward(*inputs, BOTH, False)
    assert torch.equal(out, kept) and none.numel() == 0
    assert states.shape == triton_fwd.states_shape(inputs[0].shape, 16, True) == (1, 2, 1, 16, 8) and not states.isnan().any()


def test_opcheck(make_scan_inputs):
    u, delta, A, B, C, D, z, bias = make_scan_inputs(1, 1, 8, 8, R=1, dtype=torch.float32)
    detached = (u, delta, A, B, C, D, z, bias)
    torch.library.opcheck(_forward_op, (*(x.clone().requires_grad_() for x in detached), [True], "triton", True))
    out, states = _forward_op(*detached, [True], "triton", True)
    torch.library.opcheck(_backward_op, (out, states, *detached, [True], "triton"))


def test_autocast_gives_low_precision_activations_and_fp32_gradients(make_scan_inputs):
    inputs = make_scan_inputs(1, 2, 8, R=2, dtype=torch.float16)
    expected = out_and_gradients(selective_scan_bidir, inputs, wave(inputs[0]), backend="triton")
    with torch.autocast("cpu", torch.float16):
        results = out_and_gradients(selective_scan_bidir, inputs, wave(inputs[0]), backend="triton")
    assert [x.dtype for x in results[1:]] == [x.dtype for x in inputs] and results[0].dtype == torch.float16
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(
    ("N", "dtype", "message"),
    [
        (5, torch.float32, "A's last axis N is 5, expected one of 8, 16, 32"),
        (16, torch.float64, "u is torch.float64"),
        (16, torch.bfloat16, "interpreter"),
    ],
)
def test_sizes_that_it_cannot_run_are_refused(make_scan_inputs, N, dtype, message):
    with pytest.raises(ValueError, match=message):
        selective_scan_bidir(*make_scan_inputs(1, 3, 8, N, R=2, dtype=dtype), backend="triton")


def test_vim_trains_on_it():
    """Vim-nano's mixer: the strides that the layer itself produces; against the torch backend."""
    from repro.models.vim import VimMixer

    torch.manual_seed(0)
    mixer = VimMixer(16, 4)
    x = torch.randn(1, 5, 16)
    results = {}
    for mixer.backend in ("triton", "torch"):
        results[mixer.backend] = torch.autograd.grad(mixer(x).square().sum(), list(mixer.parameters()))
    for a, b in zip(*results.values(), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
