"""`repro golden`: the losses of ten steps of every family; DVC reruns trainings only if an edit changes these."""

import logging
from typing import Annotated

import typer

from repro.core.errors import RunError, UserError

from . import Stage

STAGE = Stage(hidden=True)


def command(
    family: Annotated[
        list[str] | None, typer.Option(help="One family of results/golden; may be repeated; without it, all.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where values differ.")] = False,
) -> None:
    """Train ten steps of every family, and write the values that are no longer those of results/golden.

    A file whose values agree within rounding is not rewritten. So an edit that changes no training makes none stale.
    """
    from repro.runs.golden import read_cases, update_families

    known = list(read_cases()["families"])
    if unknown := [name for name in family or () if name not in known]:
        raise UserError(f"golden: --family {unknown[0]}: unknown; the families are {', '.join(known)}")
    logging.disable(logging.WARNING)
    problems = update_families(family or known, check=check)
    for problem in problems:
        print(problem, flush=True)
    if problems and check:
        raise RunError(f"golden: {len(problems)} values differ; `repro golden` writes them")
