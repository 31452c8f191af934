"""Average precision: what was read is what is scored, in every form of a file, and COCO's own as pycocotools reads it."""

import codecs
import contextlib
import io
import json

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from repro.core.errors import UserError
from repro.data.coco import read_instances
from repro.data.masks import encode_mask
from repro.tasks.detection.evaluate import coco_metrics, count_confusion
from tests.data_sets.made import annotation, block, compressed, image, polygon, runs, write_coco
from tests.slow import first

SIDE = 200
# image id, category id, corners: of 400, 10,000 and 400 pixels in each image
OBJECTS = [(n, k, *box) for n in (1, 2) for k, *box in [(4, 5, 5, 25, 25), (9, 30, 30, 130, 130), (4, 150, 9, 170, 29)]]
RIGHT = dict.fromkeys(("ap", "ap50", "ap75", "ap_small", "ap_large"), 100.0)


def content():
    rows = [
        annotation(number, image_id, category, [left, top, right - left, low - top])
        for number, (image_id, category, left, top, right, low) in enumerate(OBJECTS, 1)
    ]
    categories = [{"id": 9, "name": "cat"}, {"id": 4, "name": "ant"}]
    return {"images": [image(1, SIDE, SIDE), image(2, SIDE, SIDE)], "annotations": rows, "categories": categories}


def detect(rename_image=int, rename_category=int):
    """Perfect detections, by hand."""
    return [
        {
            "image_id": rename_image(number),
            "category_id": rename_category(category),
            "bbox": [left, top, right - left, low - top],
            "score": 1 - place / 100,
            "segmentation": compressed(block(left, top, right, low, SIDE, SIDE)),
        }
        for place, (number, category, left, top, right, low) in enumerate(OBJECTS)
    ]


def each(**values):
    """Every annotation changed; None removes a key, and a function makes the value of the row."""

    def plant(found):
        for row in found["annotations"]:
            for key, value in values.items():
                row[key] = value(row) if callable(value) else value
                if value is None:
                    del row[key]

    return plant


def more(*args, drop=(), **values):
    """One further annotation, which is no target."""

    def plant(found):
        row = annotation(99, 1, 9, *args, **values)
        found["annotations"].insert(0, {key: value for key, value in row.items() if key not in drop})

    return plant


def mask(row):
    left, top, width, height = row["bbox"]
    return block(left, top, left + width, top + height, SIDE, SIDE)


FAR = [60, 150, 40, 40]  # where nothing is found
FORMS = {
    "neither": each(area=None, iscrowd=None),
    "an area of 0": each(area=0),
    "areas as text": each(area=lambda row: str(row["area"])),
    "negative areas": each(area=-1),
    "iscrowd as text": each(iscrowd="0"),
    "annotations from 0": each(id=lambda row: row["id"] - 1),
    "large annotations": each(id=lambda row: 2**62 + row["id"]),
    "annotations as text": each(id=lambda row: f"{row['id']:05d}"),
    "annotations as floats": each(id=lambda row: float(row["id"])),
    "sizes and areas as floats": lambda found: [
        *(row.update(height=float(SIDE), width=float(SIDE)) for row in found["images"]),
        *(row.update(area=0.0) for row in found["annotations"]),
    ],
    "outlines as runs": each(segmentation=lambda row: runs(mask(row))),
    "outlines as compressed runs": each(segmentation=lambda row: compressed(mask(row))),
    "two corners beside an outline": each(segmentation=lambda row: [[1, 1, 9, 9], *row["segmentation"]]),
    "an empty outline beside one": each(segmentation=lambda row: [[], *row["segmentation"]]),
    "boxes as text": each(bbox=lambda row: [str(side) for side in row["bbox"]]),
    "./ before names": lambda found: [row.update(file_name=f"./{row['file_name']}") for row in found["images"]],
    "a crowd without an outline": more(FAR, iscrowd=1, drop=["segmentation"]),
    "a thin box without an outline": more([60, 150, 0.5, 40], drop=["segmentation", "area"]),
    "a box without area, with an outline": more([60, 150, 0, 40], polygon(60, 150, 90, 180)),
    "a box outside without an outline": more([250, 150, 20, 20], drop=["segmentation"]),
    "corners on a line": more(FAR, [[60, 150, 70, 160, 80, 170, 100, 190]]),
    "runs of nothing": more(FAR, runs(np.zeros((SIDE, SIDE), np.uint8)) | {"counts": [SIDE * SIDE]}),
    "no pixel and no area": more(FAR, [[60.1, 150.1, 60.2, 150.1, 60.1, 150.2]], area=0),
}


def read(root, found, encode=lambda text: text.encode()):
    write_coco(root, found, "val")
    (root / "annotations/instances_val.json").write_bytes(encode(json.dumps(found)))
    return read_instances(root, "val")


def assert_right(instances, results):
    metrics = coco_metrics(instances, results)
    assert metrics == {f"{name}_{kind}_percent": pytest.approx(100) for name in RIGHT for kind in ("box", "mask")}
    assert np.trace(count_confusion(instances, results, 0.5)) == len(results)


@pytest.mark.parametrize("plant", FORMS.values(), ids=FORMS)
def test_perfect_detections_score_100_in_every_form_of_a_file(tmp_path, plant):
    found = content()
    plant(found)
    instances = read(tmp_path, found)
    assert_right(instances, detect())
    assert len(instances.labels) == len(OBJECTS), "all are learned, and nothing else is"


