"""`repro measure`: all measurements of a GPU, in order, within a time limit."""

from typing import Annotated

import typer

from repro.core.paths import find_root

from . import Stage

STAGE = Stage(purpose="prove")


def command(
    minutes: Annotated[
        float | None, typer.Option(min=0.5, help="Stop after this time; the next call continues. Default: no limit.")
    ] = None,
) -> None:
    """Measure this GPU: kernels, training, and every family over the image size."""
    from repro.bench.campaign import run_campaign

    run_campaign(find_root(), minutes)
