"""`repro tune`: the same small search of learning rate and warm-up for each classifier on embedded data, by its score
on `tune`.
"""

from typing import Annotated

import typer

from repro.tasks.classification.spec import SPEC

from . import Stage

STAGE = Stage(purpose="run")


def command(
    data: Annotated[str, typer.Option(help="A cell of `prepare_data` of an embedded kind, e.g. digits.")],
    cell: Annotated[
        str | None,
        typer.Option(
            help="One cell of `pretrain`, also one in `by_hand`; without it, all of the pipeline on this data. "
            "With --paper: one of its variants."
        ),
    ] = None,
    paper: Annotated[
        str | None,
        typer.Option(
            help="Search for the variants that a paper ablates, a folder of repro/papers: the rate of their recipe, "
            "half of it and twice as much, for `repro ablate --own-rates`."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Trials that train at once, over the GPUs; on a CPU they share the threads.")
    ] = 1,
    trial: Annotated[
        int | None, typer.Option(help="With --cell: train only this one of its trials, in this process.")
    ] = None,
) -> None:
    """Choose learning rates; the records go to results/measured."""
    from repro.core.errors import UserError
    from repro.papers.grid import choose_variants, find_variant_searches
    from repro.runs.tune import find_searches, run_searches, run_trial

    if trial is not None and cell is None:
        raise UserError("tune: --trial is one of a cell; name the cell with --cell")
    if paper is None:
        searches = find_searches(SPEC, data, cell)
    else:
        searches = find_variant_searches(choose_variants(paper), data, cell)
    if trial is None:
        run_searches(searches, jobs=jobs)
    else:
        run_trial(searches[0], trial)
