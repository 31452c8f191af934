"""`repro ablate`: what a paper ablates, trained alike over several seeds (the mini profile trains two designs of Vittt
on digits).
"""

from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.tasks.classification.spec import SPEC

from . import CellOption, GpusOption
from .pretrain import STAGE

__all__ = ["STAGE", "command"]

PAPER = "vision_ttt"


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    grid: Annotated[
        bool, typer.Option("--all", help="Train all variants of the paper, into results/measured/<device>/ablate/.")
    ] = False,
    variant: Annotated[str | None, typer.Option(help="Train only this one of the variants, in this process.")] = None,
    paper: Annotated[
        str, typer.Option(help="With --all and --variant: whose variants, a folder of repro/papers.")
    ] = PAPER,
    teacher: Annotated[
        str | None,
        typer.Option(help="With --paper linearize: weights of another softmax model than that of the recipe."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With --all: a cell of prepare_data; by default that of the shared recipe.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="With --all: how many seeds of each variant to train: 0, 1, ...")] = 3,
    epochs: Annotated[
        int | None, typer.Option(help="With --all: epochs of each training; by default as many as in the recipe.")
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(help="With --all: variants that train at once, over the GPUs; on a CPU they share the threads."),
    ] = 1,
    own_rates: Annotated[
        bool,
        typer.Option(
            "--own-rates",
            help="With --all: train each variant at the rate that `repro tune --paper` chose for it, not at that of "
            "the shared recipe.",
        ),
    ] = False,
    speed: Annotated[bool, typer.Option(help="With --all: measure the throughput when all are trained.")] = True,
) -> None:
    """Train variants of a model alike, over several seeds; a stopped run continues where it was."""
    from repro.papers import describe_recipe
    from repro.papers.grid import choose_variants, run_variants, use_own_rates
    from repro.runs.cells import read_cells, train_cells

    if not grid and variant is None:
        if paper != PAPER:
            raise UserError(
                f"ablate: --paper {paper}: give --all or --variant with it; the cells of params.yaml are of {PAPER}"
            )
        if teacher is not None:
            raise UserError("ablate: --teacher goes with --paper linearize and --all or --variant")
        train_cells(read_cells("ablate", SPEC, cell, recipe=describe_recipe), gpus)
        return
    if cell is not None or gpus is not None:
        raise UserError(
            "ablate: --cell and --gpus are for the cells of params.yaml; leave them out with --all and --variant"
        )
    chosen = choose_variants(paper, teacher)
    if own_rates:
        if data is None:
            raise UserError("ablate: --own-rates: name the data on which the rates were searched with --data")
        chosen = use_own_rates(chosen, data, variant)
    run_variants(chosen, variant, data=data, seeds=seeds, epochs=epochs, jobs=jobs, speed=speed)
