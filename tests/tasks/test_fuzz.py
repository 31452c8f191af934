"""What trainings make of damaged data: samples and finite losses, or one line; never another exception."""

import functools
import io
import json
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image

from repro.core.errors import UserError
from repro.data.classification import ImageFolder, eval_transform, train_transform
from repro.data.settings import DetectionTransformSettings, TransformSettings
from repro.data.tree import scan_tree
from repro.tasks.detection.mask_rcnn import MaskRcnn
from tests.data_sets.made import block, compressed, image, picture, runs, write_ade20k, write_coco
from tests.data_sets.test_coco import content, detection
from tests.slow import first
from tests.tasks.backbones import Pyramid
from tests.tasks.test_detection_model import SMALL
from tests.tasks.test_segmentation import make_task, open_pairs

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
BOXES = DetectionTransformSettings(min_size=(40, 56), max_size=64, crop_min_size=(40, 60), crop_size=(8, 40))


def ends_well(work) -> bool:
    """Whether it works; a UserError must be one line, and anything else fails the test."""
    try:
        work()
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


def encode(pixels, form):
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, form)
    return stream.getvalue()


def flip(content, rng):
    """The content with up to three bytes changed, mostly in the header."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        found[rng.randrange(min(len(found), rng.choice([64, len(found)])))] = rng.randrange(256)
    return bytes(found)


@pytest.mark.slow
def test_flipped_bytes_of_pictures(tmp_path, cases=2000):
    """Through the data sets of the three trainings, and their evaluations."""
    rng, pixels = random.Random(0), np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    write_coco(tmp_path / "coco", content())
    write_ade20k(tmp_path / "ade", classes=5, pairs=1, size=(40, 60))
    folder = TransformSettings(image_size=32, auto_augment="rand-m9-mstd0.5-inc1")
    for split in ("train", "val"):
        for name in ("flipped.jpg", "whole.jpg"):
            picture(tmp_path / "pets" / split / "cat" / name, (60, 40))
    tree = scan_tree(tmp_path / "pets", "folder")
    transforms = {"train": train_transform(folder), "val": eval_transform(folder)}
    objects = [detection(tmp_path / "coco", BOXES, training=training) for training in (True, False)]
    pairs = [open_pairs(tmp_path / "ade", training=training) for training in (True, False)]
    files = [tree.path("train", 0), tree.path("val", 0), objects[1].instances.path(1), pairs[0].pairs.paths(0)[0]]
    for case in range(cases):
        flipped = flip(encode(pixels, FORMATS[case % len(FORMATS)]), rng)
        for file in files:
            file.write_bytes(flipped)
        for split, transform in transforms.items():
            pets = ImageFolder(tree, split, transform, max_unreadable=int(split == "train"))
            read = ends_well(lambda: pets.collate([pets[case, 0], pets[case, 1]])[0].shape == (2, 3, 32, 32))
            assert read or (split == "val" and pets.unreadable() == files[1:2])
        for dataset, index in ((objects[0], 0), (objects[1], 1), (pairs[0], 0), (pairs[1], 0)):
            ends_well(lambda: dataset.collate([dataset[case, index]]))


@pytest.mark.parametrize("size", [(1, 2000), (51, 1), (50, 1)])
def test_odd_sizes_of_pictures(tmp_path, size):
    """A thin picture of which scaling leaves no column, and one whose scaling would fill the memory."""
    write_coco(tmp_path / "coco", content() | {"images": [image(12, size[1], size[0])], "annotations": []})
    write_ade20k(tmp_path / "ade", classes=5, pairs=1, size=(40, 60))
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pairs = [open_pairs(tmp_path / "ade", training=training) for training in (True, False)]
    for path, each in zip(pairs[0].pairs.paths(0), (pixels, pixels[..., 0])):
        path.write_bytes(encode(each, "PNG"))
    for dataset in (detection(tmp_path / "coco", BOXES), *pairs):
        assert ends_well(lambda: dataset[0, 0]) == (max(size) <= 50)


ODD = [None, "x", "12", math.nan, math.inf, -1, 0, 0.5, 1e-320, 1e18, 1e300, 2**63, 10**30, True, [], {}, [1], 59.999]


def draw_mask(rng):
    """Polygons of any size in and beyond the picture, RLE that fits or does not, and no mask at all."""
    number = functools.partial(rng.choice, [-399, -1, 0, 1e-30, 0.5, 12, 12.5, 33, 40, 60, 61, 399])
    polygons = [[number() for _ in range(2 * rng.randrange(1, 20))] for _ in range(rng.randrange(1, 4))]
    size = rng.choice([[40, 60], [40, 60], [60, 40], [40], None, "40"])
    counts = rng.choice(["", "0", "abc", "ÿ", [], [2400], [0, 2400], [-1, 2401], None, 5])
    whole = [runs(block(0, 0, 8, 40)), compressed(block(5, 5, 8, 40)), {"size": size, "counts": counts}]
    return rng.choice([polygons, polygons, polygons, *whole, [], [[]], rng.choice(ODD), [[rng.choice(ODD)] * 6]])


def spoil(found, rng):
    """Change an annotation file of COCO at a few places."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        row = rng.choice(found["annotations"])
        key = rng.choice([*["segmentation"] * 2, *["bbox"] * 3, "area", "iscrowd", "category_id", "image_id", "id"])
        if key == "bbox":
            row[key] = [rng.choice([-20, 0, 1e-3, 0.5, 1, 30, 59.999, 60, 1e9]) for _ in range(4)]
            row[key][rng.randrange(4)] = rng.choice([5, 7, 9, *ODD])
        else:
            row[key] = draw_mask(rng) if key == "segmentation" else rng.choice([1, 7, 12, 18, 30, *ODD])
        part = rng.choice(["images", "categories", "annotations", *[None] * 12])
        if part:
            changed = rng.choice(found[part])
            changed[rng.choice(list(changed))] = rng.choice(ODD)


