"""`repro pretrain`: train a classifier (Table 1; on the embedded digits in the mini profile)."""

from typing import Annotated

import typer

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
    from repro.runs.cells import read_cells, train_cells

    own = {"model": model, "source": source, "flip": flip, "sha256": sha256}
    if data is not None:
        from repro.runs.own import train_own

        train_own("pretrain", SPEC, data, **own, epochs=epochs, seeds=seeds, gpus=gpus, without={"cell": cell})
        return
    require_no_own("pretrain", **own)
    train_cells(read_cells("pretrain", SPEC, cell, epochs=epochs, seeds=seeds, recipe=describe_recipe), gpus)
