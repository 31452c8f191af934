"""Gradient maps and reconstruction losses against autograd on the inner loss, with the state carried along."""

import pytest
import timm
import torch
import torch.nn.functional as F

import repro.models  # noqa: F401
from kernels.ttt_linear.reference import Arguments
from repro.inference import inner
from repro.inference.inner import OverrideTTTLinear, compute_gradient_maps, compute_reconstruction_losses
from tests.slow import first


def nano(**options):
    """A small model whose inner learners are far from their symmetrical start."""
    torch.manual_seed(0)
    options = {"depth": 2, "num_classes": 3, "num_heads": 4, **options}
    model = timm.create_model("vittt_nano_patch16_144", **options).eval()
    with torch.no_grad():
        for block in model.blocks:
            for parameter in (block.mixer.ln_weight, block.mixer.ln_bias, block.mixer.b0):
                parameter.add_(0.2 * torch.randn_like(parameter))
            block.mixer.in_proj.weight.mul_(8)
    return model


def by_autograd(o: Arguments, image: int, r: int, h: int):
    """‖∂ℓ_t/∂W‖_F and ℓ_t for each token of an image, direction and head, by autograd in fp64."""
    k, v, lr = (x.double() for x in (o.k[image, :, r, h], o.v[image, :, r, h], o.lr[image, :, h]))
    W, b, gamma, mu = (x[r, h].double() for x in (o.W0, o.b0, o.ln_weight, o.ln_bias))
    c, order = o.token_scale[r].double(), list(range(len(k)))
    if o.reverse[r]:
        order.reverse()
    norms, losses = torch.zeros(len(k)), torch.zeros(len(k))

    def loss(W, b, k, v):
        return 0.5 * (F.layer_norm(k @ W + b, k.shape, gamma, mu, o.eps) - (v - k)).square().sum()

    slopes = torch.func.vmap(torch.func.grad_and_value(loss, (0, 1)), (None, None, 0, 0))
    for start in range(0, len(order), o.chunk_size):
        chunk = order[start : start + o.chunk_size]
        (dW, db), values = slopes(W, b, k[chunk], v[chunk])
        norms[chunk], losses[chunk] = dW.flatten(1).norm(dim=1).float(), values.float()
        rates = c[len(chunk) - 1] * lr[chunk]
        W, b = W - torch.einsum("t,tij->ij", rates, dW), b - rates @ db
    return norms, losses


@pytest.mark.parametrize(
    "options", first([{}, {"design": "conv1d", "chunk_size": 0}, {"pool": "mid", "w0": "shared", "chunk_size": 4}])
)
def test_maps_and_losses_are_those_of_autograd(options):
    model, images = nano(**options), torch.randn(2, 3, 64, 80)
    calls = []
    with torch.no_grad(), OverrideTTTLinear(lambda arguments, run: calls.append(arguments) or run(arguments)):
        model(images)
    directions, heads = calls[0].q.shape[2:4]
    calls = [(o, image) for o in calls for image in range(2)]
    found = [[[by_autograd(*call, r, h) for h in range(heads)] for r in range(directions)] for call in calls]
    norms = torch.stack([sum(n for of_head in each for n, _ in of_head) for each in found])
    norms = norms.view(2, 2, -1).transpose(0, 1)
    forward = torch.stack([sum(l for _, l in each[0]) / heads for each in found]).view(2, 2, -1)
    patches = [t for t in range(norms.shape[-1]) if t not in model.prefix_positions(20)]
    expected = norms[..., patches].view(2, 2, 4, 5)
    torch.testing.assert_close(compute_gradient_maps(model, images), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compute_reconstruction_losses(model, images), forward.mean(1), rtol=1e-5, atol=1e-5)
    assert norms.max() > 2 * norms.min()  # otherwise a constant map would pass


def test_what_is_seen_are_the_operands_by_their_names_and_the_model_goes_on_unchanged():
    names = [argument.name for argument in torch.ops.vision_ttt.ttt_linear.default._schema.arguments]
    assert tuple(names[: len(Arguments._fields)]) == Arguments._fields
    model, images = nano(), torch.randn(3, 3, 48, 48)
    with torch.no_grad():
        alone = model(images)
        with OverrideTTTLinear(lambda arguments, run: run(arguments)):
            torch.testing.assert_close(model(images), alone)  # a block runs without its loops around the scan
        with OverrideTTTLinear(lambda arguments, run: torch.zeros_like(arguments.q)):
            assert not torch.allclose(model(images), alone)
        assert torch.equal(model(images), alone)


def test_a_model_without_inner_learner_and_directions_that_run_by_themselves_are_refused():
    with pytest.raises(ValueError, match="VisionTransformer has no inner learner"):
        compute_gradient_maps(timm.create_model("deit_nano_patch16_144").eval(), torch.zeros(1, 3, 144, 144))
    with pytest.raises(ValueError, match="learning_rate=per_direction"):
        compute_gradient_maps(nano(reading="learning_rate=per_direction"), torch.randn(1, 3, 48, 48))


def test_the_marked_tokens():
    maps = torch.tensor([[5.0, 1, 2, 3, 9], [4, 8, 7, 6, 0]])
    everywhere = torch.ones(2, 5, dtype=torch.bool)
    assert inner.select_top_tokens(maps, everywhere).nonzero().tolist() == [[0, 4], [1, 1], [1, 2]]
    within = torch.tensor([[True] * 5, [True] + [False] * 4])
    assert inner.select_top_tokens(maps, within).nonzero().tolist() == [[0, 0], [0, 4]]
    assert not inner.select_top_tokens(maps, ~everywhere).any()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"chunk_size": 4}, [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]),
        ({"chunk_size": 4, "design": "gating"}, [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]),
        ({"chunk_size": 4, "pool": "double"}, [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]),
        ({"chunk_size": 0}, [[1] * 5] * 3),
    ],
)
def test_first_chunks_are_counted_from_both_ends_with_class_tokens(options, expected):
    model = nano(**options)
    first = inner.find_first_chunks(model, (3, 5))
    assert first.int().tolist() == expected
    later = inner.mark_tokens(model, torch.rand(1, 2, 3, 5))["later"]
    assert not (later & first).any() and int(later.sum()) == round(0.3 * int((~first).sum()))
