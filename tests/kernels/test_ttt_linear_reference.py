"""The reference of TTT-Linear against what was written elsewhere: the primal form, the paper's theorems, autograd."""

import pytest
import torch

from kernels.tools.check import relative_error
from kernels.tools.ttt_linear_cases import CASES, Sizes, one_direction
from kernels.ttt_linear.reference import _finish, _prepare, inner_gradient, normalise, ttt_linear_dual

draw = CASES.draw

T = 21


def draw_inputs(batch, tokens, heads, head_dim, chunk_size):
    """The nine arguments of one direction, fp64."""
    return one_direction(
        draw(0, Sizes(batch=batch, tokens=tokens, heads=heads, head_dim=head_dim, chunk_size=chunk_size))[:-1]
    )


def ttt_linear_primal(
    q,
    k,
    v,
    lr,
    token_scale,
    W0,
    b0=None,
    ln_weight=None,
    ln_bias=None,
    *,
    chunk_size,
    reverse=False,
    eps=1e-6,
    inner="ln",
):
    """The primal form: a state for every token, W_j = W − c[j] Σ_{s≤j} lr_s K_sᵀ G_s, with G at the chunk's start state
    W.

    c[j] rescales the whole sum. The sum is therefore what is carried along: W_j is not W_{j−1} minus something.
    """
    Q, K, V, rate, c, W, b, gamma, mu = _prepare(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, reverse)
    outs = []
    for start in range(0, Q.shape[2], chunk_size):
        dW, db = torch.zeros_like(W), torch.zeros_like(W[:, :, :1])
        for j in range(min(chunk_size, Q.shape[2] - start)):
            q_t, k_t, v_t, rate_t = (x[:, :, start + j, None] for x in (Q, K, V, rate))
            if inner == "plain":
                G = k_t @ W - v_t
            else:
                G = inner_gradient(k_t @ W + b, v_t - k_t, gamma, mu, eps)[0]
            dW = dW + k_t.mT @ (rate_t[..., None] * G)
            db = db + rate_t[..., None] * G
            W_j = W - c[j] * dW
            if inner == "plain":
                outs.append(q_t @ W_j)
            else:
                outs.append(q_t + gamma * normalise(q_t @ W_j + (b - c[j] * db), eps)[0] + mu)
        W = W_j
        if inner == "ln":
            b = b - c[j] * db
    return _finish(outs, reverse, q.dtype)


def run(form, inputs, inner, **options):
    if inner == "plain":
        inputs = inputs[:6]
    return form(*inputs, inner=inner, **options)


@pytest.mark.parametrize("inner", ["ln", "plain"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("chunk", [1, 4, T, 30])
def test_primal_equals_dual(chunk, reverse, inner):
    inputs = draw_inputs(2, T, 2, 8, chunk)
    options = {"chunk_size": chunk, "reverse": reverse}
    assert (
        relative_error(run(ttt_linear_dual, inputs, inner, **options), run(ttt_linear_primal, inputs, inner, **options))
        < 1e-10
    )


@pytest.mark.parametrize("form", [ttt_linear_dual, ttt_linear_primal])
def test_theorem_c1_one_chunk_is_causal_linear_attention(form):
    """plain, chunk = T, lr = 1, c = 1, W0 = 0: out_t = Σ_{s≤t} (q_t·k_s) v_s."""
    q, k, v = draw_inputs(2, T, 2, 8, T)[:3]
    out = form(q, k, v, torch.ones(2, T, 2), torch.ones(T), torch.zeros(2, 8, 8), chunk_size=T, inner="plain")
    expected = torch.zeros_like(v)
    for t in range(T):
        for s in range(t + 1):
            expected[:, t] += (q[:, t] * k[:, s]).sum(-1, keepdim=True) * v[:, s]
    assert relative_error(out, expected) < 1e-12


@pytest.mark.parametrize("form", [ttt_linear_dual, ttt_linear_primal])
def test_theorem_c2_one_token_per_chunk_is_the_delta_rule(form):
    """plain, chunk = 1, lr = 1, c = 1: out_t = q_t W_t, W_t = W_{t−1} − k_tᵀ(k_t W_{t−1} − v_t)."""
    q, k, v, _, _, W0 = draw_inputs(2, T, 2, 8, 1)[:6]
    k = torch.nn.functional.normalize(k, dim=-1)  # else the rule with step 1 diverges
    out = form(q, k, v, torch.ones(2, T, 2), torch.ones(1), W0, chunk_size=1, inner="plain")
    W = W0.expand(2, 2, 8, 8)
    for t in range(T):
        miss = torch.einsum("bhi,bhij->bhj", k[:, t], W) - v[:, t]
        W = W - torch.einsum("bhi,bhj->bhij", k[:, t], miss)
        assert relative_error(out[:, t], torch.einsum("bhi,bhij->bhj", q[:, t], W)) < 1e-12


@pytest.mark.parametrize("form", [ttt_linear_dual, ttt_linear_primal])
def test_token_scale_rescales_the_whole_sum(form):
    """D = 1, by hand: W_j = W − c_j Σ_{s≤j} lr_s k_s g_s, in a chunk of three with g_s = k_s W − v_s."""
    k, v, q, lr, c, W = [1.0, 2.0, -1.0], [0.5, -1.0, 3.0], [2.0, 1.0, 4.0], [0.1, 0.2, 0.3], [1.0, 0.5, 0.25], 2.0
    g = [1.5, 5.0, -5.0]
    steps = [0.1 * 1.0 * g[0], 0.2 * 2.0 * g[1], 0.3 * -1.0 * g[2]]
    expected = [q[j] * (W - c[j] * sum(steps[: j + 1])) for j in range(3)]
    column = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1, 1) for x in (q, k, v))
    rates, scale = torch.tensor(lr, dtype=torch.float64).view(1, 3, 1), torch.tensor(c, dtype=torch.float64)
    out = form(*column, rates, scale, torch.full((1, 1, 1), W, dtype=torch.float64), chunk_size=3, inner="plain")
    torch.testing.assert_close(out.flatten(), torch.tensor(expected, dtype=torch.float64))


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


def test_gradients_of_the_dual_form():
    inputs = tuple(x.requires_grad_() for x in draw_inputs(1, 5, 1, 3, 2))
    assert torch.autograd.gradcheck(lambda *x: ttt_linear_dual(*x, chunk_size=2), inputs)
