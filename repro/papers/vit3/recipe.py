"""How a classifier of the paper is trained, and where that departs from the recipe of Section 5.1."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..recipe import BF16, NO_REPEATS, lines, resolve

# DeiT-S with inner learners, and what Section 5 builds from the study
MODELS = {"study_small_patch16_224"} | {
    f"{name}_224" for size in ("tiny", "small", "base") for name in (f"vit3_{size}_patch16", f"hvit3_{size}")
}
BATCH = 4096
TRAIN_IMAGES = 1_281_167
# what Sections 4 and 5.1 print; beyond it the protocol is Swin's, and only this is compared
PRINTED: dict[str, float] = {
    "epochs": 300,
    "batch_size": BATCH,
    "optim.lr": 4e-3,  # at that batch
    "optim.weight_decay": 0.05,
    "optim.warmup_epochs": 20,
}


def describe_recipe(params: Any, facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How a classifier is trained: the content of recipe.json, and lines for people; for `facts` see `resolve`."""
    asked = dataclasses.asdict(params)
    resolved = resolve(asked, **facts, choices={NO_REPEATS: True, BF16: facts["dtype"] == "bf16"})
    departs = find_departures(asked, resolved)
    return {"recipe": resolved, "departures_from_the_paper": departs}, lines(resolved, departs)


def find_departures(params: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
    """One line for each printed value that the recipe does not have, and for another model, data set or image size."""
    found = []
    if params["model"] not in MODELS:
        found.append(
            f"model: {params['model']}, the paper has DeiT-S with inner learners (study_small_patch16_224), ViT³ and H-ViT³ in T, S, B"
        )
    images = resolved["data"]["train_images"]
    if not params["data"].startswith("imagenet") or images != TRAIN_IMAGES:
        found.append(f"data: {params['data']} ({images:,} training images), the paper has ImageNet-1K ({TRAIN_IMAGES:,})")
    optim = params["optim"]
    ours = {"epochs": params["epochs"], "batch_size": params["batch_size"], **{f"optim.{key}": value for key, value in optim.items()}}
    ours["optim.lr"] *= BATCH / optim["lr_batch_size"]
    for key, value in PRINTED.items():
        if abs(ours[key] - value) > 1e-9:
            at = f" at batch {BATCH}" if key == "optim.lr" else ""
            found.append(f"{key}: {ours[key]:g}{at}, the paper has {value:g}{at}")
    return found
