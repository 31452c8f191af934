"""The selective scan's fast backend against the reference in fp64, against tensors of the official release, and against itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.selective_scan import selective_scan, selective_scan_bidir, torch_path

OFFICIAL = Path(__file__).parents[1] / "data" / "vim_scan.npz"
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
UNIT_ROUNDOFF = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def out_and_gradients(op, inputs, cotangent, **options):
    inputs = tuple(x if x is None else x.detach().requires_grad_() for x in inputs)
    out = op(*inputs, **options)
    return out, *torch.autograd.grad(out, [x for x in inputs if x is not None], cotangent.to(out.dtype))


def wave(x):
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_official_release(relative, backend):
    data = {key.split("/")[-1]: torch.from_numpy(x) for key, x in np.load(OFFICIAL).items()}
    inputs = [data[name].mT if name in ("u", "delta", "B", "C", "z") else data[name] for name in NAMES]
    assert relative(selective_scan(*inputs, backend=backend), data["out"].mT) < 1e-6


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("T", [1, 2, 15, 82, 197])
def test_every_gradient_against_fp64(make_scan_inputs, relative, poisoned_memory, T, dtype):
    inputs = make_scan_inputs(2, T, 24, R=2, dtype=dtype)
    cotangent = wave(inputs[0]).to(dtype)
    results = out_and_gradients(selective_scan_bidir, inputs, cotangent, backend="torch")
    expected = out_and_gradients(selective_scan_bidir, [x.double() for x in inputs], cotangent, backend="reference")
    errors = {n: relative(a, b) for n, a, b in zip(("out", *NAMES), results, expected, strict=True) if b.any()}
    assert len(errors) == (9 if T > 1 else 8)  # a single token makes no use of A
    limit = {n: 1e-5 + (UNIT_ROUNDOFF[dtype] if a.dtype == dtype else 0) for n, a in zip(("out", *NAMES), results, strict=True)}
    assert all(errors[n] < limit[n] for n in errors), errors
    assert [x.dtype for x in results] == [dtype, *(x.dtype for x in inputs)]


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("N", [1, 5, 16])
def test_one_direction_against_fp64_reference(make_scan_inputs, relative, N, reverse, gate):
    inputs = make_scan_inputs(2, 23, 7, N, gate=gate)
    results = out_and_gradients(selective_scan, inputs, wave(inputs[0]), reverse=reverse, backend="torch")
    expected = out_and_gradients(selective_scan, inputs, wave(inputs[0]), reverse=reverse, backend="reference")
    assert max(map(relative, results, expected)) < 1e-10


@pytest.mark.parametrize(("B", "T"), [(1, 100), (5, 23), (3, 16)], ids=["tiles", "blocks", "one even tile"])
def test_tiles_and_blocks_join(make_scan_inputs, relative, poisoned_memory, monkeypatch, B, T):
    """Sizes at which the tokens are cut into tiles, and the batch into blocks, of unequal lengths."""
    monkeypatch.setattr(torch_path, "_MIN_TOKENS", 4)
    monkeypatch.setattr(torch_path, "_TILE_ELEMENTS", 2 * 8 * 16 * 2 * 8)
    monkeypatch.setattr(torch_path, "_STEP_ELEMENTS", 2 * 8 * 16 * 2)
    inputs = make_scan_inputs(B, T, 8, R=2)
    assert torch_path.states_shape(inputs[0].shape, 16, True)[0] > 0
    results = out_and_gradients(selective_scan_bidir, inputs, wave(inputs[0]), backend="torch")
    expected = out_and_gradients(selective_scan_bidir, inputs, wave(inputs[0]), backend="reference")
    assert max(map(relative, results, expected)) < 1e-10


def test_tiles_join_at_the_sizes_that_run(make_scan_inputs, relative):
    """T and E of Vim-T at 224 pixels, both directions as they start out: several tiles with the module's own constants."""
    u, delta, _, B, C, D, z, _ = make_scan_inputs(1, 197, 384, R=2, dtype=torch.float32)
    A = -torch.arange(1.0, 17).expand(2, 384, 16)
    bias = torch.stack([torch.linspace(-6.9, -2.2, 384), torch.zeros(384)])
    inputs = (u, 0.3 * delta, A, B, C, D, z, bias)
    assert torch_path.states_shape(u.shape, 16, True)[0] > 0
    out = selective_scan_bidir(*inputs, backend="torch")
    assert relative(out, selective_scan_bidir(*(x.double() for x in inputs), backend="reference")) < 1e-5


