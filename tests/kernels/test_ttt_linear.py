"""What is TTT-Linear's own: the release's tensors, directions, chunks and segments, its FLOPs, its errors."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import ttt_linear, ttt_linear_bidir
from kernels.tools.bench import BOTH_PASSES, FORWARD, count_work
from kernels.tools.check import relative_error, relative_errors
from kernels.tools.ttt_linear_cases import CASES as cases
from kernels.tools.ttt_linear_cases import Sizes
from kernels.ttt_linear.op import one_direction
from kernels.ttt_linear.plain import compose, ttt_linear_plain
from kernels.ttt_linear.reference import ttt_linear_dual
from repro.papers.vision_ttt.theorems import EPS, learn_by_primal_form
from tests.kernels.helpers import find_errors
from tests.models.helpers import read_data

INPUTS, draw = cases.INPUTS, cases.draw

BACKENDS = pytest.mark.parametrize("backend", ["torch", "numba", "reference"])
FASTER = pytest.mark.parametrize("backend", ["torch", "numba"])


def draw_one(tokens, chunk_size, heads=2, batch=2, head_dim=16):
    """The nine arguments of `ttt_linear`, fp64; numba compiles another width of heads for half a minute."""
    sizes = Sizes(batch=batch, tokens=tokens, heads=heads, head_dim=head_dim, chunk_size=chunk_size)
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


@pytest.mark.parametrize("inner", ["ln", "plain"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_it_is_the_primal_form_of_each_image_and_head(chunk, reverse, inner):
    """A state for every token, with gradients by autograd; `tests/papers/vision_ttt` has the theorems."""
    q, k, v, lr, scale, *state = draw_one(21, chunk, head_dim=8)
    given = state if inner == "ln" else state[:1]
    out = ttt_linear_dual(q, k, v, lr, scale, *given, inner=inner, chunk_size=chunk, reverse=reverse, eps=EPS)
    for image, head in itertools.product(range(2), range(2)):
        tokens = [x[image, :, head].flip(0) if reverse else x[image, :, head] for x in (q, k, v, lr)]
        stated = learn_by_primal_form(*tokens, scale, *(x[head] for x in state), chunk, inner)
        assert relative_error(out[image, :, head].flip(0) if reverse else out[image, :, head], stated) < 1e-10


@pytest.mark.parametrize("reverse", [False, True])
def test_inner_gradient_and_loss_are_those_of_the_reconstruction(reverse):
    """The first chunk starts from (W0, b0): there autograd of ½‖LN(Z) − (V − K)‖² gives both, in the input's order."""
    q, k, v, lr, c, W0, b0, weight, bias = draw_one(5, 5, head_dim=8)
    state = W0, b0, weight, bias
    _, inner = ttt_linear_dual(q, k, v, lr, c, *state, chunk_size=5, reverse=reverse, return_inner=True)
    Z = (torch.einsum("bthi,hij->bthj", k, W0) + b0).requires_grad_()
    norm = torch.nn.functional.layer_norm(Z, (8,), eps=1e-6)
    loss = (weight * norm + bias - (v - k)).square().sum(-1) / 2
    (gradient,) = torch.autograd.grad(loss.sum(), Z)
    torch.testing.assert_close(inner.loss, loss)
    torch.testing.assert_close(inner.gradient, gradient)


@FASTER
@pytest.mark.parametrize(("tokens", "chunk_size"), [(81, 1), (600, 16)])
def test_tokens_that_are_alike(tokens, chunk_size, backend):
    """In fp32: the mean of Z, which rounding makes, does not grow from chunk to chunk."""
    sizes = Sizes(batch=1, tokens=tokens, heads=1, chunk_size=chunk_size, alike=True)
    errors = find_errors(cases, [x.float() for x in draw(0, sizes)], sizes, backend)
    assert errors["out"] < 2e-6 and max(errors.values()) < 5e-6, errors


