"""Losses and accuracies against sums done by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from repro.data.settings import TransformSettings
from repro.tasks.classification.params import MixParams
from repro.tasks.classification.task import Classification, accuracy


class Table(nn.Module):
    """Takes its logits from the first image column, so that a test can write them down."""

    def forward(self, images):
        return images[:, 0, :, 0]


def image_of(*rows):
    return torch.tensor(rows, dtype=torch.float32)[:, None, :, None].repeat(1, 3, 1, 1)


def task(mix):
    as_is = TransformSettings(image_size=8, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))
    return Classification(Table(), [], {"val": []}, batch_size=2, transform=as_is, mix=mix, num_classes=3, device=torch.device("cpu"))


def test_accuracy_counts_every_image_once():
    batches = [(image_of([3, 2, 1, 0, 0, 0], [-1, 0, 1, 2, 3, 4]), torch.tensor([0, 0])), (image_of([9, 8, 7, 6, 5, 4]), torch.tensor([5]))]
    numbers = accuracy(Table(), batches, lambda images: images)
    assert numbers["held_out_images"] == 3
    assert numbers["top1_percent"] == pytest.approx(100 / 3)
    assert numbers["top5_percent"] == pytest.approx(100 / 3)  # the other two targets are ranked last of six
    by_hand = sum(
        math.log(sum(math.exp(v) for v in row)) - row[target]
        for row, target in (([3, 2, 1, 0, 0, 0], 0), ([-1, 0, 1, 2, 3, 4], 0), ([9, 8, 7, 6, 5, 4], 5))
    )
    assert numbers["held_out_loss"] == pytest.approx(by_hand / 3, rel=1e-5)


def test_top5_with_fewer_classes():
    numbers = accuracy(Table(), [(image_of([1, 2, 3]), torch.tensor([0]))], lambda images: images)
    assert (numbers["top1_percent"], numbers["top5_percent"]) == (0, 100)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_label_smoothing_by_hand(smoothing):
    logits, target = [1.0, 2.0, -1.0], 1
    made = task(MixParams(mixup=0, cutmix=0, label_smoothing=smoothing))
    loss = made.loss(made.model, (image_of(logits), torch.tensor([target])))["loss"]
    log_sum = math.log(sum(math.exp(v) for v in logits))
    expected = sum(((1 - smoothing) * (i == target) + smoothing / 3) * (log_sum - v) for i, v in enumerate(logits))
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_mixup_by_hand():
    """lambda from the same NumPy draws; the image pairs with the one from the batch's other end, and so does the target."""
    rows, targets = ([1.0, 2.0, -1.0], [0.5, 0.0, 2.0]), torch.tensor([1, 2])
    np.random.seed(5)
    made = task(MixParams(mixup=0.8, cutmix=0, label_smoothing=0))
    loss = made.loss(made.model, (image_of(*rows), targets))["loss"]
    np.random.seed(5)
    np.random.rand()  # whether to mix
    lam = float(np.float32(np.random.beta(0.8, 0.8)))
    total = 0.0
    for own, other, t_own, t_other in ((rows[0], rows[1], 1, 2), (rows[1], rows[0], 2, 1)):
        mixed = [lam * a + (1 - lam) * b for a, b in zip(own, other, strict=True)]
        log_sum = math.log(sum(math.exp(v) for v in mixed))
        total += lam * (log_sum - mixed[t_own]) + (1 - lam) * (log_sum - mixed[t_other])
    assert float(loss) == pytest.approx(total / 2, rel=1e-5)