def test_memory_is_that_of_activations():
    """The kept states of Vim-T, -S and -B are at most one activation (B,T,2,E) in the compute dtype."""
    for E in (384, 768, 1536):
        for T in (197, 1025, 6401):
            states = torch.Size(torch_path.states_shape((8, T, 2, E), 16, True)).numel()
            assert 0 < states <= 8 * T * 2 * E


def test_large_steps_and_rates_neither_overflow_nor_vanish(make_scan_inputs, relative):
    """Δ to 60, A to −16: decays of e^−960 and none at all, side by side."""
    u, delta, A, B, C, D, z, bias = make_scan_inputs(1, 40, 6, R=2, dtype=torch.float32)
    inputs = (u, 20 * delta, A * 5, B, C, D, z, bias)
    results = out_and_gradients(selective_scan_bidir, inputs, wave(u), backend="torch")
    expected = out_and_gradients(selective_scan_bidir, [x.double() for x in inputs], wave(u), backend="reference")
    assert all(x.isfinite().all() for x in results)
    assert max(map(relative, results, expected)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus(dtype):
    """To the relative accuracy of e^−|x| with a rounded exponent, also where it is small."""
    x = torch.linspace(-80, 80, 3201, dtype=dtype)
    expected = F.softplus(x.double(), threshold=1000)
    ours = torch_path._softplus(x, torch.empty_like(x), torch.empty_like(x)).double()
    assert ((ours / expected - 1).abs() <= torch.finfo(dtype).eps * (2 + x.double().abs())).all()


def test_gradcheck(make_scan_inputs):
    inputs = tuple(x.requires_grad_() for x in make_scan_inputs(1, 5, 2, 3, R=2))
    assert torch.autograd.gradcheck(lambda *x: selective_scan_bidir(*x, backend="torch"), inputs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_bidir_is_two_single_calls(make_scan_inputs, relative, backend):
    u, delta, A, B, C, D, z, bias = make_scan_inputs(2, 19, 8, R=2)
    out = selective_scan_bidir(u, delta, A, B, C, D, z, bias, backend=backend)
    for r in (0, 1):
        parts = (u[:, :, r], delta[:, :, r], A[r], B[:, :, r], C[:, :, r], D[r], z, bias[r])
        assert relative(out[:, :, r], selective_scan(*parts, reverse=r == 1, backend=backend)) < 1e-12
    assert relative(out[:, :, 0], out[:, :, 1]) > 1e-2


def test_repeatable_to_the_bit(make_scan_inputs):
    inputs = make_scan_inputs(3, 100, 16, R=2, dtype=torch.float32)
    first, second = (out_and_gradients(selective_scan_bidir, inputs, inputs[0], backend="torch") for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_inputs_are_left_alone_and_may_be_strided(make_scan_inputs):
    """Parts of a projection, transposed and expanded inputs, with the gradients of their contiguous copies; nothing is written to."""
    u, delta, A, B, C, D, z, bias = make_scan_inputs(2, 18, 8, R=2)
    strided = (
        u.transpose(1, 2).contiguous().transpose(1, 2),
        delta.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        A.mT.contiguous().mT,
        *torch.cat([u, B, C], -1).split((8, 16, 16), -1)[1:],
        D[:1].expand(2, 8),
        torch.cat([z, z], -1).chunk(2, -1)[1],
        bias,
    )
    before = tuple(x.clone() for x in strided)
    cotangent = u[:, :1].expand_as(u)
    results = out_and_gradients(selective_scan_bidir, strided, cotangent, backend="torch")
    expected = out_and_gradients(selective_scan_bidir, before, cotangent.clone(), backend="torch")
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(map(torch.equal, strided, before))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", ["u", "delta", "B", "C", "z"])
def test_nan_propagates(make_scan_inputs, name, backend):
    """From a token to all that follow it (C and z: to its own output), and to none before it."""
    inputs = dict(zip(NAMES, make_scan_inputs(1, 20, 3), strict=True))
    inputs[name][0, 9] = float("nan")
    bad = selective_scan(*inputs.values(), backend=backend).isnan().all(-1).flatten()
    assert bad[9] and not bad[:9].any()
    assert bad[10:].all() if name in ("u", "delta", "B") else not bad[10:].any()
