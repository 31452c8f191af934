"""`repro detect`: Mask R-CNN on a pretrained backbone (Table 2, left; on the embedded scenes in the mini profile)."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from repro.tasks.detection.spec import SPEC

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
_RandomOption = Annotated[
    bool, typer.Option("--random", help="Start from random weights; the results go to results/replications.")
]
_EpochsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Train this many epochs instead; without --data the results go to results/replications."),
]


def make_command(stage: str, spec: Any, about: str) -> Callable[..., None]:
    """Make the command of a stage that trains a dense task on a pretrained backbone.

    Args:
        stage: the section of params.yaml.
        spec: the task, see `repro.tasks.dense.base.DenseSpec`.
        about: what the command does, the beginning of its help.
    """

    def command(
        cell: CellOption = None,
        gpus: GpusOption = None,
        seeds: SeedsOption = None,
        random: _RandomOption = False,
        epochs: _EpochsOption = None,
        data: OwnOption = None,
        model: ModelOption = None,
        source: FromOption = None,
        flip: FlipOption = False,
        sha256: Sha256Option = None,
    ) -> None:
        from repro.runs.cells import read_cells, train_cells

        own = {"model": model, "source": source, "flip": flip, "sha256": sha256}
        if data is not None:
            from repro.runs.own import train_own

            without = {"cell": cell, "random": random}  # refused next to `--data`
            train_own(stage, spec, data, **own, epochs=epochs, seeds=seeds, gpus=gpus, without=without)
            return
        require_no_own(stage, **own)
        train_cells(read_cells(stage, spec, cell, random=random, epochs=epochs, seeds=seeds), gpus)

    command.__doc__ = f"{about}; a stopped run continues where it was."
    return command


command = make_command("detect", SPEC, "Train a detector on a pretrained backbone, and measure box and mask AP")
