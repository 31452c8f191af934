"""How a step of the ladder is trained, and where that departs from Appendix A of the paper."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..recipe import BF16, NO_REPEATS, lines, resolve

MODEL = "ladder_vit3_base_patch16_224"
TRAIN_IMAGES = 1_281_167
# what Appendix A prints of ViTTT-B: 60 epochs, and 256 images on each of two GPUs; for the rest it names ViT³'s recipe
PRINTED: dict[str, float] = {"epochs": 60, "batch_size": 512}


def describe_recipe(params: Any, facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How a classifier is trained: the content of recipe.json, and lines for people; for `facts` see `resolve`."""
    asked = dataclasses.asdict(params)
    resolved = resolve(asked, **facts, choices={NO_REPEATS: True, BF16: facts["dtype"] == "bf16"})
    departs = find_departures(asked, resolved)
    return {"recipe": resolved, "departures_from_the_paper": departs}, lines(resolved, departs)


def find_departures(params: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
    """One line for each printed value that the recipe does not have, and for another model or data set."""
    found = []
    if params["model"] != MODEL:
        found.append(f"model: {params['model']}, the paper has ViT³-B ({MODEL})")
    images = resolved["data"]["train_images"]
    if not params["data"].startswith("imagenet") or images != TRAIN_IMAGES:
        found.append(f"data: {params['data']} ({images:,} training images), the paper has ImageNet-1K ({TRAIN_IMAGES:,})")
    return found + [f"{key}: {params[key]:g}, the paper has {value:g}" for key, value in PRINTED.items() if params[key] != value]
