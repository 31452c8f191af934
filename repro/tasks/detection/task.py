"""The training task of object detection: Mask R-CNN's losses, and COCO's average precision."""

from typing import Any

from torch import Tensor

from ...training.loop import Task
from ..dense.base import EXAMPLES_MIN_SCORE
from .evaluate import coco_metrics, count_confusion, to_results
from .mask_rcnn import MaskRcnn

Batch = tuple[list[Tensor], list[dict[str, Any]]]
_TRAINED_ON = ("boxes", "labels", "masks")  # the other entries of a target are no tensors


class Detection(Task):
    """Training and evaluation of Mask R-CNN.

    A batch is a list of images, uint8 (3, H, W), and a list of targets: `boxes` (G, 4), `labels` (G,) in 1..C, `masks`
    (G, H, W), `image_id` and `original_size`, the height and width of the picture in the annotation file.

    The data sets of the held-out splits are `repro.data.detection.CocoDetection`. `confusion` is that of the last
    evaluation, on rank 0; see `count_confusion`.
    """

    confusion: list[list[int]] | None = None

    def loss(self, network: MaskRcnn, batch: Batch) -> dict[str, Tensor]:
        """Compute Mask R-CNN's five losses, and their sum `loss`."""
        images, targets = batch
        targets = [
            {name: target[name].to(self.device, non_blocking=True) for name in _TRAINED_ON} for target in targets
        ]
        losses = network(images, targets)
        return {"loss": sum(losses.values()), **losses}

    def evaluate(self, model: MaskRcnn, split: str) -> dict[str, float]:
        """Compute the average precision over the images of all ranks, and their number; see `coco_metrics`."""
        results, images_seen = [], 0
        loader = self.held_out[split]
        truth = loader.dataset.instances
        for images, targets in loader:
            images_seen += len(images)
            found = model.detect(images, [target["original_size"] for target in targets])
            for target, detections in zip(targets, found, strict=True):
                results += to_results(target["image_id"], detections, truth.category_ids)
        everyone = self.ranks.gather(results)
        metrics = {}
        if self.ranks.first:
            results = [result for own in everyone for result in own]
            metrics = coco_metrics(truth, results)
            self.confusion = count_confusion(truth, results, EXAMPLES_MIN_SCORE)
        return self.ranks.from_first(metrics) | {"held_out_images": int(self.ranks.sum([images_seen])[0])}