@pytest.mark.parametrize("cases", first([40, 3000]))
def test_odd_annotations(tmp_path, cases):
    """A training step and an evaluation's samples of each: at least some are learnt from, and at least some refused."""
    torch.manual_seed(0)
    model = MaskRcnn(Pyramid(), 3, SMALL).train()
    write_coco(tmp_path, content())
    file = tmp_path / "annotations/instances_train2017.json"

    def step():
        dataset, whole = detection(tmp_path, BOXES, training=True), detection(tmp_path, BOXES)
        assert all(len(whole[0, index][0]) == 3 for index in range(len(whole)))
        losses = model(*dataset.collate([dataset[0, index] for index in range(len(dataset))]))
        assert_finite(model, sum(losses.values()))

    learnt = 0
    for case in range(cases):
        found = content()
        spoil(found, random.Random(case))
        file.write_text(json.dumps(found))
        learnt += ends_well(step)
    assert 0.1 * cases < learnt < 0.9 * cases


def assert_finite(model, loss):
    model.zero_grad()
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("flips", first([20, 300]))
def test_odd_label_maps(tmp_path, flips):
    """A training step and an evaluation with one, also without a label, and with flipped bytes of a good one."""
    root = write_ade20k(tmp_path, classes=5, pairs=2)
    model = make_task(root, held_out="train").model

    def step():
        task = make_task(root, model.train(), held_out="train")
        assert_finite(model, task.loss(model, next(task.batches(0, 0)))["loss"])
        task.evaluate(model.eval(), "val")

    file, rng = root / "annotations/training/ADE_00000001.png", random.Random(0)
    whole, labels = file.read_bytes(), np.array(Image.open(file))
    taken = [encode(each, "PNG") for each in (labels, np.zeros_like(labels), np.full_like(labels, 5))]
    refused = encode(labels > 2, "PNG")  # one bit for each pixel
    for found in [*taken, refused, *(flip(whole, rng) for _ in range(flips))]:
        file.write_bytes(found)
        assert ends_well(step) == (found in taken) or found not in [*taken, refused]
