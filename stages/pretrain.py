"""`repro pretrain`: train a classifier (Table 1; on the embedded digits in the mini profile)."""

import os
from pathlib import Path
from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.core.hashing import require_hash
from repro.tasks.classification.spec import SPEC

from . import CellOption, GpusOption, SeedsOption, Sha256Option, Stage

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC, models=lambda params: [params.model])


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    seeds: SeedsOption = None,
    replay_bad_step: Annotated[
        Path | None, typer.Option(help="Run the step of this dump again, and show what each layer gave.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Your own pictures in place of a cell: folder:PATH, of class folders or a CSV of file,label."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --data: a registered name; by default one that suits the number of pictures."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="With --data: weights to start from; without, random ones.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="With --data: passes over the pictures; by default by their number.")
    ] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="With --data: also learn from mirrored pictures, which must mean the same.")
    ] = False,
    sha256: Sha256Option = None,
) -> None:
    """Train a classifier; a stopped run continues where it was."""
    from repro.papers import describe_recipe
    from repro.runs.cells import read_cells, replay, train_cells

    own = {"model": model, "from": source, "epochs": epochs, "flip": flip or None, "sha256": sha256}
    given = {name: value for name, value in own.items() if value is not None}
    if data is not None:
        if cell is not None or replay_bad_step is not None:
            raise UserError("pretrain: --data trains on your own pictures; leave --cell and --replay-bad-step out")
        from repro.runs.own import make_own_cell

        if source is not None:
            require_hash(source, sha256)
        made = make_own_cell(data, model=model, source=source, epochs=epochs, seeds=seeds, flip=flip)
        train_cells([made], gpus)
        if gpus is None and "WORLD_SIZE" not in os.environ:
            print(f"use it: repro predict PICTURES --weights {made.folder / 'weights.safetensors'}")
    elif given:
        raise UserError(f"pretrain: --{next(iter(given))} goes with --data; the cells of params.yaml say it themselves")
    elif replay_bad_step is None:
        train_cells(read_cells("pretrain", SPEC, cell, seeds=seeds, recipe=describe_recipe), gpus)
    elif seeds is not None or gpus is not None:
        raise UserError("pretrain: --replay-bad-step runs one step in one process; leave --seeds and --gpus out")
    else:
        replay("pretrain", SPEC, replay_bad_step, cell)
