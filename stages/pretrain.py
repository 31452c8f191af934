"""`repro pretrain`: train a classifier (Table 1; on the embedded digits in the mini profile)."""

from pathlib import Path
from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.tasks.classification.spec import SPEC

from . import CellOption, GpusOption, SeedsOption, Stage

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC, models=lambda params: [params.model])


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    seeds: SeedsOption = None,
    replay_bad_step: Annotated[
        Path | None, typer.Option(help="Run the step of this dump again, and show what each layer gave.")
    ] = None,
) -> None:
    """Train a classifier; a stopped run continues where it was."""
    from repro.papers import describe_recipe
    from repro.runs.cells import read_cells, replay, train_cells

    if replay_bad_step is None:
        train_cells(read_cells("pretrain", SPEC, cell, seeds=seeds, recipe=describe_recipe), gpus)
    elif seeds is not None or gpus is not None:
        raise UserError("pretrain: --replay-bad-step runs one step in one process; leave --seeds and --gpus out")
    else:
        replay("pretrain", SPEC, replay_bad_step, cell)
