"""What is TTT-Linear's own: the release's tensors, directions, chunks and segments, its FLOPs, its errors."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import ttt_linear, ttt_linear_bidir
from kernels.tools import check
from kernels.tools.check import differentiate, relative_error, relative_errors
from kernels.tools.ttt_linear_cases import CASES as cases
from kernels.tools.ttt_linear_cases import Sizes, one_direction
from tests.models.helpers import read_data

INPUTS, draw = cases.INPUTS, cases.draw

BACKENDS = pytest.mark.parametrize("backend", ["torch", "numba", "reference"])
FASTER = pytest.mark.parametrize("backend", ["torch", "numba"])


def draw_one(tokens, chunk_size, heads=2, batch=2):
    """The nine arguments of `ttt_linear`, fp64, of heads of 20, no multiple of a vector."""
    sizes = Sizes(batch=batch, tokens=tokens, heads=heads, head_dim=20, chunk_size=chunk_size)
    return one_direction(draw(0, sizes)[:-1])


@BACKENDS
@pytest.mark.parametrize("case", ["b", "c"])
def test_official_release(case, backend):
    data = read_data("ttt_linear.npz", f"{case}.")
    inputs = [data[name].requires_grad_() for name in INPUTS]
    out = ttt_linear(*inputs, chunk_size=int(data["chunk"]), backend=backend)
    results = dict(zip(INPUTS, torch.autograd.grad(out, inputs, data["cot"]), strict=True)) | {"out": out}
    errors = relative_errors(results, {"out": data["out"]} | {name: data[f"d{name}"] for name in INPUTS})
    assert max(errors.values()) < 1e-5, errors


@FASTER
@pytest.mark.parametrize(("tokens", "chunk_size"), [(81, 1), (600, 16)])
def test_tokens_that_are_alike(tokens, chunk_size, backend):
    """In fp32: the mean of Z, which rounding makes, does not grow from chunk to chunk."""
    sizes = Sizes(batch=1, tokens=tokens, heads=1, chunk_size=chunk_size, alike=True)
    inputs = draw(0, sizes)
    want = differentiate(cases, inputs, sizes, "reference")
    given = [x.float() for x in inputs]
    errors = relative_errors(differentiate(cases, given, sizes, backend), want)
    assert errors["out"] < 2e-6 and max(errors.values()) < 5e-6, errors


@FASTER
@pytest.mark.parametrize(
    "changed",
    [
        *({"chunk_size": n, "reverse": (back,)} for n, back in ((1, False), (7, True), (23, False), (40, True))),
        # segments of unequal lengths, and of a single chunk
        *({"batch": 1, "tokens": 290, "chunk_size": chunk_size} for chunk_size in (1, 150)),
    ],
    ids=str,
)
def test_one_direction_any_chunk_size_and_segments(changed, backend):
    sizes = Sizes(**{"batch": 2, "tokens": 23, "heads": 2, "head_dim": 20} | changed)
    inputs = draw(0, sizes)
    with check.poisoned_memory():
        found = differentiate(cases, inputs, sizes, backend)
    errors = relative_errors(found, differentiate(cases, inputs, sizes, "reference"))
    assert max(errors.values()) < 1e-9, errors


@BACKENDS
def test_both_directions_are_two_single_calls(backend):
    inputs = draw(0, Sizes(batch=2, tokens=19, heads=2, head_dim=20, chunk_size=4))[:-1]
    out = ttt_linear_bidir(*inputs, chunk_size=4, backend=backend)
    for r in (0, 1):
        single = ttt_linear(*one_direction(inputs, r), chunk_size=4, reverse=r == 1, backend=backend)
        assert relative_error(out[:, :, r], single) < 1e-12


@BACKENDS
@pytest.mark.parametrize("name", ["q", "k", "v", "lr"])
def test_nan_goes_forward_only(name, backend):
    """From a token to all that follow its chunk (q: to its own output), and to nothing before its chunk."""
    inputs = dict(zip(INPUTS, draw_one(20, 4, heads=1, batch=1), strict=True))
    inputs[name][0, 9] = float("nan")
    bad = ttt_linear(*inputs.values(), chunk_size=4, backend=backend).isnan().all(-1).flatten()
    assert bad[9] and not bad[:8].any()
    assert bad[12:].all() if name != "q" else not bad[12:].any()


@pytest.mark.parametrize(("tokens", "chunk_size"), [(37, 16), (5, 8)], ids=["ragged", "one short chunk"])
def test_flops_equal_those_of_the_reference(tokens, chunk_size):
    """PyTorch counts the matrix products that the reference and autograd run, forward and backward."""
    sizes = Sizes(batch=2, tokens=tokens, heads=3, head_dim=20, chunk_size=chunk_size)
    inputs = [x.requires_grad_() for x in draw(0, sizes)[:-1]]
    counts = []
    for backend in ("torch", "reference"):
        for backward in (False, True):
            with FlopCounterMode(display=False) as counter:
                out = ttt_linear_bidir(*inputs, chunk_size=chunk_size, backend=backend)
                if backward:
                    out.sum().backward()
            counts.append(counter.get_total_flops())
    assert counts[:2] == counts[2:]


def test_wrong_arguments():
    """The message names the operator, the argument and what is expected of it."""
    one = dict(zip(INPUTS, (x.float() for x in draw_one(6, 4)), strict=True)) | {"chunk_size": 4}
    two = draw(0, Sizes(batch=1, tokens=6, heads=2, head_dim=4, chunk_size=4))[:-1]
    two = dict(zip(INPUTS, two, strict=True)) | {"chunk_size": 4}
    wrong = [
        (ttt_linear, one, {"q": torch.zeros(1, 6, 8)}, ValueError, r"q .*\(B,T,H,D\)"),
        (ttt_linear, one, {"chunk_size": 5}, ValueError, r"token_scale .*\(5,\) beside .* chunk_size 5"),
        (ttt_linear, one, {"chunk_size": 0}, ValueError, "chunk_size is 0"),
        (ttt_linear, one, {"chunk_size": 4.0}, TypeError, "chunk_size is 4.0"),
        (ttt_linear, one, {"eps": 0.0}, ValueError, "eps is 0.0"),
        (ttt_linear, one, {"q": one["q"][..., :3]}, ValueError, "q .*width 3.*at least 4"),
        (ttt_linear, one, {"reverse": 1}, TypeError, "reverse is 1"),
        (ttt_linear_bidir, two, {"token_scale": two["token_scale"][0]}, ValueError, r"token_scale .*\(2, 4\)"),
    ]
    for function, right, changed, error, message in wrong:
        with pytest.raises(error, match=f"{function.__name__}: {message}"):
            function(**right | changed)
