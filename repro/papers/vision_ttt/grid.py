"""The grid of the variants of Vittt, trained as `pretrain` trains its first Vittt."""

from ..grid import Grid
from .variants import VARIANTS

GRID = Grid(stage="ablate", variants=VARIANTS, family="vittt", model="Vittt", folder="ablate")
