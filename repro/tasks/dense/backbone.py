"""The backbone under a dense head: its four maps, the weights it starts from, and what weights files say of the whole model."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.errors import UserError
from ...data.detection import decode_mask
from ...models.adapter import build_adapter
from ...models.transfer import load_backbone
from ...models.weights import is_official, load_weights, read_metadata
from .params import DenseParams

EXAMPLES = 4  # pictures of the validation split that are drawn with what was found in them


def build_backbone(params: DenseParams, init: Path | None, where: str, features: Literal["last", "each"]) -> tuple[Any, dict[str, str]]:
    """The adapter around a cell's backbone with its weights loaded, and what became of every key.

    Raises:
        UserError: a model or weights that do not fit.
    """
    options = dict(params.options)
    if init is not None and not is_official(init):  # positions are as long as the training's images were large
        options |= {k: v for k, v in read_metadata(init).get("options", {}).items() if k == "img_size"}
    try:
        adapter = build_adapter(
            params.model, options=options, features=features, drop_path_rate=params.drop_path, freeze_backbone=params.freeze_backbone
        )
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    adapter.set_grad_checkpointing(params.recompute_blocks)
    report = load_backbone(adapter, init) if init else dict.fromkeys(adapter.state_dict(), "expected: new")
    return adapter, report


def describe_dense(task: str, adapter: Any, parts: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """What a weights file says of a dense model: the backbone, the classes, and the parameters from which the rest is built."""
    name, options = adapter.built_from
    built_with = {key: dataclasses.asdict(part) for key, part in parts.items()}
    described = {"name": name, "options": dict(options), "preprocessing": built_with["transform"], "classes": list(classes)}
    return described | {"task": {"name": task, **built_with}}


def load_dense(checkpoint: Any, features: Literal["last", "each"], wrap: Any) -> Any:
    """The dense model that a weights file describes, in eval mode; `wrap` puts the head around the backbone.

    Raises:
        UserError: weights that do not fit. ValueError: an unknown backbone.
    """
    model = wrap(build_adapter(checkpoint.model, options=checkpoint.options, features=features))
    load_weights(checkpoint.path, model, name=checkpoint.model)
    return model.eval()


def read_examples(instances: Any) -> Iterator[tuple[Tensor, int]]:
    """The mask, as large as its image, and the label of every annotated object, for `otsu.OtsuBaseline`."""
    for place in range(len(instances.names)):
        targets = instances.targets(place)
        for target in range(targets.start, targets.stop):
            mask = decode_mask(instances.segmentation(target), *instances.sizes[place].tolist())
            yield torch.from_numpy(mask), int(instances.labels[target])
