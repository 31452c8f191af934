"""Two sets of vectors are told apart as often as theory says, and those of an inner learner are the ones that it gets."""

import math
from types import SimpleNamespace

import pytest
import timm
import torch
from scipy import stats

import repro.models  # noqa: F401
from repro.core.errors import UserError
from repro.core.runtime import Runtime
from repro.inference import distributions
from repro.inference.distributions import observe_vectors, tell_apart


def draw(mean: float, spread: float, seed: int):
    """(2000 images, 5 vectors, 1 head, 3) of a Gaussian whose first coordinate is moved."""
    generator = torch.Generator().manual_seed(seed)
    vectors = spread * torch.randn(2000, 5, 1, 3, generator=generator)
    vectors[..., 0] += mean
    return vectors


@pytest.mark.parametrize("distance", [0.0, 1.0, 3.0])
def test_means_that_are_a_distance_apart_are_told_apart_as_the_best_rule_does(distance):
    """Φ(distance / 2), for two Gaussians of variance 1."""
    found = tell_apart(draw(0.0, 1.0, 0), draw(distance, 1.0, 1))
    assert found == pytest.approx(stats.norm.cdf(distance / 2), abs=0.02)


def test_equal_means_of_other_spread_are_told_apart():
    """The better of the two is where x² passes 2 ln(s) d / (1 − s⁻²): a chi-square of three degrees of freedom."""
    spread, d = 2.0, 3
    below = stats.chi2(d).cdf
    limit = 2 * math.log(spread) * d / (1 - spread**-2)
    expected = (below(limit) + 1 - below(limit / spread**2)) / 2
    assert tell_apart(draw(0.0, 1.0, 0), draw(0.0, spread, 1)) == pytest.approx(expected, abs=0.02)


def test_sets_without_variance_in_a_direction_are_told_apart_on_any_device():
    """A tensor made without a device would be on the default one, which has no values here."""
    sets = draw(0.0, 1.0, 0), draw(9.0, 1.0, 1)
    for vectors in sets:
        vectors[..., 2] = 1.0
    with torch.device("meta"):
        assert tell_apart(*sets) > 0.99


@pytest.mark.parametrize("name", ["vittt_nano_patch16_144", "lact_nano_patch4_32", "ladder_vit3_nano_patch4_32"])
def test_the_vectors_of_every_layer_are_noted_and_nothing_changes(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4).eval().requires_grad_(False)
    side = int(name.rpartition("_")[2])
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        before = model(images)
        with observe_vectors(model) as calls:
            during = model(images)
    torch.testing.assert_close(during, before)
    assert len(calls) == len(model.blocks)
    for call in calls:
        (shape,) = {x.shape for x in call.values()}
        assert shape[0] == 2 and len(shape) == 4
        assert not torch.equal(call["q"], call["k"]) and not torch.equal(call["v"], call["out"])


@pytest.mark.parametrize("images", [1, 2, 3])
def test_too_few_images_to_fit_and_try_both_halves_are_one_line(monkeypatch, images):
    """Of four, each half has two."""
    q = draw(0.0, 1.0, 0)[:4]
    assert 0 <= tell_apart(q[:2], q[2:]) <= 1
    monkeypatch.setattr(distributions, "require_same_classes", lambda *given: None)
    splits, kind = {"val": SimpleNamespace(targets=[0] * images)}, SimpleNamespace(reported_split="val")
    tree = SimpleNamespace(classes=(), splits=splits, kind=kind)
    cell = SimpleNamespace(name="pets", open_tree=lambda: tree)
    with pytest.raises(UserError, match=f"pets has {images} held-out image"):
        distributions.record_distributions(
            SimpleNamespace(checkpoint=None), cell, None, Runtime(device="cpu", data_roots={})
        )
