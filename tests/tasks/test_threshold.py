"""The baseline without learning, on pictures in which there is nothing to learn."""

import numpy as np
import pytest
import torch

from repro.tasks.dense.otsu import OtsuBaseline, _otsu

# a frame, a cross and a bar
SHAPES = {4: np.pad(np.zeros((4, 4)), 2, constant_values=1)}
SHAPES |= {5: np.maximum(*np.indices((8, 8)) // 3 == 1), 6: np.ones((8, 3))}


def enlarged(label, factor):
    return torch.from_numpy(np.kron(SHAPES[label], np.ones((factor, factor)))).bool()


@pytest.fixture(scope="module")
def baseline():
    pairs = [(label, factor) for label in SHAPES for factor in (2, 5)]
    return OtsuBaseline((torch.nn.functional.pad(enlarged(*pair), (3, 5, 2, 1)), pair[0]) for pair in pairs)


def picture():
    """Bright objects on wide stripes with a little noise, and their pixels by label."""
    generator = torch.Generator().manual_seed(0)
    grey = 60 + 60 * (torch.arange(160) // 20 % 2) + 4 * torch.randn(128, 160, generator=generator)
    labels = torch.zeros(128, 160, dtype=torch.int64)
    for label, factor, y, x, level in ((4, 4, 10, 12, 200), (5, 3, 70, 30, 185), (6, 4, 60, 100, 220)):
        mask = enlarged(label, factor)
        height, width = mask.shape
        labels[y : y + height, x : x + width][mask] = label
        grey[y : y + height, x : x + width][mask] = level
    return grey.clamp(0, 255).byte().expand(3, -1, -1), labels


def test_objects_are_found_and_named(baseline):
    image, labels = picture()
    found = baseline.detect(image)
    assert found["labels"].tolist() == [6, 4, 5]  # by falling brightness
    assert (found["scores"].diff() < 0).all() and found["scores"].min() > 0 and found["scores"].max() <= 1
    for label, box, mask in zip(found["labels"], found["boxes"], found["masks"]):
        y, x = torch.where(labels == label)
        assert (box - torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])).abs().max() <= 1
        assert (mask & (labels == label)).sum() / (mask | (labels == label)).sum() > 0.75
    assert (baseline.label_map(image, 0) == labels).float().mean() > 0.98


def test_an_empty_picture_has_no_objects(baseline):
    image = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    shapes = {name: tuple(value.shape) for name, value in baseline.detect(image).items()}
    assert shapes == {"boxes": (0, 4), "labels": (0,), "scores": (0,), "masks": (0, 64, 64)}
    assert (baseline.label_map(image, 255) == 255).all()


def test_otsu_divides_two_heaps():
    rng = np.random.default_rng(0)
    low, high = rng.normal(10, 2, 900), rng.normal(60, 5, 100)
    threshold = _otsu(np.concatenate([low, high]))
    assert (low < threshold).mean() > 0.99 and (high > threshold).all()
