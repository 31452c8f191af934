"""The grid of linearizations, trained as the cell of `linearize:` on the same data."""

import dataclasses
from pathlib import Path

from ...core.errors import UserError
from ...core.hashing import hash_file
from ...tasks.linearization.params import LinearizeParams
from ...tasks.linearization.spec import SPEC
from ...training.params import InitParams
from ..grid import Grid
from .variants import FROZEN, VARIANTS


def adapt(recipe: LinearizeParams, variant: str) -> LinearizeParams:
    """The recipe of a variant: that of the cell, whose own options do not count."""
    return dataclasses.replace(recipe, options={}, freeze=variant in FROZEN)


def of_teacher(file: str) -> Grid:
    """The same variants for students of another softmax model, in a folder of their own.

    Raises:
        UserError: a file that is not of this project, or of no softmax ViT.
    """
    from ...models.checkpoints import open_weights
    from ...models.linearize import choose_student, read_shell

    path = Path(file)
    if not path.is_file():
        raise UserError(f"ablate: --teacher {file}: no such file")
    model, options = choose_student(read_shell(open_weights(path).require_classifier().build(), file))
    init = InitParams(weights=file, sha256=hash_file(path, digits=64))

    def adapt_to_teacher(recipe: LinearizeParams, variant: str) -> LinearizeParams:
        return dataclasses.replace(adapt(recipe, variant), model=model, options=options, init=init)

    of = path.parent.name if path.stem == "weights" else path.stem
    return dataclasses.replace(
        GRID, adapt=adapt_to_teacher, folder=f"{GRID.folder}_{of}", flags=(*GRID.flags, "--teacher", file)
    )


GRID = Grid(
    stage="ablate",
    variants=VARIANTS,
    family="t5",
    model="T5",
    folder="ablate/linearize",
    flags=("--paper", "linearize"),
    section="linearize",
    spec=SPEC,
    adapt=adapt,
    of_teacher=of_teacher,
)
