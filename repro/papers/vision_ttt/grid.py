"""The variants of Vittt as grids, trained as `pretrain` trains its first Vittt."""

from collections.abc import Mapping
from typing import Any

from ..grid import Grid
from .variants import VARIANTS


def make_grid(stage: str, variants: Mapping[str, Mapping[str, Any]], flags: tuple[str, ...] = ()) -> Grid:
    """Variants of Vittt that a stage trains; for `flags` see `Grid`."""
    return Grid(stage=stage, variants=variants, family="vittt", model="Vittt", folder=stage, flags=flags)


GRID = make_grid("ablate", VARIANTS)
