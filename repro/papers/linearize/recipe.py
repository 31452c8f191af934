"""How a softmax model is linearized, and where that departs from the paper's release.

The text at hand has no recipe for ImageNet-1K; these are the values of the release of its authors (LeapLabTHU/Transformer-to-TTT, T5).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..recipe import format_value, lines, resolve

BATCH = 2048
TRAIN_IMAGES = 1_281_167
RELEASED: dict[str, float | str | None] = {
    "epochs": 30,
    "batch_size": BATCH,
    "drop_path": 0.0,
    "optim.lr": 8e-5,  # 2e-5 for each 512 images; the next two do not grow with the batch
    "optim.warmup_lr": 2e-8,
    "optim.min_lr": 2e-7,
    "optim.weight_decay": 0.05,
    "optim.warmup_epochs": 5,
    "optim.clip_grad_norm": None,
    "new_lr_factor": 20.0,
    "decay_all": True,
    "ema_decay": 0.99996,
    "mix.mixup": 0.8,
    "mix.cutmix": 1.0,
    "mix.label_smoothing": 0.1,
    "transform.auto_augment": "rand-m9-mstd0.5-inc1",
    "transform.re_prob": 0.25,
    "transform.crop_pct": 0.875,
}
NEEDS = ("freeze", "new_lr_factor", "decay_all")  # settings without which a training is none of these
_RATES = ("optim.lr", "optim.warmup_lr", "optim.min_lr")


def describe_recipe(params: Any, facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How a model is linearized: the content of recipe.json, and lines for people; for `facts` see `repro.papers.recipe.resolve`.

    `params` are those of a classifier with `freeze`, `new_lr_factor` and `decay_all`.
    """
    asked = dataclasses.asdict(params)
    resolved = resolve(asked, **facts, choices={})
    resolved["linearize"] = {name: asked[name] for name in NEEDS}
    if asked["decay_all"]:
        resolved["optimizer"]["exempt_from_weight_decay"] = "nothing"
    departs = find_departures(asked, resolved)
    trained = "the new weights alone" if asked["freeze"] else "all weights"
    first = f"{'trained':<13}  {trained}, the new ones at {format_value(asked['new_lr_factor'])} times the rate"
    return {"recipe": resolved, "departures_from_the_paper": departs}, [first, *lines(resolved, departs)]


def find_departures(params: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
    """One line for each value that is not the release's, and for another model, data set, precision or order of images."""
    found = []
    if params["model"] != "t5_tiny_patch16_224":
        found.append(f"model: {params['model']}, the paper linearizes a class-free DeiT-T (t5_tiny_patch16_224)")
    images = resolved["data"]["train_images"]
    if not params["data"].startswith("imagenet") or images != TRAIN_IMAGES:
        found.append(f"data: {params['data']} ({images:,} training images), the paper has ImageNet-1K ({TRAIN_IMAGES:,})")
    for key, value in RELEASED.items():
        ours = _look_up(params, key)
        is_rate = key in _RATES
        if is_rate:
            ours *= BATCH / params["optim"]["lr_batch_size"]
        same = abs(ours - value) < 1e-12 if isinstance(ours, float) and isinstance(value, float) else ours == value
        if not same:
            at = f" at batch {BATCH}" if is_rate else ""
            found.append(f"{key}: {format_value(ours)}{at}, the release has {format_value(value)}{at}")
    if (dtype := resolved["precision"]["dtype"]) != "fp16":
        found.append(f"precision: {dtype}, the release has fp16 autocast")
    found.append("repeated augmentation: none, the release has three views of an image in a batch")
    return found


def _look_up(params: Mapping[str, Any], key: str) -> Any:
    """The value at a path such as `optim.lr`."""
    value: Any = params
    for part in key.split("."):
        value = value[part]
    return value
