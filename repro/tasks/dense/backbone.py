"""The backbone under a dense head: its four maps, the weights it starts from, and what weights files say of the whole model."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...data.detection import decode_mask
from ...models.checkpoints import Checkpoint, open_weights
from ...models.pyramid import build_pyramid, load_backbone
from .params import DenseParams

EXAMPLES = 4  # pictures of the validation split that are drawn with what was found in them


def build_backbone(params: DenseParams, init: Path | None, where: str, features: Literal["last", "each"]) -> tuple[Any, dict[str, str]]:
    """The pyramid of a cell's backbone with its weights loaded, and what became of every key.

    Raises:
        UserError: a model or weights that do not fit.
    """
    checkpoint = open_weights(init, model=params.model) if init else None
    options = dict(params.options)
    if checkpoint is not None:  # the position embedding is as long as the images of its training were large
        options |= checkpoint.size_option
    drop_path, freeze = params.drop_path, params.freeze_backbone
    try:
        pyramid = build_pyramid(params.model, options=options, features=features, drop_path_rate=drop_path, freeze_backbone=freeze)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    pyramid.set_grad_checkpointing(params.recompute_blocks)
    report = load_backbone(pyramid, checkpoint) if checkpoint else dict.fromkeys(pyramid.state_dict(), "expected: new")
    return pyramid, report


def describe_dense(task: str, pyramid: Any, parts: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """What a weights file says of a dense model: the backbone, the classes, and the parameters from which the rest is built."""
    name, options = pyramid.built_from
    built_with = {key: dataclasses.asdict(part) for key, part in parts.items()}
    described = {"name": name, "options": dict(options), "preprocessing": built_with["transform"], "classes": list(classes)}
    return described | {"task": {"name": task, **built_with}}


def load_dense(checkpoint: Checkpoint, features: Literal["last", "each"], wrap: Callable[[Any], nn.Module]) -> nn.Module:
    """The dense model that a weights file describes, in eval mode; `wrap` puts the head on the pyramid.

    Raises:
        UserError: weights that do not fit. ValueError: an unknown backbone.
    """
    model = wrap(build_pyramid(checkpoint.model, options=checkpoint.options, features=features))
    checkpoint.load_into(model)
    return model.eval()


def read_examples(instances: Any) -> Iterator[tuple[Tensor, int]]:
    """The mask, as large as its image, and the label of every annotated object, for `otsu.OtsuBaseline`."""
    for place in range(len(instances.names)):
        targets = instances.targets(place)
        for target in range(targets.start, targets.stop):
            mask = decode_mask(instances.segmentation(target), *instances.sizes[place].tolist())
            yield torch.from_numpy(mask), int(instances.labels[target])
