"""`repro data check`: check of a data set before a long run."""

from pathlib import Path
from typing import Annotated

import typer

from repro.core.paths import find_root
from repro.core.runtime import load_runtime, usable_cores
from repro.data.kinds import KINDS

from . import Stage

app = typer.Typer(help="Check data sets before a run.", no_args_is_help=True)

STAGE = Stage(purpose="check", records=False)


@app.command()
def check(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    root: Annotated[Path, typer.Argument(help="The folder that holds the data set.")],
    full: Annotated[bool, typer.Option("--full", help="Decode every file instead of a sample.")] = False,
    sample: Annotated[int, typer.Option(min=0, help="Number of images to decode.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; by default one per usable core.")
    ] = None,
) -> None:
    """Check layout, counts, annotations and files of a data set; one line per finding, exit code 1 if there is an
    error.
    """
    from repro.data.check.run import Depth, run_check

    max_pixels = load_runtime(find_root()).max_pixels
    depth = Depth(full=full, sample=sample, seed=seed, workers=workers or usable_cores(), max_pixels=max_pixels)
    run_check(kind, root, depth, emit=lambda line: print(line, flush=True))
