"""COCO detection: annotations and samples against counts by hand and against pycocotools."""

import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO

from repro.core.errors import UserError
from repro.data.coco import read_instances
from repro.data.detection import CocoDetection
from repro.data.masks import decode_mask
from repro.data.settings import DetectionTransformSettings
from tests.data_sets.made import HEIGHT, WIDTH, annotation, block, compressed, image, polygon, runs, write_coco

BOXES = [[10, 5, 30, 15], [0, 0, 8, 40], [50, 30, 60, 40]]  # corners of the targets of image 12
CATEGORIES = [{"id": 90, "name": "cat"}, {"id": 7, "name": "ant"}, {"id": 18, "name": "bee"}]  # unordered, with gaps


def content():
    """Image 12 has a target of each form and all sorts of non-targets; 5 nothing; 30 portrait; 31 small; 40 a crowd."""
    return {
        "images": [image(12), image(5), image(30, 36, 50), image(31, 40, 31), image(40)],
        "annotations": [
            annotation(1, 12, 90, [10, 5, 20, 10]),
            annotation(2, 12, 7, [0, 0, 8, 40], runs(block(0, 0, 8, 40))),
            annotation(3, 30, 18, [6, 10, 12, 20], compressed(block(6, 10, 18, 30, 50, 36))),
            annotation(4, 12, 18, [50, 30, 20, 20], compressed(block(50, 30, 60, 40))),  # leaves the image
            annotation(5, 12, 18, [0, 0, 60, 40], runs(block(0, 0, 60, 40)), iscrowd=1),
            annotation(6, 12, 18, [70, 10, 5, 5]),  # outside
            annotation(7, 12, 18, [10, 10, 0, 5]),  # no area
            annotation(8, 12, 18, [10, 10, 0.5, 5]),  # less than a pixel
            annotation(9, 12, 18, [10, 10, 5, 5], [[10, 10, 15, 15, 12, 12]], area=0),  # nor has its mask
            annotation(10, 31, 7, [4, 4, 10, 10]),
            annotation(11, 40, 7, [4, 4, 10, 10], runs(block(4, 4, 14, 14)), iscrowd=1),
        ],
        "categories": [dict(category) for category in CATEGORIES],
    }


@pytest.fixture
def root(tmp_path):
    return write_coco(tmp_path, content())


def same_size(**changes):
    """Sizes that leave a 60 x 40 image as it is."""
    return DetectionTransformSettings(**{"min_size": (40,), "max_size": 60, "hflip": 0.0, **changes})


def detection(root, settings=None, *, training=False, seed=0):
    return CocoDetection(read_instances(root, "train"), settings or same_size(), training=training, seed=seed)


def test_targets_by_hand(root):
    found = read_instances(root, "train")
    assert found.classes == ("ant", "bee", "cat") and found.category_ids == (7, 18, 90)
    assert found.image_ids.tolist() == [5, 12, 30, 31, 40] and np.diff(found.starts).tolist() == [0, 3, 1, 1, 0]
    assert found.sizes.tolist() == [[40, 60], [40, 60], [50, 36], [31, 40], [40, 60]]
    of_12 = found.targets(1)
    assert found.labels[of_12].tolist() == [3, 1, 2]
    assert found.boxes[of_12].tolist() == BOXES
    for row, box in zip(found.rows[of_12], BOXES, strict=True):
        assert np.array_equal(decode_mask(found.segmentation(row), HEIGHT, WIDTH), block(*box))


def test_what_is_left_out_is_counted(root):
    found = read_instances(root, "train")
    assert found.left_out == {
        "crowds": 2,
        "boxes outside of their image": 1,
        "boxes without area": 1,
        "boxes thinner than a pixel": 1,
        "masks without area": 1,
    }
    assert len(found.labels) + sum(found.left_out.values()) == found.num_annotations == len(found.annotations) == 11
    said = found.describe_targets()
    assert all(f"{reason} ({number})" in said for reason, number in found.left_out.items()) and "5 of 11" in said


@pytest.mark.parametrize("missing", [None, [], {}, [[]], [[], []]])
def test_an_object_without_an_outline_is_refused_or_its_box_is_one(tmp_path, missing):
    found = {"images": [image(1)], "categories": CATEGORIES}
    root = write_coco(
        tmp_path, found | {"annotations": [annotation(1, 1, 7, [4, 5, 20, 10]) | {"segmentation": missing}]}
    )
    with pytest.raises(UserError, match="annotation 1 has no segmentation"):
        read_instances(root, "train")
    (row,) = (found := read_instances(root, "train", boxes_as_masks=True)).rows
    assert np.array_equal(decode_mask(found.segmentation(row), HEIGHT, WIDTH), block(4, 5, 24, 15))


def test_masks_agree_with_pycocotools(root):
    coco = COCO(root / "annotations/instances_train2017.json")
    for row in content()["annotations"]:
        size = coco.imgs[row["image_id"]]
        assert np.array_equal(decode_mask(row["segmentation"], size["height"], size["width"]), coco.annToMask(row))
    two = [*polygon(2, 2, 10, 10), *polygon(8, 8, 20, 12), [1, 1, 5, 5]]
    assert np.array_equal(decode_mask(two, HEIGHT, WIDTH), block(2, 2, 10, 10) | block(8, 8, 20, 12))
    assert not decode_mask([[1, 1, 5, 5]], HEIGHT, WIDTH).any()


