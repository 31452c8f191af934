"""`repro run`: the pipeline of `dvc repro` with several stages at once."""

from typing import Annotated

import typer

from . import Stage, load_stages

STAGE = Stage(purpose="run")


def command(
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="How many stages run at once. Default: one for each GPU, or for each CPU core."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run all stages, also those whose results are up to date.")
    ] = False,
) -> None:
    """Run the stages of dvc.yaml, several at once where none needs another; measurements of speed run alone.

    Each stage is run by `dvc repro --single-item`, so DVC's records are those of a plain `dvc repro`. Their output goes
    to .runs/logs/run.
    """
    from repro.core.paths import find_root
    from repro.core.runtime import load_runtime
    from repro.pipeline import run_stages

    paths = find_root()
    run_stages(paths, load_stages(), load_runtime(paths), jobs=jobs, force=force)
