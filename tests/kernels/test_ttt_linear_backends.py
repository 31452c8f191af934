"""TTT-Linear's fast backend against the reference in fp64, against tensors of the official release, and against itself."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import ttt_linear, ttt_linear_bidir
from kernels.ttt_linear import torch_path

OFFICIAL = Path(__file__).parents[1] / "data" / "ttt_linear.npz"
NAMES = ("q", "k", "v", "lr", "token_scale", "W0", "b0", "ln_weight", "ln_bias")
UNIT_ROUNDOFF = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def out_and_gradients(op, inputs, cotangent, **options):
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = op(*inputs, **options)
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("case", ["b", "c"])
def test_official_release(relative, case, backend):
    data = {key[2:]: torch.from_numpy(x) for key, x in np.load(OFFICIAL).items() if key.startswith(f"{case}.")}
    results = out_and_gradients(ttt_linear, [data[n] for n in NAMES], data["cot"], chunk_size=int(data["chunk"]), backend=backend)
    expected = [data["out"], *(data[f"d{n}"] for n in NAMES)]
    errors = {n: relative(a, b) for n, a, b in zip(("out", *NAMES), results, expected, strict=True)}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 81, 196, 197])
def test_every_gradient_against_fp64(make_inputs, relative, poisoned_memory, T, dtype):
    inputs = make_inputs(2, T, 2, 64, 16, R=2, dtype=dtype)
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = out_and_gradients(ttt_linear_bidir, inputs, cotangent, backend="torch")
    expected = out_and_gradients(ttt_linear_bidir, [x.double() for x in inputs], cotangent, backend="reference")
    errors = {n: relative(a, b) for n, a, b in zip(("out", *NAMES), results, expected, strict=True)}
    limit = {n: 1e-5 + (UNIT_ROUNDOFF[dtype] if a.dtype == dtype else 0) for n, a in zip(errors, results, strict=True)}
    assert all(errors[n] < limit[n] for n in errors), errors
    assert [x.dtype for x in results] == [dtype, *(x.dtype for x in inputs)]


@pytest.mark.parametrize("chunk", [1, 4, 16, 23, 40])
@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
def test_one_direction_against_fp64_reference(make_inputs, relative, chunk, reverse):
    inputs = make_inputs(2, 23, 2, 8, chunk)
    cotangent = torch.sin(torch.arange(inputs[0].numel(), dtype=torch.float64)).view_as(inputs[0])
    results = out_and_gradients(ttt_linear, inputs, cotangent, chunk_size=chunk, reverse=reverse, backend="torch")
    expected = out_and_gradients(ttt_linear, inputs, cotangent, chunk_size=chunk, reverse=reverse, backend="reference")
    assert max(map(relative, results, expected)) < 1e-10


@pytest.mark.parametrize(("B", "T", "chunk"), [(1, 403, 4), (1, 150, 1), (11, 70, 16)], ids=["segments", "chunk 1", "blocks"])
def test_segments_and_blocks_join(make_inputs, relative, poisoned_memory, monkeypatch, B, T, chunk):
    """Sizes at which the scan is cut into segments, and the batch into blocks, of unequal lengths."""
    monkeypatch.setattr(torch_path, "_SEGMENT_ROWS", 512)
    monkeypatch.setattr(torch_path, "_SEGMENT_TOKENS", 10)
    monkeypatch.setattr(torch_path, "_BLOCK_GROUPS", 20)
    inputs = make_inputs(B, T, 2, 8, chunk, R=2)
    assert torch_path.states_shape(inputs[0].shape, chunk, True)[0] > 0
    cotangent = torch.sin(torch.arange(inputs[0].numel(), dtype=torch.float64)).view_as(inputs[0])
    results = out_and_gradients(ttt_linear_bidir, inputs, cotangent, chunk_size=chunk, backend="torch")
    expected = out_and_gradients(ttt_linear_bidir, inputs, cotangent, chunk_size=chunk, backend="reference")
    assert max(map(relative, results, expected)) < 1e-10


def test_segments_join_at_the_sizes_that_run(make_inputs, relative):
    """T and H of Vittt-T at 640x640 pixels: several segments with the module's own constants."""
    inputs = make_inputs(1, 1600, 3, 64, 16, R=2, dtype=torch.float32)
    assert torch_path.states_shape(inputs[0].shape, 16, True)[0] > 0
    out = ttt_linear_bidir(*inputs, backend="torch")
    assert relative(out, ttt_linear_bidir(*(x.double() for x in inputs), backend="reference")) < 1e-5


