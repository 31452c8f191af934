"""COCO's average precision of boxes and masks by pycocotools, from annotations that were read and a list of results."""

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
# first six of the twelve numbers in COCO's summary
_SUMMARY = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
_KINDS = {"box": "bbox", "mask": "segm"}


def to_results(image_id: int, detections: dict[str, Tensor], category_ids: Sequence[int]) -> list[Result]:
    """Convert the detections of one image to COCO's result format, in plain types for JSON.

    Args:
        image_id: id in the annotation file.
        detections: `boxes` (K, 4) as (x1, y1, x2, y2), `labels` (K,), `scores` (K,) and `masks` (K, H, W), of the
            picture's size.
        category_ids: the annotation file's ids of labels 1, 2, ...
    """
    boxes, labels, scores, masks = (detections[name].cpu() for name in ("boxes", "labels", "scores", "masks"))
    corners_sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
    # pycocotools takes (H, W, K) in Fortran's order
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
    """Compute the average precision over all images of an annotation file, in percent.

    Args:
        instances: the annotations; crowds and objects without area or mask are ignored.
        results: detections in its images, as from `to_results`.

    Returns:
        `ap_box_percent` (IoU 0.50 to 0.95), `ap50_box_percent`, `ap75_box_percent`, `ap_small_box_percent`,
        `ap_medium_box_percent`, `ap_large_box_percent`, and the same with `mask`. A size with objects but no detections
        is 0; one without objects is left out.

    Raises:
        UserError: a result names an image or category that the file does not have.
    """
    for name, known in (("image_id", instances.image_ids.tolist()), ("category_id", instances.category_ids)):
        if unknown := {result[name] for result in results} - set(known):
            problem = f"a result has {name} {min(unknown)}, which the file lacks; evaluate on its own images"
            raise UserError(f"{instances.file}: {problem}")
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints each of its steps
        truth = _open_truth(instances)
        return {name: value for kind in _KINDS for name, value in _average_precision(truth, results, kind).items()}


def count_confusion(instances: Instances, results: Sequence[Result], min_score: float) -> list[list[int]]:
    """Count how often an object of one category was found as one of another.

    In descending order of score, each detection takes the free object whose box has the largest IoU with its own, at
    least 0.5, of any category. A detection that overlaps only a crowd is ignored.

    Args:
        instances, results: as for `coco_metrics`.
        min_score: results below it are ignored.

    Returns:
        Counts (C + 1, C + 1): a row per true category, and one for detections without an object; a column per predicted
        category, and one for missed objects.
    """
    columns = {category: column for column, category in enumerate(instances.category_ids)}
    nothing, found = len(columns), {image_id: [] for image_id in instances.image_ids.tolist()}
    for result in sorted(results, key=lambda result: -result["score"]):
        if result["score"] >= min_score:
            found[result["image_id"]].append(result)
    # annotations are sorted by image: those of image n are the rows from starts[n] to starts[n + 1] - 1
    starts = np.searchsorted(instances.annotations["image"], np.arange(len(found) + 1))
    counts = np.zeros((nothing + 1, nothing + 1), dtype=np.int64)
    for detections, start, end in zip(found.values(), starts, starts[1:]):
        objects = instances.annotations[start:end]
        crowds, rows = objects["ignored"], objects["label"] - 1
        # (detections, objects) IoU; for a crowd, the share of the detection inside it
        overlaps = rle.iou([each["bbox"] for each in detections], objects["box"].tolist(), crowds.tolist())
        overlaps = np.asarray(overlaps, dtype=np.float64).reshape(len(detections), len(objects))
        free = ~crowds
        for detection, overlap in zip(detections, overlaps, strict=True):
            own = np.where(free, overlap, 0.0)
            column = columns[detection["category_id"]]
            if own.max(initial=0.0) >= 0.5:
                taken = own.argmax()
                free[taken] = False
                counts[rows[taken], column] += 1
            elif not overlap[crowds].max(initial=0.0) >= 0.5:  # an empty detection has an overlap of NaN
                counts[nothing, column] += 1
        np.add.at(counts[:, nothing], rows[free], 1)
    return counts.tolist()


def _open_truth(instances: Instances) -> COCO:
    """Build pycocotools' ground truth from the annotations that were read."""
    image_ids, sizes = instances.image_ids.tolist(), instances.sizes.tolist()
    annotations = [
        {
            # from 1: pycocotools takes a match with id 0 for no match
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
    """Compute the scores of boxes or masks, in percent; those without an object are left out."""
    # without its box, a result's size class follows from the area of its mask; COCO would take that of the box
    left_out = "bbox" if kind == "mask" else "segmentation"
    own = [{name: value for name, value in result.items() if name != left_out} for result in results]
    if own:
        found = truth.loadRes(own)
    else:  # loadRes fails without a first result
        found = COCO()
        found.dataset = {**truth.dataset, "annotations": []}
        found.createIndex()
    evaluation = COCOeval(truth, found, _KINDS[kind])
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # COCO gives -1 where there is no object
    return {
        f"{name}_{kind}_percent": 100 * float(value) for name, value in zip(_SUMMARY, evaluation.stats) if value >= 0
    }