def test_evaluation_takes_every_image_and_training_the_usable_ones(root):
    evaluation, training = detection(root), detection(root, training=True)
    assert [evaluation[(0, i)][1]["image_id"] for i in range(len(evaluation))] == [5, 12, 30, 31, 40]
    assert [training[(0, i)][1]["image_id"] for i in range(len(training))] == [12, 30]
    assert training.groups.tolist() == [True, False]
    assert [evaluation.name(i) for i in (0, 4)] == ["000000000005.png", "000000000040.png"]
    pixels, target = evaluation[(0, 0)]  # of an image without targets
    assert pixels.shape == (3, 40, 60) and pixels.dtype == torch.uint8
    assert [tuple(target[key].shape) for key in ("boxes", "labels", "masks")] == [(0, 4), (0,), (0, 40, 60)]
    assert [target[key].dtype for key in ("boxes", "labels", "masks")] == [torch.float32, torch.int64, torch.uint8]


@pytest.mark.parametrize(
    ("size", "expected"),
    # 1066.67, 1199.06, and 266.6 where the longest side binds: mmdet rounds
    [((480, 640), (800, 1067)), ((427, 640), (800, 1199)), ((200, 1000), (267, 1333))],
)
def test_sizes_by_hand(tmp_path, size, expected):
    height, width = size
    found = {"images": [image(1, width, height)], "categories": CATEGORIES}
    found["annotations"] = [annotation(1, 1, 7, [8, 16, 100, 120])]
    settings = DetectionTransformSettings(min_size=(400, 800), max_size=1333)
    pixels, target = detection(write_coco(tmp_path, found), settings)[(0, 0)]
    assert tuple(pixels.shape) == (3, *expected) and target["original_size"] == size
    along, down = expected[1] / width, expected[0] / height
    assert target["boxes"][0].tolist() == pytest.approx([8 * along, 16 * down, 108 * along, 136 * down], rel=1e-6)


