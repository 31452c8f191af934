"""The Triton kernels against the fp64 reference and its autograd on the same rounded inputs: the matrix, and what surrounds it."""

import pytest
import torch

from kernels import ttt_linear, ttt_linear_bidir
from kernels.tools import check, ttt_linear_cases
from kernels.tools.ttt_linear_cases import Sizes, small
from kernels.ttt_linear import triton_bwd, triton_fwd

OPTIONS = 16, check.BOTH, ttt_linear_cases.EPS


def compare(sizes, dtype="fp32", **options):
    return check.compare(ttt_linear_cases, "", sizes, dtype, **options)


def draw(seed, batch, tokens, directions, heads):
    return ttt_linear_cases.draw(seed, Sizes(batch=batch, tokens=tokens, heads=heads, reverse=check.BOTH[:directions]))


def arguments(inputs, dtype=torch.float32, parameters=torch.float32):
    """draw()'s nine inputs as the kernels take them."""
    return [x.to(dtype) for x in inputs[:3]] + [x.to(parameters) for x in inputs[3:9]]


def test_they_are_interpreted():
    assert triton_fwd.INTERPRETED


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("heads", ttt_linear_cases.HEADS)
@pytest.mark.parametrize("tokens", ttt_linear_cases.LENGTHS)
def test_out_and_every_gradient(tokens, heads, dtype):
    row = compare(small(tokens, heads), dtype)
    assert row["passed"], row


@pytest.mark.parametrize("chunk_size", [4, 8, 32, 64])
def test_other_chunk_sizes(chunk_size):
    row = compare(small(81, 1, chunk_size=chunk_size), seeds=[0])
    assert row["passed"], row


@pytest.mark.parametrize(("width", "tokens", "reverse"), [(16, 150, (False,)), (32, 150, (True,)), (128, 40, (True, False))])
def test_other_widths_and_directions(width, tokens, reverse):
    row = compare(small(tokens, 2, head_dim=width, reverse=reverse), seeds=[1])
    assert row["passed"], row


def test_many_groups():
    """Six groups of chunks: the kept states in the middle of the sequence are the ones that the backward pass starts from."""
    assert triton_fwd.states_shape((1, 700, 2, 1, 64), 16, True)[1] == 5
    row = compare(small(700, 1), seeds=[0])
    assert row["passed"], row


