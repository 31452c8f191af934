"""The grid of the design study, and its recipe for the embedded digits."""

from ...core.config import build
from ...tasks.classification.params import ClassifierParams
from ..grid import ON_DIGITS, Grid
from .variants import VARIANTS

# chosen on the split `tune`, by two variants and two seeds: at twice the rate, with less clipping and half as long,
# some seeds stay at chance
RECIPE = ON_DIGITS | {
    "model": "study_nano_patch4_32",
    "epochs": 30,
    "optim": {
        "lr": 1.5e-3,
        "warmup_lr": 1e-5,
        "min_lr": 1e-5,
        "lr_batch_size": 32,
        "warmup_epochs": 5,
        "clip_grad_norm": 1.0,
    },
}

GRID = Grid(
    stage="ablate",
    variants=VARIANTS,
    family="study",
    model="two-layer MLP",
    recipe=build(ClassifierParams, RECIPE, "the recipe of the design study"),
    folder="ablate/vit3",
    flags=("--paper", "vit3"),
)
