"""Losses and accuracies against sums done by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import log_softmax, rel_entr, softmax
from torch import nn

from repro.core.config import build
from repro.core.errors import UserError
from repro.data.settings import TransformSettings
from repro.tasks.classification.params import ClassifierParams, MesaParams, MixParams
from repro.tasks.classification.task import Classification, accuracy


class Table(nn.Module):
    """Takes its logits from the first image column, so that a test can write them down."""

    def forward(self, images):
        return images[:, 0, :, 0]


def image_of(rows):
    return torch.as_tensor(rows, dtype=torch.float32)[:, None, :, None].repeat(1, 3, 1, 1)


def task(mix, mesa=None):
    as_is = TransformSettings(image_size=8, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))
    params = SimpleNamespace(transform=as_is, mix=mix, mesa=mesa)
    shared = {"batch_size": 2, "num_classes": 3, "device": torch.device("cpu")}
    return Classification(Table(), [], {"val": []}, params=params, **shared)


def test_accuracy_counts_every_image_once():
    rows = np.array([[3, 2, 1, 0, 0, 0], [-1, 0, 1, 2, 3, 4], [9, 8, 7, 6, 5, 4]])
    targets = torch.tensor([0, 0, 5])
    batches = [(image_of(rows[part]), targets[part]) for part in (slice(2), slice(2, 3))]
    numbers = accuracy(Table(), batches, lambda images: images)
    assert numbers["held_out_images"] == 3
    assert numbers["top1_percent"] == pytest.approx(100 / 3)
    assert numbers["top5_percent"] == pytest.approx(100 / 3)  # the other two targets are ranked last of six
    by_hand = -log_softmax(rows, axis=1)[range(3), targets]
    assert numbers["held_out_loss"] == pytest.approx(by_hand.mean(), rel=1e-5)
    few = accuracy(Table(), [(image_of([[1, 2, 3]]), torch.tensor([0]))], lambda images: images)
    assert few["top1_percent"] == 0 and "top5_percent" not in few  # of five classes or fewer


ROWS, TARGETS = np.array([[1.0, 2.0, -1.0], [0.5, 0.0, 2.0]]), np.array([1, 2])


def seeded_loss(made):
    np.random.seed(5)
    return made.loss(made.model, (image_of(ROWS), torch.from_numpy(TARGETS)))


def mixed(values):
    """Each of two with the other, by the lambda that `seeded_loss` draws from NumPy."""
    np.random.seed(5)
    np.random.rand()  # whether to mix
    lam = float(np.float32(np.random.beta(0.8, 0.8)))
    return lam * values + (1 - lam) * values[::-1]


@pytest.mark.parametrize(("mixup", "smoothing"), [(0.0, 0.0), (0.0, 0.3), (0.8, 0.3)])
def test_softened_targets_by_hand(mixup, smoothing):
    """Mixup mixes the targets as the images."""
    loss = seeded_loss(task(MixParams(mixup=mixup, cutmix=0, label_smoothing=smoothing)))["loss"]
    softened = (1 - smoothing) * np.eye(3)[TARGETS] + smoothing / 3
    rows, softened = (mixed(ROWS), mixed(softened)) if mixup else (ROWS, softened)
    assert float(loss) == pytest.approx(-(softened * log_softmax(rows, axis=1)).sum() / 2, rel=1e-5)


def teach(images):
    """Give other logits than the pupil, without learning from its loss."""
    assert not torch.is_grad_enabled()
    return Table()(images) * torch.tensor([-1.0, 0.5, 2.0])


@pytest.mark.parametrize(("mixup", "temperature"), [(0.0, 1.0), (0.8, 3.0)])
def test_mesa_by_hand(mixup, temperature):
    """loss + weight · KL(softmax(z'/T) || softmax(z/T)), averaged over the images, z' and z of the same mixed images."""
    mix = MixParams(mixup=mixup, cutmix=0, label_smoothing=0.1)
    plain = seeded_loss(task(mix))
    made = task(mix, MesaParams(weight=1.5, temperature=temperature))
    before = seeded_loss(made)
    assert plain.keys() == before.keys() == {"loss"} and torch.equal(plain["loss"], before["loss"])  # no teacher yet
    made.teacher = teach
    found = seeded_loss(made)
    pupil = mixed(ROWS) if mixup else ROWS
    teacher = pupil * [-1.0, 0.5, 2.0]
    divergence = rel_entr(softmax(teacher / temperature, axis=1), softmax(pupil / temperature, axis=1)).sum()
    assert found.keys() == {"loss", "loss_mesa"}
    assert float(found["loss_mesa"]) == pytest.approx(1.5 * divergence / 2, rel=1e-5)
    assert float(found["loss"]) == pytest.approx(float(plain["loss"]) + 1.5 * divergence / 2, rel=1e-5)


def test_the_gradient_of_mesa_is_that_of_the_cross_entropy_with_the_teachers_answer():
    logits, taught = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    made = task(MixParams(mixup=0, cutmix=0, label_smoothing=0), MesaParams(weight=2.0))
    made.teacher = lambda images: taught
    loss = made.loss(lambda images: logits, (torch.zeros(4, 3, 3, 3), torch.tensor([0, 1, 2, 0])))["loss_mesa"]
    (found,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(2 * F.cross_entropy(logits, taught.softmax(1)), logits)
    torch.testing.assert_close(found, expected)


CELL = {"model": "", "data": "", "epochs": 8, "batch_size": 2, "drop_path": 0.0, "ema_decay": 0.9}
CELL |= {"optim": {"lr": 0.1}, "mix": {}, "transform": {"image_size": 8}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesa": {"weight": 0.0}}, "cell.mesa.weight: .*> 0, got float 0.0"),
        ({"mesa": {"weight": 1.0, "temperature": 0.0}}, "cell.mesa.temperature: .*> 0, got float 0.0"),
        ({"mesa": {"weight": 1.0, "start_fraction": 1.5}}, "cell.mesa.start_fraction: .* 1, got float 1.5"),
        ({"mesa": {"weight": 1.0}, "ema_decay": None}, "cell.mesa: .* set ema_decay"),
    ],
)
def test_mesa_that_means_nothing_is_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        build(ClassifierParams, CELL | changes, "cell")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("mesa", "start"), [(None, None), ({"weight": 1.0}, 0.25)])
def test_where_mesa_starts(mesa, start):
    assert build(ClassifierParams, CELL | {"mesa": mesa}, "cell").teacher_from == start