def test_memory_is_poisoned():
    with check.poisoned_memory():
        assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_repeat_runs_are_bitwise_equal(dtype):
    assert check.repeated(ttt_linear_cases, small(150, 1), dtype, "cpu")["passed"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_tuning_once_per_bucket_of_length_and_programs(monkeypatch, deterministic):
    """The launch as on a GPU, but for the tuner's clock; in torch's deterministic mode nothing is tried."""
    kernels = {triton_fwd: triton_fwd.forward_kernel, triton_bwd: triton_bwd.backward_kernel}
    inputs = {(B, T): draw(0, B, T, 2, 1) for B, T in ((1, 20), (1, 21), (1, 40), (4, 20))}
    sizes = small(20, 1)  # of which the kernels are told the chunk, the directions and nothing else
    want = {shape: ttt_linear_cases.kernels(drawn, torch.float16, sizes) for shape, drawn in inputs.items()}
    tuners = {module: triton_fwd.tuned.__wrapped__(kernel, module.configs, torch.float16, 16, 64) for module, kernel in kernels.items()}
    benchmarked = []
    for tuner in tuners.values():
        tuner._do_bench = lambda call, quantiles: (call(), benchmarked.append(1), [1.0, 1.0, 1.0])[-1]
    monkeypatch.setattr(triton_fwd, "tuned", lambda kernel, candidates, *sizes: next(t for t in tuners.values() if t.fn is kernel))
    monkeypatch.setattr(triton_fwd, "INTERPRETED", False)
    for (B, T), drawn in inputs.items():
        torch.use_deterministic_algorithms(deterministic)
        got = ttt_linear_cases.kernels(drawn, torch.float16, sizes)
        torch.use_deterministic_algorithms(False)
        assert all(torch.equal(got[name], want[B, T][name]) for name in got)
    buckets = 0 if deterministic else 3  # 20 and 21 share one; 40 is longer, four samples are more programs
    assert [len(tuner.cache) for tuner in tuners.values()] == [buckets, buckets]
    assert len(benchmarked) == buckets * sum(len(module.configs(torch.float16, 16)) for module in kernels)


@pytest.mark.parametrize("shape", [(2, 21), (1, 21), (2, 1)])
def test_v_as_a_part_of_a_wider_projection(shape):
    """v's own strides, as the layer has them, and ones that only a copy can serve: the same bits as of a contiguous v."""
    inputs = draw(7, *shape, 2, 3)
    given, dout = arguments(inputs, torch.float16), inputs[-1].half()
    out, states = triton_fwd.forward(*given, *OPTIONS, True)
    gradients = triton_bwd.backward(dout, states, *given, *OPTIONS)
    v = given[2]
    wide = torch.randn(*shape, 5, 3, 64).half()
    wide[:, :, 3:] = v
    part = wide[:, :, 3:]
    assert triton_fwd.token_rows(part) == 15 or shape[1] == 1
    expanded = v[:, :1].expand_as(v)
    for other in (part, v.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT):
        other_out, other_states = triton_fwd.forward(*given[:2], other, *given[3:], *OPTIONS, True)
        assert torch.equal(out, other_out) and torch.equal(states, other_states)
        assert all(map(torch.equal, triton_bwd.backward(dout, states, *given[:2], other, *given[3:], *OPTIONS), gradients))
    assert triton_fwd.token_rows(expanded) is None or shape[1] == 1


def test_low_precision_parameters_and_strided_inputs():
    """Parameters in q's dtype, and views with other strides, give what fp32 contiguous ones of the same values give."""
    inputs = draw(3, 2, 20, 2, 3)
    halves, dout = arguments(inputs, torch.float16, torch.float16), inputs[-1].half()
    out, states = triton_fwd.forward(*halves, *OPTIONS, True)
    gradients = triton_bwd.backward(dout, states, *halves, *OPTIONS)
    views = [x.mT.contiguous().mT if x.dim() > 2 else x for x in [*halves[:3], *(x.float() for x in halves[3:])]]
    assert not views[0].is_contiguous()
    out_views, states_views = triton_fwd.forward(*views, *OPTIONS, True)
    assert torch.equal(out, out_views)
    for name, a, b in zip(ttt_linear_cases.INPUTS, gradients, triton_bwd.backward(dout, states_views, *views, *OPTIONS), strict=True):
        assert a.dtype == torch.float16 and torch.equal(a, b.to(a.dtype)), name


def test_an_expanded_output_gradient():
    """What sum() hands back has stride 0."""
    inputs = draw(5, 1, 20, 2, 1)
    given = arguments(inputs)
    _, states = triton_fwd.forward(*given, *OPTIONS, True)
    expanded, dense = torch.ones(()).expand(inputs[0].shape), torch.ones(inputs[0].shape)
    for a, b in zip(*(triton_bwd.backward(dout, states, *given, *OPTIONS) for dout in (expanded, dense)), strict=True):
        assert torch.equal(a, b)


def test_inputs_are_left_alone():
    inputs = draw(6, 1, 20, 2, 1)
    given = arguments(inputs)
    before = [x.clone() for x in given]
    _, states = triton_fwd.forward(*given, *OPTIONS, True)
    kept = states.clone()
    triton_bwd.backward(inputs[-1].float(), states, *given, *OPTIONS)
    assert all(map(torch.equal, given, before)) and torch.equal(states, kept)


def test_nan_stays_where_it_belongs():
    """A NaN in a key reaches its own chunk's later tokens and those scanned after it, in its head only."""
    given = arguments(draw(4, 1, 50, 2, 2))
    given[1][0, 20, :, 1] = float("nan")
    out, _ = triton_fwd.forward(*given, *OPTIONS, False)
    nan = out.isnan().any(-1)[0]  # (T,R,H)
    assert not nan[..., 0].any()
    assert not nan[:16, 0, 1].any() and nan[32:, 0, 1].all() and not nan[34:, 1, 1].any() and nan[:18, 1, 1].all()


def test_no_states_without_backward():
    given = arguments(draw(0, 1, 300, 2, 1))
    kept, states = triton_fwd.forward(*given, *OPTIONS, True)
    out, none = triton_fwd.forward(*given, *OPTIONS, False)
    assert torch.equal(out, kept) and none.numel() == 0
    assert states.shape == triton_fwd.states_shape(given[0].shape, 16, True) and not states.isnan().any()


@pytest.mark.parametrize("chunk_size", triton_fwd.CHUNK_SIZES)
@pytest.mark.parametrize("D", triton_fwd.WIDTHS)
@pytest.mark.parametrize("T", [1, 16, 81, 196, 6400])
def test_size_of_the_states(T, D, chunk_size):
    """With q, k, v and lr they are at most 1.25 times q, k, v and out, in two-byte elements."""
    B, R, H = 2, 2, 3
    states = torch.Size(triton_fwd.states_shape((B, T, R, H, D), chunk_size, True)).numel() * 4
    rows = B * T * R * H * D * 2
    assert 3 * rows + B * T * H * 4 + states <= 1.25 * 4 * rows


@pytest.mark.parametrize("directions", [1, 2])
def test_memory_kept_for_backward(directions):
    """What autograd holds after a forward pass, each storage once, parameters aside: 1.25 times q, k, v and out at most."""
    q, k, v, lr, *parameters = arguments(draw(0, 1, 300, 2, 2), torch.float16)
    parts = [x if directions == 2 else x[:, :, 0].contiguous() for x in (q, k, v)]
    parameters = [x if directions == 2 else x[0] for x in parameters]
    leaves = [x.requires_grad_() for x in (*parts, lr.half(), *parameters)]
    apart, held = {x.untyped_storage().data_ptr() for x in leaves[4:]}, {}

    def keep(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = (ttt_linear_bidir if directions == 2 else ttt_linear)(*leaves, backend="triton")
    kept = sum(size for storage, size in held.items() if storage not in apart)
    assert 0 < kept <= 1.25 * 4 * out.nbytes
