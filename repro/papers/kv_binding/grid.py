"""The grid of the ladders, and its recipes for the embedded data sets: one for each model."""

import dataclasses

from ...core.config import build
from ...tasks.classification.params import ClassifierParams
from ..grid import ON_DIGITS, Grid
from .variants import VARIANTS, find_family

# on the digits a patch is a pixel of the scan, except for Vittt, whose recipe is that of the cell `vittt_nano_digits`
# of the mini profile
RECIPE = ON_DIGITS | {
    "model": "ladder_vit3_nano_patch4_32",
    "epochs": 20,
    "optim": {
        "lr": 3e-3,
        "warmup_lr": 1e-5,
        "min_lr": 1e-5,
        "lr_batch_size": 32,
        "warmup_epochs": 2,
        "clip_grad_norm": 1.0,
    },
}
LARGE_PATCHES = {"lr": 4e-3, "clip_grad_norm": 5.0}  # in place of those of `RECIPE`


def adapt(recipe: ClassifierParams, variant: str) -> ClassifierParams:
    """The recipe of a variant's model on the recipe's data: on other data than digits, patches of 16 pixels and other
    lengths.
    """
    family, on_digits = find_family(variant), recipe.data == RECIPE["data"]
    if on_digits and family != "ladder_vittt":
        return dataclasses.replace(recipe, model=f"{family}_nano_patch4_32")
    # an image of 64 pixels has 16 tokens, of which LaCT takes four at a time, as many chunks as on the digits
    options = {"chunk_size": 4} if family == "lact" else {}
    transform = dataclasses.replace(recipe.transform, image_size=144) if on_digits else recipe.transform
    return dataclasses.replace(
        recipe,
        model=f"{family}_nano_patch16_144",
        options=options,
        epochs=7 if on_digits else 10,
        evaluate_every=1,
        optim=dataclasses.replace(recipe.optim, **LARGE_PATCHES),
        transform=transform,
    )


GRID = Grid(
    stage="ablate",
    variants=VARIANTS,
    family=None,
    model="the model",
    recipe=build(ClassifierParams, RECIPE, "the recipe of the ladders"),
    folder="ablate/kv_binding",
    flags=("--paper", "kv_binding"),
    adapt=adapt,
)
