"""Pairs of an image and a label map; their faults are planted in `test_check.py`."""

import numpy as np
import pytest
from PIL import Image

from repro.core.errors import UserError
from repro.data.ade20k import AdePairs
from tests.tasks.segmentation_lab import write_tree

HEADING = "Idx\tRatio\tTrain\tVal\t\tName\n"


def names(count):
    return HEADING + "".join(f"{i}\t0.1\t100\t10\t\tthing {i}, object {i}\n" for i in range(1, count + 1))


@pytest.fixture
def root(tmp_path):
    """Three pairs and one, and the list of classes as ADEChallengeData2016 has it."""
    for split, pairs in (("training", 3), ("validation", 1)):
        write_tree(tmp_path, classes=150, split=split, pairs=pairs, size=(8, 16))
    (tmp_path / "objectInfo150.txt").write_text(names(150))
    (tmp_path / "images/training/.hidden.jpg").write_text("x")
    (tmp_path / "images/training/notes.txt").write_text("x")
    return tmp_path


def test_pairs_by_hand(root):
    train, val = (AdePairs(root, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (3, 1)
    assert train.classes == tuple(f"thing {i}, object {i}" for i in range(1, 151))
    stem = "ADE_00000001"
    assert train.paths(1) == (root / f"images/training/{stem}.jpg", root / f"annotations/training/{stem}.png")
    assert train.name(1) == f"{stem}.jpg"
    image, labels = train.read(1)
    with Image.open(train.paths(1)[0]) as theirs:
        assert np.array_equal(image, np.asarray(theirs))
    with Image.open(train.paths(1)[1]) as theirs:
        assert np.array_equal(labels, np.asarray(theirs))
    assert image.dtype == labels.dtype == np.uint8


def test_the_folder_around_it_will_do(root, tmp_path_factory):
    outer = tmp_path_factory.mktemp("outer")
    (outer / "ADEChallengeData2016").symlink_to(root)
    assert len(AdePairs(outer, "train")) == 3


def test_images_may_be_grey_small_and_of_any_size(root):
    for part, extension in (("images", "jpg"), ("annotations", "png")):
        Image.new("L", (14, 700), 3).save(root / f"{part}/training/ADE_00000000.{extension}")
    image, labels = AdePairs(root, "train").read(0)
    assert image.shape == (700, 14, 3) and labels.shape == (700, 14) and (labels == 3).all()


def label(root, image):
    image.save(root / "annotations/validation/ADE_00000000.png")


def test_a_label_map_for_fewer_classes(root):
    (root / "objectInfo150.txt").rename(root / "objectInfo13.txt")
    (root / "objectInfo13.txt").write_text(names(13))
    label(root, Image.new("L", (16, 8), 13))
    AdePairs(root, "val").read(0)
    label(root, Image.new("L", (16, 8), 14))
    with pytest.raises(UserError, match="holds label 14, at most 13 expected"):
        AdePairs(root, "val").read(0)


def test_an_image_that_exif_turns_away_from_its_label_map(root):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (16, 8)).save(root / "images/validation/ADE_00000000.jpg", exif=exif)
    with pytest.raises(UserError, match=r"ADE_00000000\.png: is 16×8, its image 8×16"):
        AdePairs(root, "val").read(0)


@pytest.mark.parametrize("text", ["", HEADING, HEADING + "1\twall\n3\tsky\n", "wall\nsky\n"])
def test_a_malformed_list_of_classes(root, text):
    (root / "objectInfo150.txt").write_text(text)
    with pytest.raises(UserError, match=r"objectInfo150\.txt: expected a heading and lines that begin with 1, 2, 3"):
        AdePairs(root, "train")
