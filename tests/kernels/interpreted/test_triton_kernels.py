"""The Triton kernels against the fp64 reference and its autograd on the same rounded inputs: the matrix, and what surrounds it."""

from types import SimpleNamespace

import pytest
import torch

from kernels.tools import check
from kernels.ttt_linear import triton_bwd, triton_fwd

OPTIONS = 16, check.BOTH, check.EPS


def arguments(inputs, dtype=torch.float32, parameters=torch.float32):
    """draw()'s nine inputs as the kernels take them."""
    return [x.to(dtype) for x in inputs[:3]] + [x.to(parameters) for x in inputs[3:9]]


def test_they_are_interpreted():
    assert triton_fwd.INTERPRETED


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("heads", check.HEADS)
@pytest.mark.parametrize("tokens", check.LENGTHS)
def test_out_and_every_gradient(tokens, heads, dtype):
    row = check.compare("matrix", tokens, heads, dtype)
    assert row["passed"], row


@pytest.mark.parametrize("chunk_size", [4, 8, 32, 64])
def test_other_chunk_sizes(chunk_size):
    row = check.compare("chunk size", 81, 1, "fp32", seeds=[0], chunk_size=chunk_size)
    assert row["passed"], row


@pytest.mark.parametrize(("width", "tokens", "reverse"), [(16, 150, (False,)), (32, 150, (True,)), (128, 40, (True, False))])
def test_other_widths_and_directions(width, tokens, reverse):
    row = check.compare("width", tokens, 2, "fp32", seeds=[1], width=width, reverse=reverse)
    assert row["passed"], row


def test_many_groups():
    """Six groups of chunks: the kept states in the middle of the sequence are the ones that the backward pass starts from."""
    assert triton_fwd.states_shape((1, 700, 2, 1, 64), 16, True)[1] == 5
    row = check.compare("groups", 700, 1, "fp32", seeds=[0])
    assert row["passed"], row


def test_memory_is_poisoned():
    with check.poisoned_memory():
        assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_repeat_runs_are_bitwise_equal(dtype):
    assert check.repeated(150, 1, dtype, "cpu")["passed"]


@pytest.mark.parametrize(("shared_memory", "tried"), [(2**20, 3), (2**10, 1)])
def test_tuning_tries_what_fits_once_per_bucket(monkeypatch, shared_memory, tried):
    """The tuner as it runs on a GPU, but for its clock: the device's shared memory prunes, the bucket of T is the key."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kernel = triton_fwd.tuned.__wrapped__(triton_fwd.forward_kernel, triton_fwd.configs, torch.float16, 16)
    benchmarked = []
    kernel._do_bench = lambda call, quantiles: (call(), benchmarked.append(1), [1.0, 1.0, 1.0])[-1]
    for tokens in (20, 21, 40):  # two of one bucket, one of the next
        given = arguments(check.draw(0, 1, tokens, 2, 1), torch.float16)
        want, states = triton_fwd.forward(*given, *OPTIONS, False)
        out = torch.full_like(want, float("nan"))
        launched = triton_fwd.shared_arguments(*given, *OPTIONS) | {"out_ptr": out, "states_ptr": states, "KEEP": False}
        kernel[(2,)](**launched)
        assert torch.equal(out, want)
    assert len(kernel.cache) == 2 and len(benchmarked) == (2 * tried if tried > 1 else 0)


def test_low_precision_parameters_and_strided_inputs():
    """Parameters in q's dtype, and views with other strides, give what fp32 contiguous ones of the same values give."""
    inputs = check.draw(3, 2, 20, 2, 3)
    halves, dout = arguments(inputs, torch.float16, torch.float16), inputs[-1].half()
    out, states = triton_fwd.forward(*halves, *OPTIONS, True)
    gradients = triton_bwd.backward(dout, states, *halves, *OPTIONS)
    views = [x.mT.contiguous().mT if x.dim() > 2 else x for x in [*halves[:3], *(x.float() for x in halves[3:])]]
    assert not views[0].is_contiguous()
    out_views, states_views = triton_fwd.forward(*views, *OPTIONS, True)
    assert torch.equal(out, out_views)
    for name, a, b in zip(check.INPUTS, gradients, triton_bwd.backward(dout, states_views, *views, *OPTIONS), strict=True):
        assert a.dtype == torch.float16 and torch.equal(a, b.to(a.dtype)), name


def test_an_expanded_output_gradient():
    """What sum() hands back has stride 0."""
    inputs = check.draw(5, 1, 20, 2, 1)
    given = arguments(inputs)
    _, states = triton_fwd.forward(*given, *OPTIONS, True)
    expanded, dense = torch.ones(()).expand(inputs[0].shape), torch.ones(inputs[0].shape)
    for a, b in zip(*(triton_bwd.backward(dout, states, *given, *OPTIONS) for dout in (expanded, dense)), strict=True):
        assert torch.equal(a, b)


def test_inputs_are_left_alone():
    inputs = check.draw(6, 1, 20, 2, 1)
    given = arguments(inputs)
    before = [x.clone() for x in given]
    _, states = triton_fwd.forward(*given, *OPTIONS, True)
    kept = states.clone()
    triton_bwd.backward(inputs[-1].float(), states, *given, *OPTIONS)
    assert all(map(torch.equal, given, before)) and torch.equal(states, kept)


def test_nan_stays_where_it_belongs():
    """A NaN in a key reaches its own chunk's later tokens and those scanned after it, in its head only."""
    given = arguments(check.draw(4, 1, 50, 2, 2))
    given[1][0, 20, :, 1] = float("nan")
    out, _ = triton_fwd.forward(*given, *OPTIONS, False)
    nan = out.isnan().any(-1)[0]  # (T,R,H)
    assert not nan[..., 0].any()
    assert not nan[:16, 0, 1].any() and nan[32:, 0, 1].all() and not nan[34:, 1, 1].any() and nan[:18, 1, 1].all()


def test_no_states_without_backward():
    given = arguments(check.draw(0, 1, 300, 2, 1))
    kept, states = triton_fwd.forward(*given, *OPTIONS, True)
    out, none = triton_fwd.forward(*given, *OPTIONS, False)
    assert torch.equal(out, kept) and none.numel() == 0
    assert states.shape == triton_fwd.states_shape(given[0].shape, 16, True) and not states.isnan().any()


@pytest.mark.parametrize("chunk_size", triton_fwd.CHUNK_SIZES)
@pytest.mark.parametrize("D", triton_fwd.WIDTHS)
@pytest.mark.parametrize("T", [1, 16, 81, 196, 6400])
def test_memory_kept_for_backward(T, D, chunk_size):
    """q, k, v, lr and the states are at most 1.25 times q, k, v and out, in two-byte elements."""
    B, R, H = 2, 2, 3
    states = torch.Size(triton_fwd.states_shape((B, T, R, H, D), chunk_size, True)).numel() * 4
    rows = B * T * R * H * D * 2
    assert 3 * rows + B * T * H * 4 + states <= 1.25 * 4 * rows
