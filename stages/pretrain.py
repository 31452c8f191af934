"""`repro pretrain`: train a classifier (Table 1; on the embedded digits in the mini profile)."""

from pathlib import Path
from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.tasks.classification.spec import SPEC

from . import CellOption, GpusOption, SeedsOption, Stage

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC, models=lambda params: [params.model])
ReplayOption = Annotated[
    Path | None, typer.Option(help="Run the step of this dump again, and show what each layer gave.")
]


def command(
    cell: CellOption = None, gpus: GpusOption = None, seeds: SeedsOption = None, replay_bad_step: ReplayOption = None
) -> None:
    """Train a classifier; a stopped run continues where it was."""
    train("pretrain", cell, gpus, seeds, replay_bad_step)


def train(stage: str, cell: str | None, gpus: int | None, seeds: int | None, replay_bad_step: Path | None) -> None:
    """Train the cells of a section of classifiers, or replay a step of one of them."""
    from repro.papers import describe_recipe
    from repro.runs.cells import replay, train_cells

    if replay_bad_step is not None:
        if seeds is not None:
            raise UserError(f"{stage}: --replay-bad-step runs the step of one seed; leave --seeds out")
        replay(stage, SPEC, replay_bad_step, cell, gpus)
    else:
        train_cells(stage, SPEC, cell, gpus, seeds=seeds, recipe=describe_recipe)
