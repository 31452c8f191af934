"""The training task of image classification: mixup and cutmix, soft-target cross-entropy, top-1 and top-5."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from ...core.ranks import Ranks
from ...data.classification import Batch, ToInput
from ...data.loader import EvalLoader, TrainLoader
from ...training.loop import Task
from .params import ClassifierParams


class Classification(Task):
    """A model from images (B, 3, H, W) to logits (B, num_classes).

    Args:
        params: of which the transform, `mix` and `mesa` are used. A mixed batch must be even; each part of a batch is
            mixed separately.
        num_classes: number of the model's logits.
        model, train, held_out, shared: see `Task`.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainLoader,
        held_out: Mapping[str, EvalLoader],
        *,
        params: ClassifierParams,
        num_classes: int,
        **shared: Any,
    ):
        super().__init__(model, train, held_out, **shared)
        self.params = params
        self.train_input = ToInput(params.transform, self.device, training=True)
        self.eval_input = ToInput(params.transform, self.device)
        self.mixup, mix = None, params.mix
        if mix.mixup or mix.cutmix:
            chances = {"prob": mix.prob, "switch_prob": mix.switch_prob, "label_smoothing": mix.label_smoothing}
            self.mixup = Mixup(mixup_alpha=mix.mixup, cutmix_alpha=mix.cutmix, num_classes=num_classes, **chances)

    def loss(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Compute the cross-entropy with softened targets.

        With a teacher, add MESA's weighted divergence as `loss_mesa`.
        """
        images, targets = self.train_input(batch[0]), batch[1].to(self.device, non_blocking=True)
        smoothing = self.params.mix.label_smoothing
        if self.mixup is not None:
            # the targets become probabilities (B, num_classes), to which Mixup itself applies the label smoothing
            (images, targets), smoothing = self.mixup(images, targets), 0.0
        logits = network(images).float()
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if self.teacher is None:
            return {"loss": loss}
        with torch.no_grad():
            taught = self.teacher(images).float()
        mesa = self.params.mesa
        own, taught = (F.log_softmax(z / mesa.temperature, dim=1) for z in (logits, taught))
        divergence = mesa.weight * F.kl_div(own, taught, reduction="batchmean", log_target=True)
        return {"loss": loss + divergence, "loss_mesa": divergence}

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Compute top-1 and top-5 in percent and the plain cross-entropy over a whole split, on any number of ranks."""
        return accuracy(model, self.held_out[split], self.eval_input, self.ranks)


@torch.inference_mode()
def accuracy(
    model: nn.Module, batches: Iterable[Batch], to_input: Callable[[Tensor], Tensor], ranks: Ranks = Ranks()
) -> dict[str, float]:
    """Compute the accuracy of a model in eval mode.

    Args:
        model: inputs (B, 3, H, W) -> logits (B, num_classes).
        batches: images and integer targets; on several ranks each rank's share.
        to_input: turns images into inputs, see `ToInput`.

    Returns:
        `held_out_loss`, `top1_percent`, `top5_percent` and `held_out_images`, the number of images. With five classes
        or fewer there is no `top5_percent`, which would always be 100.
    """
    loss, top1, top5, images_seen = 0.0, 0, 0, 0  # sums over the images
    for images, targets in batches:
        logits = model(to_input(images)).float()
        targets = targets.to(logits.device)
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        top1 += int(ranked[:, 0].sum())
        top5 += int(ranked.any(dim=1).sum())
        images_seen += len(targets)
    loss, top1, top5, images_seen = ranks.sum([loss, top1, top5, images_seen])
    found = {"held_out_loss": loss / images_seen, "top1_percent": 100 * top1 / images_seen}
    if logits.shape[1] > 5:
        found["top5_percent"] = 100 * top5 / images_seen
    return found | {"held_out_images": int(images_seen)}
