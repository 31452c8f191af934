"""`repro readings`: what each reading of the paper does to the printed counts, and, outside the pipeline, to the accuracy of a nano."""

import dataclasses
from typing import Annotated, Any

import typer

from repro.core.errors import UserError
from repro.core.paths import find_root

from . import Stage

STAGE = Stage()


def command(
    train: Annotated[
        bool, typer.Option("--train", help="Train a nano by each reading, into results/measured/<device>/readings/.")
    ] = False,
    variant: Annotated[str | None, typer.Option(help="With --train: only this reading, in this process.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="With --train: a cell of prepare_data; by default that of pretrain's first Vittt."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="With --train: how many seeds of each reading to train: 0, 1, ...")] = 3,
    epochs: Annotated[
        int | None, typer.Option(help="With --train: epochs of each training; by default as many as in pretrain.")
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(help="With --train: readings that train at once, over the GPUs; on a CPU they share the threads."),
    ] = 1,
    speed: Annotated[bool, typer.Option(help="With --train: measure the throughput when all are trained.")] = False,
) -> None:
    """Count what each reading of the paper changes: parameters and multiply-adds, of pairs too; with --train, its
    accuracy.
    """
    from repro.papers.grid import run_variants
    from repro.papers.vision_ttt.readings import record_fits

    if train:
        run_variants(choose_readings(), variant, data=data, seeds=seeds, epochs=epochs, jobs=jobs, speed=speed)
    elif variant is not None or data is not None or epochs is not None:
        raise UserError("readings: --variant, --data and --epochs need --train")
    else:
        record_fits(find_root())


def choose_readings() -> Any:
    """The readings as variants of a nano."""
    from repro.papers.variants import Variant, load_variants
    from repro.papers.vision_ttt.readings import list_trained

    variants = {name: Variant(options={"reading": text} if text else {}) for name, text in list_trained().items()}
    about = {"stage": "readings", "folder": "readings", "flags": ("--train",)}
    return dataclasses.replace(load_variants("vision_ttt"), variants=variants, **about)
