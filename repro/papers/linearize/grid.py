"""The grid of linearizations, trained as the cell of `linearize:` on the same data."""

import dataclasses

from ...tasks.linearization.params import LinearizeParams
from ...tasks.linearization.spec import SPEC
from ..grid import Grid
from .recipe import describe_recipe
from .variants import FROZEN, VARIANTS


def adapt(recipe: LinearizeParams, variant: str) -> LinearizeParams:
    """The recipe of a variant: that of the cell, whose own options do not count."""
    return dataclasses.replace(recipe, options={}, freeze=variant in FROZEN)


GRID = Grid(
    stage="ablate",
    variants=VARIANTS,
    family="t5",
    model="T5",
    describe=describe_recipe,
    folder="ablate/linearize",
    flags=("--paper", "linearize"),
    section="linearize",
    spec=SPEC,
    adapt=adapt,
)
