"""`repro ablate`: variants of Vittt trained alike, over several seeds (Tables 3 and 4, Fig. 7; the mini profile trains some, on digits)."""

from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.tasks.classification.spec import SPEC

from . import CellOption, GpusOption
from .pretrain import STAGE

__all__ = ["STAGE", "command"]


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    grid: Annotated[bool, typer.Option("--all", help="Train all 17 variants, into results/measured/<device>/ablate/<data>/.")] = False,
    variant: Annotated[str | None, typer.Option(help="Train only this one of the 17 variants, in this process.")] = None,
    data: Annotated[str | None, typer.Option(help="With --all: a cell of prepare_data; by default that of pretrain's first Vittt.")] = None,
    seeds: Annotated[int, typer.Option(help="With --all: how many seeds of each variant to train: 0, 1, ...")] = 3,
    epochs: Annotated[int | None, typer.Option(help="With --all: epochs of each training; by default as many as in pretrain.")] = None,
    jobs: Annotated[int, typer.Option(help="With --all: variants that train at once, over the GPUs; on a CPU they share the threads.")] = 1,
    speed: Annotated[bool, typer.Option(help="With --all: measure the throughput when all are trained.")] = True,
) -> None:
    """Train variants of Vittt alike, over several seeds; a stopped run continues where it was."""
    from repro.papers.vision_ttt.grid import Grid, run_variants
    from repro.papers.vision_ttt.recipe import describe_recipe
    from repro.papers.vision_ttt.variants import VARIANTS
    from repro.training.cells import train_cells

    if not grid and variant is None:
        train_cells("ablate", SPEC, cell, gpus, recipe=describe_recipe)
        return
    if cell is not None or gpus is not None:
        raise UserError("ablate: --cell and --gpus are for the cells of params.yaml; leave them out with --all and --variant")
    run_variants(Grid(stage="ablate", variants=VARIANTS), variant, data=data, seeds=seeds, epochs=epochs, jobs=jobs, speed=speed)