@pytest.mark.parametrize(("T", "chunk"), [(7, 3), (5, 8)])
def test_gradcheck(make_inputs, T, chunk):
    inputs = tuple(x.requires_grad_() for x in make_inputs(1, T, 1, 3, chunk, R=2))
    assert torch.autograd.gradcheck(lambda *x: ttt_linear_bidir(*x, chunk_size=chunk, backend="torch"), inputs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_reverse_is_flip(make_inputs, relative, backend):
    inputs = make_inputs(2, 19, 2, 8, 4)
    flipped = (*(x.flip(1) for x in inputs[:4]), *inputs[4:])
    back = ttt_linear(*inputs, chunk_size=4, reverse=True, backend=backend)
    assert relative(back, ttt_linear(*flipped, chunk_size=4, backend=backend).flip(1)) < 1e-12
    assert relative(back, ttt_linear(*inputs, chunk_size=4, backend=backend)) > 1e-2


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_bidir_is_two_single_calls(make_inputs, relative, backend):
    q, k, v, lr, *parameters = make_inputs(2, 19, 2, 8, 4, R=2)
    out = ttt_linear_bidir(q, k, v, lr, *parameters, chunk_size=4, backend=backend)
    for r in (0, 1):
        single = ttt_linear(
            q[:, :, r], k[:, :, r], v[:, :, r], lr, *(x[r] for x in parameters), chunk_size=4, reverse=r == 1, backend=backend
        )
        assert relative(out[:, :, r], single) < 1e-12


def test_torch_backend_runs_one_image_as_it_runs_many(make_inputs, relative):
    inputs = make_inputs(30, 20, 1, 8, 4, R=2)
    out = ttt_linear_bidir(*inputs, chunk_size=4, backend="torch")
    for image in (0, 17, 29):
        alone = (x[image : image + 1] for x in inputs[:4])
        assert relative(out[image : image + 1], ttt_linear_bidir(*alone, *inputs[4:], chunk_size=4, backend="torch")) < 1e-12


def test_future_tokens_change_nothing(make_inputs):
    """Causality in scan order, over a chunk's and a segment's end."""
    inputs = make_inputs(1, 40, 1, 8, 4)
    out = ttt_linear(*inputs, chunk_size=4, backend="torch")
    for cut in (1, 6, 32, 39):
        changed = tuple(torch.cat([x[:, :cut], -3 * x[:, cut:]], 1) for x in inputs[:3])
        torch.testing.assert_close(ttt_linear(*changed, *inputs[3:], chunk_size=4, backend="torch")[:, :cut], out[:, :cut])


def test_repeatable_to_the_bit(make_inputs):
    inputs = make_inputs(5, 100, 3, 16, 16, R=2, dtype=torch.float32)
    first, second = (out_and_gradients(ttt_linear_bidir, inputs, inputs[0], backend="torch") for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_inputs_are_left_alone_and_may_be_strided(make_inputs):
    """Expanded, transposed and sliced inputs, with the gradients of their contiguous copies; nothing is written to."""
    inputs = make_inputs(2, 18, 2, 8, 4)
    q, k, v, lr, c, W0, b0, weight, bias = inputs
    strided = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([k, v], -1)[..., 0],
        v.repeat_interleave(2, 1)[:, ::2],
        lr.transpose(0, 1).contiguous().transpose(0, 1),
        c.repeat_interleave(3)[::3],
        W0.mT.contiguous().mT,
        b0.T.contiguous().T,
        weight[:1].expand(2, 8),
        bias,
    )
    plain = tuple(x.clone() for x in strided)
    before = tuple(x.clone() for x in strided)
    cotangent = q[:, :, :1].expand_as(q)
    results = out_and_gradients(ttt_linear, strided, cotangent, chunk_size=4, backend="torch")
    expected = out_and_gradients(ttt_linear, plain, cotangent.clone(), chunk_size=4, backend="torch")
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(map(torch.equal, strided, before))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", ["q", "k", "v", "lr"])
def test_nan_propagates(make_inputs, name, backend):
    """From a token to all that follow its chunk (q: to its own output), and to nothing before its chunk."""
    inputs = dict(zip(NAMES, make_inputs(1, 20, 1, 8, 4), strict=True))
    inputs[name][0, 9] = float("nan")
    bad = ttt_linear(*inputs.values(), chunk_size=4, backend=backend).isnan().all(-1).flatten()
    assert bad[9] and not bad[:8].any()
    assert bad[12:].all() if name != "q" else not bad[12:].any()
