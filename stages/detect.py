"""`repro detect`: Mask R-CNN on a pretrained backbone (Table 2, left; on the embedded scenes in the mini profile)."""

from typing import Annotated

import typer

from repro.tasks.detection.spec import SPEC

from . import CellOption, GpusOption, SeedsOption, Stage

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC, models=lambda params: [params.model])
RandomOption = Annotated[
    bool, typer.Option("--random", help="Start from random weights; the results go to results/measured.")
]
EpochsOption = Annotated[
    int | None, typer.Option(min=1, help="Train this many epochs instead; the results go to results/measured.")
]


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    seeds: SeedsOption = None,
    random: RandomOption = False,
    epochs: EpochsOption = None,
) -> None:
    """Train a detector on a pretrained backbone, and measure box and mask AP; a stopped run continues where it was."""
    from repro.runs.cells import read_cells, train_cells

    train_cells(read_cells("detect", SPEC, cell, random=random, epochs=epochs, seeds=seeds), gpus)
