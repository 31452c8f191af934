"""The plain learner of TTT-Linear in both forms: against the reference, and against an attention."""

import pytest
import torch

from kernels.ttt_linear.plain import compose, ttt_linear_plain
from kernels.ttt_linear.reference import ttt_linear_dual


def drawn(T: int, chunk_size: int, D: int = 6) -> list[torch.Tensor]:
    """q, k, v, lr, token_scale, W0 in fp64, all with gradients: two images, three heads."""
    torch.manual_seed(T + chunk_size)
    options = {"dtype": torch.float64}
    q, k, v = (torch.randn(2, T, 3, D, **options) for _ in range(3))
    inputs = [q, k, v, torch.rand(2, T, 3, **options) / D, torch.rand(chunk_size, **options)]
    inputs += [torch.randn(3, D, D, **options)]
    return [x.requires_grad_() for x in inputs]


def close(found: torch.Tensor, stated: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return bool((found - stated).abs().max() <= tolerance * stated.abs().max().clamp_min(1))


def differentiate(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradient of each input."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, inputs, cotangent, allow_unused=True, materialize_grads=True)]


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
@pytest.mark.parametrize(("T", "chunk_size"), [(1, 1), (1, 4), (5, 16), (23, 5), (33, 4), (40, 4), (65, 16), (128, 8)])
def test_the_squared_error_is_the_plain_reference_and_the_dot_product_a_masked_attention(
    T, chunk_size, reverse, loss, form
):
    """Output and gradients."""
    inputs = drawn(T, chunk_size)
    how = {"chunk_size": chunk_size, "reverse": reverse}
    stated = ttt_linear_dual(*inputs, inner="plain", **how) if loss == "mse" else attend(*inputs, **how)
    found = ttt_linear_plain(*inputs, loss=loss, form=form, **how)
    assert all(map(close, differentiate(found, inputs), differentiate(stated, inputs)))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_maps_are_composed_in_their_order(count):
    torch.manual_seed(count)
    maps, shifts, start = (torch.randn(2, n, 3, 3, dtype=torch.float64) for n in (count, count, 1))
    states = [start[:, 0]]
    for place in range(count):
        states.append(maps[:, place] @ states[-1] + shifts[:, place])
    assert close(compose(maps, shifts, start), torch.stack(states, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_computed_in_fp32(dtype):
    inputs = [x.detach().to(dtype) for x in drawn(40, 8)]
    for form in ("recurrent", "parallel"):
        out = ttt_linear_plain(*inputs, chunk_size=8, form=form)
        stated = ttt_linear_plain(*(x.double() for x in inputs), chunk_size=8)
        assert out.dtype == dtype and close(out.double(), stated, 1e-5 if dtype == torch.float32 else 1e-2)
