"""The grid of the design study, and its recipe for the embedded digits."""

from ...core.config import build
from ...tasks.classification.params import ClassifierParams
from ..grid import Grid
from .variants import VARIANTS

# chosen on the split `tune`, by two variants and two seeds: at twice the rate, with less clipping and half as long, some seeds stay at
# chance. A patch is a pixel of the scanned 8x8 digit
RECIPE = {
    "model": "study_nano_patch4_32",
    "data": "digits",
    "epochs": 30,
    "batch_size": 32,
    "drop_path": 0.0,
    "evaluate_every": 2,
    "precision": "fp32",
    "optim": {"lr": 1.5e-3, "warmup_lr": 1e-5, "min_lr": 1e-5, "lr_batch_size": 32, "warmup_epochs": 5, "clip_grad_norm": 1.0},
    "mix": {"mixup": 0.0, "cutmix": 0.0},
    "transform": {"image_size": 32, "scale": [0.7, 1.0], "ratio": [0.85, 1.18], "hflip": 0.0, "crop_pct": 1.0},
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
