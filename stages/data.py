"""`repro data check`: is a data set what it should be, and does it load fast enough, before days are spent on it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from repro.core.errors import RunError, UserError
from repro.core.runtime import usable_cores

from . import Stage

app = typer.Typer(help="Check data sets before a run.", no_args_is_help=True)

STAGE = Stage(purpose="check")


@app.callback()
def group() -> None:
    """Check data sets before a run."""


@app.command()
def check(
    kind: Annotated[str, typer.Argument(help="imagenet, coco, ade20k, digits or connect.")],
    root: Annotated[Path, typer.Argument(help="The folder that holds the data set.")],
    full: Annotated[bool, typer.Option("--full", help="Decode every file and not a sample.")] = False,
    sample: Annotated[int, typer.Option(min=0, help="How many images to decode.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample.")] = 0,
    speed: Annotated[bool, typer.Option("--speed", help="Time the training loader, too (not coco, ade20k).")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; without it, one for each usable core.")] = None,
) -> None:
    """Check layout, counts, annotations and files of a data set; a line for each finding, exit code 1 if there is an error."""
    run_check(kind, root, full=full, sample=sample, seed=seed, speed=speed, workers=workers or usable_cores())


def run_check(kind: str, root: Path, *, full: bool, sample: int, seed: int, speed: bool, workers: int) -> None:
    """Print the findings, and with `speed` the loader's speed. Nothing is written.

    Raises:
        UserError: an unknown kind, no such root, or `speed` of coco or ade20k.
        RunError: errors were found.
    """
    from repro.data.check import Depth, Report, check_root

    if speed and kind in ("coco", "ade20k"):
        raise UserError(f"--speed: times the loader of classification, not of {kind}; leave it out")
    report = Report(lambda line: print(line, flush=True))
    check_root(kind, root, Depth(full=full, sample=sample, seed=seed, workers=workers), report)
    warned = f"{report.warnings} warning{'s' if report.warnings != 1 else ''}"
    if speed:
        _print_speed(kind, root, workers)
    if report.errors:
        number = f"{report.errors:,} error{'s' if report.errors != 1 else ''}"
        raise RunError(f"data check {kind}: {number}, {warned} in {root}; the lines above say what to do")
    print(f"{kind} at {root}: no errors, {warned}")


def _print_speed(kind: str, root: Path, workers: int) -> None:
    from repro.data.check_speed import measure_speed

    try:
        print("\n".join(measure_speed(root, kind, workers, log=lambda line: print(line, file=sys.stderr, flush=True)).lines()))
    except UserError as error:
        print(f"speed    not measured: {error}")
