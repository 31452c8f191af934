"""connect: counts and labels that scipy finds in the pixels, and models that look for a shortcut."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import binary_dilation, binary_erosion, center_of_mass, label
from sklearn.linear_model import RidgeClassifier
from torch import nn

from repro.core.config import load_section
from repro.core.errors import UserError
from repro.data.classification import ImageFolder, eval_transform
from repro.data.embedded.connect import draw_pair, write_connect
from repro.data.kinds import PrepareData
from repro.data.loader import EvalLoader, TrainLoader
from repro.data.prepare import scan_manifest
from repro.data.settings import ConnectSettings, TransformSettings
from tests.conftest import ROOT
from tests.data_sets.conftest import make_cell

KEPT = load_section(PrepareData, ROOT / "params.yaml", "prepare_data", "connect").curves
HARD = load_section(PrepareData, ROOT / "profiles/paper.yaml", "prepare_data", "connect_hard").curves
SMALL = {"image_size": 96, "train_pairs": 6, "tune_pairs": 2, "test_pairs": 4, "dashes": (1, 2)}
PLAIN = TransformSettings(image_size=96, crop_pct=1.0)


def pairs(settings: ConnectSettings, split: str, number: int) -> np.ndarray:
    """(number, 2, S, S): the first pairs of a split; images of `apart` first."""
    place = ("train", "tune", "test").index(split)
    rngs = (np.random.Generator(np.random.PCG64((settings.seed, place, i))) for i in range(number))
    return np.stack([draw_pair(rng, settings) for rng in rngs])


def disc(radius: float) -> np.ndarray:
    reach = np.arange(-int(radius), int(radius) + 1)
    return np.hypot(reach, reach[:, None]) <= radius


def seen(image: np.ndarray, settings: ConnectSettings) -> tuple[int, int, np.ndarray, bool]:
    """Number of dashes and of curves, the centres of the markers (2, 2), and whether one curve has both markers."""
    ink = image > 127
    _, dashes = label(ink, np.ones((3, 3)))
    blobs, markers = label(binary_erosion(ink, disc(settings.thickness_px / 2 + 1)))
    assert markers == 2
    middles = np.array(center_of_mass(ink, blobs, (1, 2)))
    y, x = np.indices(ink.shape)
    away = [np.hypot(y - middle[0], x - middle[1]) for middle in middles]
    strokes = ink & (np.minimum(*away) > settings.marker_px / 2 + 1)
    # this closes the gaps between dashes, but not those between curves
    curves, number = label(binary_dilation(strokes, disc((settings.gap_px - settings.thickness_px + 2) / 2)))
    first, second = (curves.ravel()[np.where(curves, distance, np.inf).argmin()] for distance in away)
    return dashes, number, middles, bool(first == second)


@pytest.mark.parametrize(
    ("settings", "number"), [(KEPT, 60), (HARD, 8), (ConnectSettings(**SMALL), 60)], ids=["kept", "hard", "small"]
)
def test_both_classes_have_the_same_of_everything_but_the_connection(settings, number):
    arms = set()
    for pair in pairs(settings, "train", number):
        (dashes, curves, middles, one), (*joined, one_joined) = (seen(image, settings) for image in pair)
        assert (one, one_joined) == (False, True)
        assert (dashes, curves) == tuple(joined[:2]) and curves == 2 + 2 * settings.distractors
        assert np.array_equal(middles, joined[2])
        ink, ink_joined = (np.bincount(image.ravel(), minlength=256) for image in pair)
        assert np.array_equal(ink, ink_joined)
        arms.add(dashes)
    if not settings.distractors:  # four arms and two bends
        assert arms == {4 * length + 2 for length in range(settings.dashes[0], settings.dashes[1] + 1)}


def test_images_differ_and_nothing_is_cut_off():
    images = np.concatenate([pairs(KEPT, split, 100) for split in ("train", "tune", "test")]).reshape(600, -1)
    assert len({image.tobytes() for image in images}) == 600, "the splits are disjoint"
    framed = images.reshape(600, KEPT.image_size, -1)
    assert framed[:, [0, -1]].max() == framed[:, :, [0, -1]].max() == 0


def linear_percent(train: np.ndarray, held_out: np.ndarray) -> float:
    """Held-out accuracy of a linear model on pixels."""
    inputs = [split.reshape(2 * len(split), -1) / np.float32(255) for split in (train, held_out)]
    model = RidgeClassifier(alpha=10).fit(inputs[0], np.arange(len(inputs[0])) % 2)
    return 100 * model.score(inputs[1], np.arange(len(inputs[1])) % 2)


def local_percent(train: np.ndarray, held_out: np.ndarray) -> float:
    """Held-out accuracy of a convolutional net that sees windows of 17 pixels, wherever they lie."""
    torch.manual_seed(0)
    layers = []
    for layer in (nn.Conv2d(1, 8, 5, 2), nn.Conv2d(8, 16, 3, 2), nn.Conv2d(16, 32, 3)):
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))
    images, unseen = (torch.from_numpy(split).flatten(0, 1)[:, None].float() / 255 for split in (train, held_out))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for batch in torch.cat([torch.randperm(len(images)) for _ in range(6)]).split(50):
        loss = nn.functional.cross_entropy(model(images[batch]), batch % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in unseen.split(500)])
    return 100 * float((found == torch.arange(len(found)) % 2).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("percent", [linear_percent, local_percent])
def test_no_shortcut(percent):
    """4,000 held-out images: at chance the accuracy has a standard error of 0.8 points, a quarter of the margin."""
    train, held_out = pairs(KEPT, "train", 1000), pairs(KEPT, "test", 2000)
    assert abs(percent(train, held_out) - 50) < 3
    dim = np.array([1, 0.85])[:, None, None]  # a planted shortcut, which must be found
    assert percent((train * dim).astype(np.uint8), (held_out * dim).astype(np.uint8)) > 90


def test_curves_are_longer_than_the_window_of_the_local_model():
    for settings in (KEPT, HARD):
        dashes = 2 * settings.dashes[0] + 1
        assert dashes * (settings.dash_px + settings.gap_px) - settings.gap_px > 2 * 17


def test_training_has_both_images_of_a_pair_in_one_batch(tmp_path):
    settings = ConnectSettings(**SMALL)
    write_connect(tmp_path, settings)
    cell = make_cell(tmp_path, scan_manifest(tmp_path, "connect", settings))
    tree = cell.open_tree()
    assert tree.classes == ("apart", "joined")
    images, targets = next(iter(EvalLoader(ImageFolder(tree, "test", eval_transform(PLAIN)), batch_size=8)))
    drawn = pairs(settings, "test", 4)
    assert targets.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(images.numpy(), np.broadcast_to(drawn.swapaxes(0, 1).reshape(8, 1, 96, 96), (8, 3, 96, 96)))
    train = ImageFolder(tree, "train", eval_transform(PLAIN))
    loader = TrainLoader(train, batch_size=4, seed=0, groups=cell.groups(tree))
    files = [Path(name) for number in range(3) for name in loader.files(0, number)]
    for a, b in zip(files[::2], files[1::2], strict=True):
        assert a.name == b.name and {a.parent.name, b.parent.name} == {"apart", "joined"}
    assert len(set(files)) == 12


@pytest.mark.parametrize("changes", [{"dashes": (7, 7)}, {"distractors": 9}])
def test_curves_that_do_not_fit(changes, tmp_path):
    with pytest.raises(UserError, match=r"do not fit into 96 pixels after 40 attempts; take fewer distractors"):
        write_connect(tmp_path / "connect", ConnectSettings(**SMALL | changes))
    assert not os.listdir(tmp_path)
