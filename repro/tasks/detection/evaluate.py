"""COCO's average precision by pycocotools, of boxes and masks, from the annotations that were read and a list of results."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

from ...core.errors import UserError
from ...data.coco import Instances
from ...data.masks import encode_mask

Result = dict[str, Any]
# the first six of the twelve numbers of COCO's summary
_SUMMARY = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
_KINDS = {"box": "bbox", "mask": "segm"}


def to_results(image_id: int, detections: dict[str, Tensor], category_ids: Sequence[int]) -> list[Result]:
    """The detections of one image in COCO's result format; plain types, for JSON.

    Args:
        image_id: of the annotation file.
        detections: `boxes` (K, 4) as (x1, y1, x2, y2), `labels` (K,), `scores` (K,) and `masks` (K, H, W), of the
            picture's size.
        category_ids: the annotation file's id of label 1, 2, ...
    """
    boxes, labels, scores, masks = (detections[name].cpu() for name in ("boxes", "labels", "scores", "masks"))
    corners_sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
    encoded = rle.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy().astype(np.uint8)))
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[label - 1],
            "bbox": box,
            "score": score,
            "segmentation": {"size": list(mask["size"]), "counts": mask["counts"].decode()},
        }
        for box, label, score, mask in zip(
            corners_sides.tolist(), labels.tolist(), scores.tolist(), encoded, strict=True
        )
    ]


def coco_metrics(instances: Instances, results: Sequence[Result]) -> dict[str, float]:
    """Average precision over all images of an annotation file, in percent.

    Args:
        instances: what was read of the file; crowds, and what has no area or mask, are neither found nor missed.
        results: of any of its images, as of `to_results`.

    Returns:
        `ap_box_percent` (IoU 0.50 to 0.95), `ap50_box_percent`, `ap75_box_percent`, `ap_small_box_percent`,
        `ap_medium_box_percent`, `ap_large_box_percent`, and the same with `mask`. What has objects but no detections is
        0; what has no objects is left out.

    Raises:
        UserError: a result of an image or category that the file does not have.
    """
    for name, known in (("image_id", instances.image_ids.tolist()), ("category_id", instances.category_ids)):
        if unknown := {result[name] for result in results} - set(known):
            problem = f"a result has {name} {min(unknown)}, which the file lacks; evaluate on its own images"
            raise UserError(f"{instances.file}: {problem}")
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _open_truth(instances)
        return {name: value for kind in _KINDS for name, value in _average_precision(truth, results, kind).items()}


def count_confusion(instances: Instances, results: Sequence[Result], min_score: float) -> list[list[int]]:
    """How often an object of one category was found as one of another.

    Detections come in the order of their scores; each takes the free object whose box overlaps its own most, by an IoU
    of at least 0.5, whatever the categories. One that finds only a crowd region is left out.

    Args:
        instances, results: as of `coco_metrics`; results below `min_score` are left out.

    Returns:
        A row per category, and one for what is no object; a column per category found, and one for what was missed.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _open_truth(instances)
    place = {category: index for index, category in enumerate(instances.category_ids)}
    nothing, found = len(place), {image_id: [] for image_id in truth.imgs}
    for result in sorted(results, key=lambda result: -result["score"]):
        if result["score"] >= min_score:
            found[result["image_id"]].append(result)
    counts = np.zeros((nothing + 1, nothing + 1), dtype=np.int64)
    for image_id, detections in found.items():
        objects = truth.imgToAnns[image_id]
        crowds = [bool(each["iscrowd"]) for each in objects]
        # (detections, objects); of a crowd region, the share of the detection that lies in it
        overlaps = rle.iou([each["bbox"] for each in detections], [each["bbox"] for each in objects], crowds)
        overlaps = np.asarray(overlaps, dtype=np.float64).reshape(len(detections), len(objects))
        free = ~np.array(crowds, dtype=bool)
        for detection, row in zip(detections, overlaps, strict=True):
            own = np.where(free, row, 0.0)
            column = place[detection["category_id"]]
            if own.max(initial=0.0) >= 0.5:
                taken = int(own.argmax())
                free[taken] = False
                counts[place[objects[taken]["category_id"]], column] += 1
            elif not row[np.array(crowds, dtype=bool)].max(initial=0.0) >= 0.5:
                counts[nothing, column] += 1
        for index in np.flatnonzero(free):
            counts[place[objects[index]["category_id"]], nothing] += 1
    return counts.tolist()


def _open_truth(instances: Instances) -> COCO:
    """The rows that were read, for pycocotools, which takes an object with the id 0 for one that was not found."""
    image_ids, sizes = instances.image_ids.tolist(), instances.sizes.tolist()
    annotations = [
        {
            "id": row + 1,
            "image_id": image_ids[place],
            "category_id": instances.category_ids[label - 1],
            "bbox": box,
            "area": area,
            "iscrowd": int(ignored),
            "segmentation": encode_mask(instances.segmentation(row), *sizes[place]),
        }
        for row, (place, label, box, area, ignored, _) in enumerate(instances.annotations.tolist())
    ]
    truth = COCO()
    truth.dataset = {
        "images": [
            {"id": image_id, "height": height, "width": width}
            for image_id, (height, width) in zip(image_ids, sizes, strict=True)
        ],
        "annotations": annotations,
        "categories": [
            {"id": category_id, "name": name}
            for category_id, name in zip(instances.category_ids, instances.classes, strict=True)
        ],
    }
    truth.createIndex()
    return truth


def _average_precision(truth: COCO, results: Sequence[Result], kind: str) -> dict[str, float]:
    # a mask's own area decides whether it is small, and not that of its box, which COCO takes where there is one
    left_out = "bbox" if kind == "mask" else "segmentation"
    own = [{name: value for name, value in result.items() if name != left_out} for result in results]
    if own:
        found = truth.loadRes(own)
    else:  # loadRes looks at the first result
        found = COCO()
        found.dataset = {**truth.dataset, "annotations": []}
        found.createIndex()
    evaluation = COCOeval(truth, found, _KINDS[kind])
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # COCO says -1 where there is no object
    return {
        f"{name}_{kind}_percent": 100 * float(value) for name, value in zip(_SUMMARY, evaluation.stats) if value >= 0
    }
