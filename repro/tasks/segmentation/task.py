"""The training task of semantic segmentation: the two heads' losses, and mIoU of sliding-window predictions."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.ranks import Ranks
from ...data.classification import ToInput
from ...data.loader import EvalLoader, TrainLoader
from ...training.loop import Task
from .data import IGNORED, Batch
from .openmmlab import mmengine, mmseg
from .params import SegmentationTransformSettings


class Segmentation(Task):
    """Training of a model of `build_upernet`; held-out images come one at a time.

    `class_iou_percent` has the IoU of each class at the last evaluation, None for a class that occurs in neither labels
    nor predictions; `confusion` counts its pixels, see `score_areas`.

    Args:
        transform: normalisation of the images.
        classes: names of the classes.
        model, train, held_out, shared: see `Task`.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainLoader,
        held_out: Mapping[str, EvalLoader],
        *,
        transform: SegmentationTransformSettings,
        classes: tuple[str, ...],
        **shared: Any,
    ):
        super().__init__(model, train, held_out, **shared)
        self.to_input, self.classes = ToInput(transform, self.device), classes
        self.class_iou_percent: dict[str, float | None] = {}
        self.confusion: list[list[int]] = []

    def loss(self, network: mmseg.models.EncoderDecoder, batch: Batch) -> dict[str, Tensor]:
        """Compute both heads' cross-entropies, the auxiliary one weighted, and their sum.

        `accuracy_percent` is UperNet's pixel accuracy.
        """
        labels = batch[1].to(self.device, non_blocking=True).long()
        samples = [
            mmseg.structures.SegDataSample(gt_sem_seg=mmengine.structures.PixelData(data=label[None]))
            for label in labels
        ]
        found = network(self.to_input(batch[0]), samples, mode="loss")
        decode, aux = found["decode.loss_ce"], found["aux.loss_ce"]
        return {
            "loss": decode + aux,
            "loss_decode": decode,
            "loss_aux": aux,
            "accuracy_percent": found["decode.acc_seg"].squeeze(),
        }

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Split a batch into equal parts.

        Raises:
            UserError: a part would be a single image, and no other process shares its batch norm, as on GPUs: pyramid
                pooling then leaves batch norm one value.
        """
        if len(batch[0]) == parts and (self.ranks.world_size == 1 or self.device.type != "cuda"):
            raise UserError(
                "UperNet's batch norm needs two images in a forward pass; raise runtime.micro_batch or batch_size"
            )
        return super().split(batch, parts)

    def evaluate(self, model: mmseg.models.EncoderDecoder, split: str) -> dict[str, float]:
        """Compute mean IoU, mean accuracy and pixel accuracy in percent over a whole split, on any number of ranks.

        The record takes `confusion` and `class_iou_percent` of the last call, which must be that of the reported split.
        """

        def predict(image: Tensor, size: tuple[int, int]) -> Tensor:
            return label_map(model, self.to_input(image), size)

        metrics, iou, self.confusion = score_areas(predict, self.held_out[split], len(self.classes), self.ranks)
        self.class_iou_percent = dict(zip(self.classes, iou, strict=True))
        return metrics


@torch.inference_mode()
def label_map(model: mmseg.models.EncoderDecoder, inputs: Tensor, size: tuple[int, int]) -> Tensor:
    """Predict the classes (h, w) int64 of an image.

    The logits of sliding windows are averaged, or those of the whole image are taken; they are resized bilinearly to
    `size` before the argmax.

    Args:
        model: of `build_upernet`, in eval mode.
        inputs: one normalised image (1, 3, H, W).
        size: height and width of the result.
    """
    sample = mmseg.structures.SegDataSample(metainfo={"ori_shape": tuple(size), "img_shape": inputs.shape[2:]})
    return model.predict(inputs, [sample])[0].pred_sem_seg.data[0]


def score_areas(
    predict: Callable[[Tensor, tuple[int, int]], Tensor],
    batches: Iterable[Batch],
    num_classes: int,
    ranks: Ranks = Ranks(),
) -> tuple[dict[str, float], list[float | None], list[list[int]]]:
    """Compute mmsegmentation's metrics over all images: IoU and accuracy of a class are quotients of summed areas.

    Args:
        predict: image uint8 (1, 3, H, W) and a size (h, w) -> classes (h, w), integers.
        batches: single images, with label maps (1, h, w) of the size of the prediction; on several ranks each one's
            share.
        num_classes: labels are 0 to num_classes - 1, or `IGNORED`.
        ranks: whose areas are summed.

    Returns:
        `miou_percent`, `macc_percent` (means over the classes that occur), `aacc_percent` (over pixels) and
        `held_out_images`; the IoU of each class in percent, None where it occurs in neither labels nor predictions; and
        the pixel counts (true class, predicted class).
    """
    pixels, images = torch.zeros(num_classes**2, dtype=torch.int64), 0
    for image, (label,) in batches:
        predicted = predict(image, tuple(label.shape)).cpu()
        labelled = label != IGNORED
        pairs = label[labelled].long() * num_classes + predicted[labelled].long()
        pixels += torch.bincount(pairs, minlength=num_classes**2)
        images += 1
    *pixels, images = ranks.sum([*pixels.tolist(), images])
    counts = torch.tensor(pixels, dtype=torch.float64).view(num_classes, num_classes)
    # not by mmsegmentation's intersect_and_union, whose fp32 counters stop at 2^24 pixels
    shared, labelled, predicted = counts.diag(), counts.sum(1), counts.sum(0)
    union = labelled + predicted - shared
    found = mmseg.evaluation.IoUMetric.total_area_to_metrics(shared, union, predicted, labelled)
    means = {"miou_percent": "IoU", "macc_percent": "Acc", "aacc_percent": "aAcc"}
    metrics = {name: 100 * float(np.nanmean(found[key])) for name, key in means.items()}
    iou = [None if np.isnan(value) else 100 * float(value) for value in found["IoU"]]
    return metrics | {"held_out_images": int(images)}, iou, counts.long().tolist()