def test_flips_and_crops_by_hand(root):
    """A resize to a short side of 40, as it is; a crop of 16 to 24 pixels each way; an enlargement."""
    settings = same_size(hflip=0.5, crop_min_size=(40,), crop_size=(16, 24), min_size=(1000,), max_size=1000)
    dataset = detection(root, settings, training=True)
    seen, crops, flips, sides = set(), 0, 0, set()
    for epoch in range(60):
        pixels, target = dataset[(epoch, 0)]
        # the colours of the enlarged image tell which pixels of the file are in it
        height, width = pixels.shape[1:]
        x, y = pixels[0, height // 2].float() / 2, (pixels[1, :, width // 2].float() - 1) / 2
        left, right = sorted((round(x[0].item()), round(x[-1].item())))
        top, bottom = round(y[0].item()), round(y[-1].item())
        flipped, wide, high = bool(x[0] > x[-1]), right - left + 1, bottom - top + 1
        flips += flipped
        if (wide, high) != (60, 40):
            crops += 1
            assert 16 <= wide <= 24 and 16 <= high <= 24
            sides |= {wide, high}
        inside = [block(*box)[top : bottom + 1, left : right + 1] for box in BOXES]
        kept = [place for place, mask in enumerate(inside) if mask.any()]
        assert target["labels"].tolist() == [(3, 1, 2)[place] for place in kept]
        seen.add(tuple(kept))
        for place, box, mask in zip(kept, target["boxes"], target["masks"], strict=True):
            clipped = np.clip(np.subtract(BOXES[place], [left, top, left, top]), 0, [wide, high, wide, high])
            expected = inside[place]
            if flipped:
                clipped[[0, 2]] = wide - clipped[[2, 0]]
                expected = expected[:, ::-1]
            across, down = width / wide, height / high
            assert box.tolist() == pytest.approx((clipped * [across, down, across, down]).tolist(), rel=1e-5, abs=1e-4)
            enlarged = expected[(np.arange(height) * high) // height][:, (np.arange(width) * wide) // width]
            assert (enlarged != mask.numpy()).mean() < 1e-3
    assert 15 < crops < 45 and 15 < flips < 45  # half of them, standard deviation 3.9
    assert len(seen) >= 4 and () in seen and len(sides) >= 8


def test_augmentation_depends_on_seed_epoch_and_index_alone(root):
    settings = same_size(hflip=0.5, crop_min_size=(40, 50), crop_size=(16, 24), min_size=(20, 30, 40))
    torch.manual_seed(3)
    state, drawn = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        dataset = detection(root, settings, training=True, seed=seed)
        drawn.append([dataset[(epoch, 0)][0].sum().item() for epoch in range(8)])
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) > 4
    dataset = detection(root, same_size(min_size=(20, 30, 40)), training=True)
    assert {tuple(dataset[(epoch, 0)][0].shape[1:]) for epoch in range(40)} == {(20, 30), (30, 45), (40, 60)}
    assert torch.equal(torch.get_rng_state(), state)


RUNS = {"size": [50, 36], "counts": [1800, -1, 1]}


@pytest.mark.parametrize(
    ("key", "place", "values", "message"),
    [
        # what `test_check.py` has not
        ("annotations", 2, {"bbox": None}, "annotation 3 is malformed"),
        ("annotations", 2, {"segmentation": polygon(0, 0, 1e9, 9)}, "annotation 3 is malformed"),
        ("annotations", 2, {"segmentation": [["a"] * 6]}, "annotation 3 is malformed"),
        ("annotations", 2, {"segmentation": RUNS}, "annotation 3 is malformed"),
        ("annotations", 1, {"segmentation": runs(block(0, 0, 8, 40, 50, 50))}, "annotation 2 is malformed"),
        ("annotations", 2, {"image_id": []}, "annotation 3 is malformed"),
        ("images", 2, {"height": float("inf")}, "Infinity"),
        ("images", 1, {"height": None}, r"images\[1\] is malformed, it needs id, file_name, height, width"),
        ("images", 1, {"height": "40"}, r"images\[1\] is malformed"),
        ("images", 1, {"width": -3}, r"images\[1\] is malformed"),
        ("images", 1, {"width": 60.5}, r"images\[1\] is malformed.*60\.5"),
        ("annotations", 2, {"area": "large"}, "annotation 3 is malformed"),
        ("annotations", 2, {"iscrowd": "no"}, "annotation 3 is malformed"),
        ("annotations", 2, {"segmentation": [1, 2, 3, 4, 5, 6]}, "annotation 3 is malformed"),
        ("annotations", 2, {"id": "a1"}, "'a1'"),
        ("images", 1, {"id": 1.5}, "1.5"),
        ("images", 1, {"id": True}, "True"),
        ("images", 1, {"id": 10**30}, r"images\[1\] is malformed"),
        ("categories", 1, {"name": 7}, r"categories\[1\] is malformed"),
        ("categories", 1, {"name": "cat"}, "2 categories 'cat'"),
    ],
)
def test_bad_annotations_are_refused_by_name(root, key, place, values, message):
    found = content()
    found[key][place] |= values
    (root / "annotations/instances_train2017.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=rf"instances_train2017\.json: .*{message}") as caught:
        read_instances(root, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["Screenshot\u202fAM.png", "e\u0301.png", "\U0001f408.png", "a\tb.png", "a'b\"c.png"], ids=ascii
)
def test_a_file_may_have_any_name_of_one_line(tmp_path, name):
    found = {"images": [image(1) | {"file_name": name}], "annotations": [], "categories": CATEGORIES}
    root = write_coco(tmp_path, found)
    assert read_instances(root, "train").path(0) == root / "train2017" / name
    assert detection(root)[(0, 0)][0].shape == (3, 40, 60)


@pytest.mark.parametrize(
    "name", ["", "a\nb.png", "a\x00.png", "\u2028.png", "\ud800.png", "a.png\n", None, 7], ids=ascii
)
def test_a_name_that_no_line_can_hold_is_refused_with_its_value(root, name):
    found = content()
    found["images"][1]["file_name"] = name
    (root / "annotations/instances_train2017.json").write_text(json.dumps(found))
    with pytest.raises(UserError) as caught:
        read_instances(root, "train")
    said = str(caught.value)
    assert "images[1]" in said and repr(name) in said and "\n" not in said and said.isprintable()


@pytest.mark.parametrize(
    ("split", "name", "word"),
    [
        ("train", "images/a.png", "without folders"),
        ("train", "images\\a.png", "without folders"),
        ("train", "A.png", "'a.png' is there"),
        ("train", "b.png", "instances_train.json"),
        ("train", "e\u0301.png", "Unicode"),
        ("train2017", "b.png", "train2017.zip"),
    ],
)
def test_a_picture_that_is_not_there_is_a_line_that_fits(tmp_path, split, name, word):
    found = {"images": [image(1) | {"file_name": "a.png"}, image(2) | {"file_name": "\u00e9.png"}]}
    found |= {"annotations": [], "categories": CATEGORIES}
    root = write_coco(tmp_path, found, split)
    found["images"][0]["file_name"] = name
    (root / f"annotations/instances_{split}.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="no such file") as caught:
        read_instances(root, "train")
    assert word in str(caught.value) and (".zip" in str(caught.value)) == (split == "train2017")


def test_no_annotations_can_be_evaluated_and_not_learnt(tmp_path):
    write_coco(tmp_path, {**content(), "annotations": []})
    assert len(detection(tmp_path)) == 5
    with pytest.raises(UserError, match=r"instances_train2017\.json: none of its 5 images has an instance"):
        detection(tmp_path, training=True)


@pytest.mark.parametrize(
    "changes", [{"min_size": ()}, {"min_size": (900,), "max_size": 800}, {"crop_size": (300,)}, {"crop_size": (5, 4)}]
)
def test_impossible_settings(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        DetectionTransformSettings(**changes)
