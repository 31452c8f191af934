"""The reference of TTT-Linear against the primal form and autograd."""

import itertools

import pytest
import torch

from kernels.tools.check import relative_error
from kernels.tools.ttt_linear_cases import CASES, Sizes, one_direction
from kernels.ttt_linear.reference import ttt_linear_dual
from repro.papers.vision_ttt.theorems import EPS, learn_by_primal_form

draw = CASES.draw

T = 21


def draw_inputs(batch, tokens, heads, head_dim, chunk_size):
    """The nine arguments of one direction, fp64."""
    sizes = Sizes(batch=batch, tokens=tokens, heads=heads, head_dim=head_dim, chunk_size=chunk_size)
    return one_direction(draw(0, sizes)[:-1])


@pytest.mark.parametrize("inner", ["ln", "plain"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("chunk", [1, 4, T, 30])
def test_it_is_the_primal_form_of_each_image_and_head(chunk, reverse, inner):
    """A state for every token, with gradients by autograd; `tests/papers/vision_ttt` has the theorems."""
    q, k, v, lr, scale, *state = draw_inputs(2, T, 2, 8, chunk)
    given = state if inner == "ln" else state[:1]
    out = ttt_linear_dual(q, k, v, lr, scale, *given, inner=inner, chunk_size=chunk, reverse=reverse, eps=EPS)
    for image, head in itertools.product(range(2), range(2)):
        tokens = [x[image, :, head].flip(0) if reverse else x[image, :, head] for x in (q, k, v, lr)]
        stated = learn_by_primal_form(*tokens, scale, *(x[head] for x in state), chunk, inner)
        assert relative_error(out[image, :, head].flip(0) if reverse else out[image, :, head], stated) < 1e-10


def test_inner_gradient_and_loss_are_those_of_the_reconstruction():
    """The first chunk starts from (W0, b0): there autograd of ½‖LN(Z) − (V − K)‖² gives both."""
    q, k, v, lr, c, W0, b0, weight, bias = draw_inputs(2, 5, 2, 8, 5)
    _, inner = ttt_linear_dual(q, k, v, lr, c, W0, b0, weight, bias, chunk_size=5, return_inner=True)
    Z = (torch.einsum("bthi,hij->bthj", k, W0) + b0).requires_grad_()
    norm = torch.nn.functional.layer_norm(Z, (8,), eps=1e-6)
    loss = (weight * norm + bias - (v - k)).square().sum(-1) / 2
    (gradient,) = torch.autograd.grad(loss.sum(), Z)
    torch.testing.assert_close(inner.loss, loss)
    torch.testing.assert_close(inner.gradient, gradient)


def test_inner_learning_is_in_the_order_of_the_input():
    inputs = draw_inputs(1, 7, 1, 4, 3)
    flipped = [*(x.flip(1) for x in inputs[:4]), *inputs[4:]]
    _, backward = ttt_linear_dual(*inputs, chunk_size=3, reverse=True, return_inner=True)
    _, forward = ttt_linear_dual(*flipped, chunk_size=3, return_inner=True)
    torch.testing.assert_close(backward.gradient, forward.gradient.flip(1))
    torch.testing.assert_close(backward.loss, forward.loss.flip(1))