RENAMED = {
    "large images": (lambda number: 2**60 + number, int, int),
    "images as numbers, and in annotations as text": (int, str, int),
    "negative categories": (int, int, lambda number: number - 99),
    "categories as floats": (int, int, float),
    "both as text": (str, str, str),
}


@pytest.mark.parametrize(("of_image", "again", "of_category"), RENAMED.values(), ids=RENAMED)
def test_perfect_detections_score_100_whatever_the_ids(tmp_path, of_image, again, of_category):
    found = content()
    for row in found["images"]:
        row["id"] = of_image(row["id"])
    for row in found["categories"]:
        row["id"] = of_category(row["id"])
    for row in found["annotations"]:
        row["image_id"], row["category_id"] = again(of_image(row["image_id"])), of_category(row["category_id"])
    results = detect(lambda number: int(of_image(number)), lambda number: int(of_category(number)))
    assert_right(read(tmp_path, found), results)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: codecs.BOM_UTF8 + text.replace('"cat"', '"\u00e9\u732b"').encode(),
        lambda text: text.replace(", ", ",\r\n\t").encode("utf-16-le"),
    ],
)
def test_perfect_detections_score_100_however_the_file_was_saved(tmp_path, encode):
    assert_right(read(tmp_path, content(), encode), detect())


def test_boxes_are_masks_when_asked(tmp_path):
    found = content()
    each(segmentation=None, area=None)(found)
    with pytest.raises(UserError, match="boxes:PATH"):
        read(tmp_path, found)
    instances = read_instances(tmp_path, "val", boxes_as_masks=True)
    assert_right(instances, detect())
    masks = [encode_mask(instances.segmentation(row), SIDE, SIDE) for row in instances.rows]
    assert [each["counts"].decode() for each in masks] == [each["segmentation"]["counts"] for each in detect()]


def test_an_object_that_training_leaves_out_as_thin_counts_as_in_coco(tmp_path):
    found = content()
    more([60, 150, 0.9, 40])(found)
    instances = read(tmp_path, found)
    assert instances.left_out == {"boxes thinner than a pixel": 1} and len(instances.labels) == len(OBJECTS)
    assert coco_metrics(instances, detect())["ap_box_percent"] < 100


def test_a_region_that_is_left_out_is_neither_found_nor_missed(tmp_path):
    """A detection in it, with the highest score, is no false one; beside it, it is."""
    found = content()
    more(FAR, iscrowd=1, drop=["segmentation"])(found)
    instances = read(tmp_path, found)
    for left, right in ((70, True), (10, False)):
        one = {"bbox": [left, 160, 10, 10], "segmentation": compressed(block(left, 160, left + 10, 170, SIDE, SIDE))}
        metrics = coco_metrics(instances, [{"image_id": 1, "category_id": 9, "score": 1.0, **one}, *detect()])
        assert (metrics["ap_box_percent"] > 99.9) == (metrics["ap_mask_percent"] > 99.9) == right


def random_coco(rng):
    """Polygons, runs, crowds and thin boxes at fractions of a pixel, and detections some of which find them."""
    rows, results = [], []
    for number in range(1, 61):
        left, top = rng.uniform(0, 130, 2)
        width, height = rng.uniform(0.4, 70, 2)
        corners = np.array(polygon(left, top, left + width, top + height)[0]) + rng.normal(0, 0.4, 8)
        outline = [corners.clip(0, SIDE).tolist(), *([polygon(left, top, left + 9, top + 5)[0]] * (number % 2))]
        of = {"image_id": int(rng.integers(1, 6)), "category_id": int(rng.choice([2, 30, 31]))}
        box = [left, top, width, height]
        crowd = int(number % 9 == 0)
        pixels = block(*np.round([left, top, left + width, top + height]).astype(int), SIDE, SIDE)
        shape = runs(pixels) if crowd else compressed(pixels) if number % 7 == 0 and pixels.any() else outline
        area = float(rng.uniform(1, 4000))
        rows.append({"id": number, **of, "bbox": box, "segmentation": shape, "area": area, "iscrowd": crowd})
        for _ in range(int(rng.integers(0, 3))):
            found = [float(side) for side in np.array(box) + rng.normal(0, 2, 4)]
            corners = np.round([found[0], found[1], found[0] + found[2], found[1] + found[3]]).clip(0, SIDE).astype(int)
            score = float(np.round(rng.uniform(), 1))  # many are equal
            results.append(
                {**of, "bbox": found, "score": score, "segmentation": compressed(block(*corners, SIDE, SIDE))}
            )
    images = [image(number, SIDE, SIDE) for number in (3, 1, 5, 2, 4)]
    categories = [{"id": number, "name": str(number)} for number in (31, 2, 30)]
    return {"images": images, "annotations": rows, "categories": categories}, results


@pytest.mark.parametrize("seed", first(range(3)))
def test_coco_s_own_file_scores_exactly_as_pycocotools_reads_it(tmp_path, seed):
    found, results = random_coco(np.random.default_rng(seed))
    ours = coco_metrics(read(tmp_path, found), results)
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = {}
        for kind, theirs_kind, other in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
            truth = COCO(tmp_path / "annotations/instances_val.json")
            shown = truth.loadRes([{key: row[key] for key in row if key != other} for row in results])
            evaluation = COCOeval(truth, shown, theirs_kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
            theirs |= {f"{name}_{kind}_percent": 100 * value for name, value in zip(names, evaluation.stats)}
    assert ours == {name: value for name, value in theirs.items() if value >= 0} and 5 < ours["ap_mask_percent"] < 60