@FASTER
@pytest.mark.parametrize(
    "changed",
    [
        *({"chunk_size": n, "reverse": (back,)} for n, back in ((7, True), (40, False))),
        # segments of unequal lengths, and of a single chunk
        *({"batch": 1, "tokens": 290, "chunk_size": chunk_size} for chunk_size in (1, 150)),
    ],
    ids=str,
)
def test_one_direction_any_chunk_size_and_segments(changed, backend):
    sizes = Sizes(**{"batch": 2, "tokens": 23, "heads": 2, "head_dim": 16} | changed)
    errors = find_errors(cases, draw(0, sizes), sizes, backend)
    assert max(errors.values()) < 1e-9, errors


@BACKENDS
def test_both_directions_are_two_single_calls(backend):
    inputs = draw(0, Sizes(batch=2, tokens=19, heads=2, head_dim=16, chunk_size=4))[:-1]
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
    sizes = Sizes(batch=2, tokens=tokens, heads=3, head_dim=16, chunk_size=chunk_size)
    inputs = [x.requires_grad_() for x in draw(0, sizes)[:-1]]
    forward, both = (count_work(cases, sizes, passes)[1] for passes in (FORWARD, BOTH_PASSES))
    with FlopCounterMode(display=False) as counter:
        out = ttt_linear_bidir(*inputs, chunk_size=chunk_size, backend="reference")
        assert counter.get_total_flops() == forward
        out.sum().backward()
    assert counter.get_total_flops() == both


def attend(q, k, v, lr, c, W0, chunk_size, reverse):
    """out_t = q_t W0 + Σ_s w_ts (q_t·k_s) v_s: the scale of an earlier chunk is its end's, of t's own it is t's."""
    q, k, v, lr = (x.flip(1) if reverse else x for x in (q, k, v, lr))
    token = torch.arange(q.shape[1])
    chunk = token // chunk_size
    weight = torch.where(chunk[:, None] == chunk, c[token % chunk_size][:, None], c[-1]).tril()
    scores = torch.einsum("bthd,bshd->bhts", q, k) * weight * lr.transpose(1, 2).unsqueeze(2)
    out = torch.einsum("bthd,hde->bthe", q, W0) + torch.einsum("bhts,bshd->bthd", scores, v)
    return out.flip(1) if reverse else out


@pytest.mark.parametrize("form", ["recurrent", "parallel"])
@pytest.mark.parametrize("loss", ["mse", "dot"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("T", "chunk_size"), [(1, 1), (5, 16), (33, 4), (40, 8)])
def test_the_plain_learner_is_the_plain_reference_or_a_masked_attention(T, chunk_size, reverse, loss, form):
    """With the squared error, and with the dot product: output and gradients."""
    inputs = [x.requires_grad_() for x in draw_one(T, chunk_size, heads=3, head_dim=6)[:6]]
    how = {"chunk_size": chunk_size, "reverse": reverse}
    stated = ttt_linear_dual(*inputs, inner="plain", **how) if loss == "mse" else attend(*inputs, **how)
    outs, dout = [ttt_linear_plain(*inputs, loss=loss, form=form, **how), stated], torch.randn_like(stated)
    gradients = [torch.autograd.grad(out, inputs, dout, allow_unused=True, materialize_grads=True) for out in outs]
    for found, expected in zip((outs[0], *gradients[0]), (stated, *gradients[1]), strict=True):
        assert relative_error(found, expected, 1.0) < 1e-10


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_maps_are_composed_in_their_order(count):
    maps, shifts, start = (torch.randn(2, n, 3, 3, dtype=torch.float64) for n in (count, count, 1))
    states = [start[:, 0]]
    for place in range(count):
        states.append(maps[:, place] @ states[-1] + shifts[:, place])
    assert relative_error(compose(maps, shifts, start), torch.stack(states, 1)) < 1e-10


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_plain_learner_computes_low_precision_in_fp32(dtype, limit):
    inputs = [x.to(dtype) for x in draw_one(40, 8)[:6]]
    for form in ("recurrent", "parallel"):
        out = ttt_linear_plain(*inputs, chunk_size=8, form=form)
        stated = ttt_linear_plain(*(x.double() for x in inputs), chunk_size=8)
        assert out.dtype == dtype and relative_error(out, stated) < limit


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
