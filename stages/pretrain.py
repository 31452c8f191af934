"""`repro pretrain`: train a classifier (Table 1; on the embedded digits in the mini profile)."""

from pathlib import Path
from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.tasks.classification.spec import SPEC

from . import (
    CellOption,
    FlipOption,
    FromOption,
    GpusOption,
    ModelOption,
    OwnOption,
    SeedsOption,
    Sha256Option,
    Stage,
    require_no_own,
)

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC)


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    seeds: SeedsOption = None,
    replay_bad_step: Annotated[
        Path | None, typer.Option(help="Run the step of this dump again, and show what each layer gave.")
    ] = None,
    data: OwnOption = None,
    model: ModelOption = None,
    source: FromOption = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train this many epochs instead; a cell's results go to results/replications. With --data, the default "
            "follows from the number of pictures.",
        ),
    ] = None,
    flip: FlipOption = False,
    sha256: Sha256Option = None,
) -> None:
    """Train a classifier; a stopped run continues where it was."""
    from repro.papers import describe_recipe
    from repro.runs.cells import read_cells, replay, train_cells

    own = {"model": model, "source": source, "flip": flip, "sha256": sha256}
    if data is not None:
        from repro.runs.own import train_own

        without = {"cell": cell, "replay-bad-step": replay_bad_step}
        train_own("pretrain", SPEC, data, **own, epochs=epochs, seeds=seeds, gpus=gpus, without=without)
        return
    require_no_own("pretrain", **own)
    if replay_bad_step is None:
        train_cells(read_cells("pretrain", SPEC, cell, epochs=epochs, seeds=seeds, recipe=describe_recipe), gpus)
    elif (epochs, seeds, gpus) != (None, None, None):
        raise UserError("pretrain: --replay-bad-step runs one step in one process; leave --epochs, --seeds, --gpus out")
    else:
        replay("pretrain", SPEC, replay_bad_step, cell)
