"""What is TTT-Linear's own among its kernels: groups of chunks, strides of v, tuning, memory, layers that use it."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from kernels.tools import check
from kernels.tools.ttt_linear_cases import CASES as cases
from kernels.tools.ttt_linear_cases import Sizes, small
from kernels.ttt_linear import triton_bwd, triton_fwd, triton_phases
from kernels.ttt_linear.op import ttt_linear_bidir
from tests.slow import slow

arguments, draw = cases.arguments, cases.draw


def draw_arguments(sizes, dtype=torch.float32):
    """The arguments of the custom op, as a layer under autocast gives them, and dout."""
    *inputs, dout = cases.cast(draw(0, sizes), dtype)
    return arguments(inputs, sizes), dout


def assert_passes(sizes, **options):
    row = check.compare(cases, "", sizes, "fp32", seeds=[1], **options)
    assert row["passed"], row


TWO_PHASES = triton_phases.TwoPhases(
    *(find(torch.float16, 16)[0] for find in (triton_phases.state_configs, triton_phases.output_configs))
)
TWO_PASSES = triton_bwd.TwoPasses(
    *(candidates(torch.float32, 16)[0] for candidates in (triton_bwd.replay_configs, triton_bwd.back_configs))
)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (150, {"head_dim": 16, "reverse": (False,)}),
        slow(150, {"head_dim": 32, "reverse": (True,)}),
        (40, {"head_dim": 128}),
        slow(700, {"heads": 1}),  # six groups of chunks: the backward pass starts from the states kept between them
    ],
)
def test_other_widths_directions_and_groups(tokens, options):
    assert_passes(small(tokens, **{"heads": 2} | options))


def test_states_are_kept_between_groups_and_take_little_memory():
    """With q, k, v and lr they are at most 1.25 times q, k, v and out, in two-byte elements."""
    assert triton_fwd.states_shape((1, 700, 2, 1, 64), 16, True)[1] == 5
    for T, D, chunk_size in itertools.product((1, 16, 196, 6400), triton_fwd.WIDTHS, triton_fwd.CHUNK_SIZES):
        states = torch.Size(triton_fwd.states_shape((2, T, 2, 3, D), chunk_size, True)).numel() * 4
        rows = 2 * T * 2 * 3 * D * 2
        assert 3 * rows + 2 * T * 3 * 4 + states <= 1.25 * 4 * rows


# 17 tokens are a chunk and a token
SPLIT = [(17, {})]
SPLIT += [slow(*case) for case in ((1, {}), (700, {}), (150, {"head_dim": 16}), (150, {"reverse": (True,)}))]


@pytest.mark.parametrize(("tokens", "options"), [*SPLIT, slow(81, {"chunk_size": 4})])
def test_the_backward_pass_in_two_launches(tokens, options):
    """With a program for every group of chunks: as exact as one launch, the same bits where both add up alike."""
    sizes = small(tokens, 1, **options)
    assert_passes(sizes, configs=(None, TWO_PASSES))
    inputs, _ = check.draw_case(cases, sizes, 1)
    one, other = (
        check.run_kernels(cases, inputs, torch.float16, sizes, (None, config)) for config in (None, TWO_PASSES)
    )
    for name in ("q", "k", "v", "lr", "W0", "b0"):  # the others are sums over tokens
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(("tokens", "options"), SPLIT)
def test_the_forward_pass_in_two_phases(tokens, options):
    """As exact as in one; the backward pass starts from its kept states."""
    assert_passes(small(tokens, 1, **options), configs=(TWO_PHASES, None))


@pytest.mark.slow
def test_tokens_that_are_alike():
    """In two phases and two launches, from chunk to chunk: the mean of Z, which rounding makes, does not grow."""
    row = check.compare(cases, "", small(600, 1, alike=True), "fp16", seeds=[0], configs=(TWO_PHASES, TWO_PASSES))
    assert row["passed"], row


def test_two_launches_where_programs_are_few(monkeypatch):
    """Forward up to one program a multiprocessor, in the sizes of models; backward up to two; never without a GPU."""

    def takes(batch, dtype=torch.float16, **options):
        sizes = Sizes(**({"batch": batch, "tokens": 2, "heads": 1} | options))
        return triton_phases.takes_two_phases(draw_arguments(sizes, dtype)[0])

    assert not takes(1) and not triton_bwd.takes_two_passes(1, torch.device("cpu"))
    for module in (triton_phases, triton_bwd):
        monkeypatch.setattr(module, "find_gpu", lambda device: SimpleNamespace(multi_processor_count=8))
    others = ({"chunk_size": 32}, {"head_dim": 128}, {"dtype": torch.float32})
    assert takes(4) and not takes(5) and not any(takes(4, **other) for other in others)
    assert [triton_bwd.takes_two_passes(programs, torch.device("cuda")) for programs in (16, 17)] == [True, False]


def test_a_bucket_of_the_tuning_is_a_range_of_lengths_and_of_programs():
    shapes = ((1, 20), (1, 21), (1, 40), (4, 20))
    given = [draw_arguments(Sizes(batch=batch, tokens=tokens, heads=1))[0] for batch, tokens in shapes]
    buckets = [triton_fwd.shared_arguments(x)["bucket"] for x in given]
    assert buckets[0] == buckets[1] and len(set(buckets)) == 3


@pytest.mark.parametrize(("batch", "tokens"), [(1, 17), slow(2, 17), slow(2, 1)])
def test_v_as_a_part_of_a_wider_projection(batch, tokens):
    """v with its own strides, as in the layer, and with ones that need a copy: a contiguous bits, in 1 or 2 phases."""
    given, dout = draw_arguments(Sizes(batch=batch, tokens=tokens, heads=2), torch.float16)
    expected = cases.kernels(given, dout)
    two_phases, kept = triton_phases.forward(given, True, TWO_PHASES)
    assert kept.shape == triton_fwd.states_shape(given.q.shape, 16, True)
    v = given.v
    wide = torch.randn(batch, tokens, 5, 2, 64).half()
    wide[:, :, 3:] = v
    part = wide[:, :, 3:]
    assert triton_fwd.token_rows(part)[1] == 10 or tokens == 1
    for other in (part, v.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT):
        assert all(map(torch.equal, cases.kernels(given._replace(v=other), dout), expected))
    assert triton_fwd.token_rows(v[:, :1].expand_as(v))[0].is_contiguous()
    out, none = triton_phases.forward(given._replace(v=part), False, TWO_PHASES)
    assert torch.equal(out, two_phases) and none.numel() == 0


def test_nan_stays_where_it_belongs():
    """A NaN in a key reaches its own chunk's later tokens and those that are scanned after it, in its head only."""
    given, _ = draw_arguments(Sizes(batch=1, tokens=50, heads=2))
    given[1][0, 20, :, 1] = float("nan")
    out, _ = triton_fwd.forward(given, False)
    nan = out.isnan().any(-1)[0]  # (T,R,H)
    assert not nan[..., 0].any()
    assert not nan[:16, 0, 1].any() and nan[32:, 0, 1].all() and not nan[34:, 1, 1].any() and nan[:18, 1, 1].all()


def test_steep_norms_stay_within_fp16():
    """Keys whose products have a variance below the norm's eps, so that 1/σ is near its largest, and values of size ten."""
    sizes = small(40, heads=1)
    q, k, v, *others, dout = cases.cast(draw(0, sizes), torch.float16)
    given = [1e-3 * q, 1e-3 * k, 10 * v, *others]
    found, expected = (
        ttt_linear_bidir(*(x.to(dtype) for x in given), chunk_size=sizes.chunk_size, backend=backend)
        for dtype, backend in ((torch.float16, "triton"), (torch.float64, "reference"))
    )
    assert found.isfinite().all() and check.relative_error(found, expected) < 2e-3
