"""`repro selftest faults`: everything that can happen to a training run, done to real runs of this code; see `repro.faults`."""

from typing import Annotated

import typer

from . import Stage

app = typer.Typer(help="Prove that this code does what it says.", no_args_is_help=True)

STAGE = Stage(purpose="prove")


@app.command()
def faults(
    kills: Annotated[int, typer.Option(min=0, help="Random moments of a training at which it is killed; as many with two processes.")] = 20,
    flips: Annotated[int, typer.Option(min=1, help="Bytes of a saved state that are flipped, one at a time.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the moments and the bytes.")] = 0,
    only: Annotated[str | None, typer.Option(help="Some of kill,two,signal,state,room,change,batch,diverge.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the temporary checkouts behind.")] = False,
) -> None:
    """Kill, stop, fill the disk, damage files, change the data: does a run still end with the same bits, or with one line?"""
    from repro.faults.faults import run_faults

    run_faults(kills=kills, flips=flips, seed=seed, only=only.split(",") if only else None, keep=keep)
