"""Object detection as a task of the engine: Mask R-CNN's losses, and COCO's average precision."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.ranks import Ranks
from ...data.loader import EvalLoader, TrainLoader
from .evaluate import coco_metrics, to_results
from .mask_rcnn import MaskRcnn

Batch = tuple[list[Tensor], list[dict[str, Any]]]
_TRAINED_ON = ("boxes", "labels", "masks")


class Detection:
    """The engine's task: see `repro.training.loop.Task`.

    A batch is a list of images, uint8 (3, H, W), and a list of targets: `boxes` (G, 4), `labels` (G,) in 1..C, `masks` (G, H, W),
    `image_id` and `original_size`, the height and width of the picture in the annotation file.

    Args:
        model: the detector.
        train: the training batches of this rank.
        val: the validation batches of this rank, every image once.
        batch_size: images per step, over all ranks together.
        annotations: COCO's file of the validation images.
        category_ids: that file's id of label 1, 2, ...
        device: the device of the model.
        ranks: the processes that train together.
    """

    def __init__(
        self,
        model: MaskRcnn,
        train: TrainLoader,
        val: EvalLoader,
        *,
        batch_size: int,
        annotations: Path,
        category_ids: Sequence[int],
        device: torch.device,
        ranks: Ranks = Ranks(),
    ):
        self.model = model
        self.train, self.val, self.device, self.ranks = train, val, device, ranks
        self.batch_size, self.steps_per_epoch = batch_size, len(train)
        self.annotations, self.category_ids = annotations, category_ids

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on."""
        return self.train.batches(epoch, start)

    def loss(self, network: MaskRcnn, batch: Batch) -> dict[str, Tensor]:
        """The sum of Mask R-CNN's five losses, and each of them."""
        images, targets = batch
        targets = [{name: target[name].to(self.device, non_blocking=True) for name in _TRAINED_ON} for target in targets]
        losses = network(images, targets)
        return {"loss": sum(losses.values()), **losses}

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """A batch in equal parts."""
        images, targets = batch
        size = len(images) // parts
        return [(images[start : start + size], targets[start : start + size]) for start in range(0, size * parts, size)]

    def evaluate(self, model: MaskRcnn) -> dict[str, float]:
        """Average precision over the validation images of all ranks, and their number; sizes without objects are left out."""
        results, images_seen = [], 0
        for images, targets in self.val:
            images_seen += len(images)
            found = model.detect(images, [target["original_size"] for target in targets])
            for target, detections in zip(targets, found, strict=True):
                results += to_results(target["image_id"], detections, self.category_ids)
        everyone = self.ranks.gather(results)
        metrics = coco_metrics(self.annotations, [result for own in everyone for result in own]) if self.ranks.first else {}
        known = {name: value for name, value in self.ranks.from_first(metrics).items() if value is not None}
        return known | {"val_images": int(self.ranks.sum([images_seen])[0])}

    def describe(self, epoch: int, number: int) -> list[str]:
        """The files of this rank's batch."""
        return self.train.files(epoch, number)

    def inspect(self, batch: Batch) -> dict[str, Any]:
        """The size of each image, and its boxes as the model got them."""
        pairs = zip(*batch, strict=True)
        return {"images": [{"image_id": t["image_id"], "size": list(image.shape[1:]), "boxes": t["boxes"].tolist()} for image, t in pairs]}
