"""`repro seeds`: trainings that a profile registers before they run, with one result file for each seed."""

import datetime
from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.runtime import load_runtime
from repro.tasks.classification.spec import SPEC

from . import Stage

STAGE = Stage(purpose="run")
SECTIONS = {"pretrain_seeds": Stage(params=SPEC.params, cells=True, task=SPEC, shown=False)}


def command(
    cell: Annotated[str | None, typer.Option(help="One cell, whose record is then made. Default: all.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="With --cell: this seed alone.")] = None,
    until: Annotated[str | None, typer.Option(help="The next HH:MM: start no training that would end later.")] = None,
    rates: Annotated[bool, typer.Option("--rates", help="Print the rate that each finished search chose.")] = False,
) -> None:
    """Run the registered trainings of `pretrain_seeds`: all searches of the learning rate, then seed by seed.

    A training that has its file under results/seeds is not run again. The rates that the searches chose are written into
    params.yaml and its profile by hand, before the first seed.
    """
    from repro.runs.seeds import collect, list_trainings, print_rates, train_all

    end = None
    if until is not None:
        try:
            at = datetime.datetime.strptime(until, "%H:%M").time()
        except ValueError:
            raise UserError(f"seeds: --until {until}: expected a time such as 17:45") from None
        now = datetime.datetime.now()
        end = datetime.datetime.combine(now.date(), at)
        end += datetime.timedelta(days=end <= now)
    if seed is not None and cell is None:
        raise UserError("seeds: --seed is one of a cell; name the cell with --cell")
    paths = find_root()
    trainings = list(list_trainings(paths, load_runtime(paths)))
    if rates:
        print_rates(trainings)
        return
    chosen = [each for each in trainings if cell is None or each.cell.name == cell]
    if seed is not None:
        chosen = [each for each in chosen if each.rate is None and each.cell.params.seeds == (seed,)]
    if not chosen:
        raise UserError(f"seeds: no such training in pretrain_seeds: {cell}{'' if seed is None else f', seed {seed}'}")
    if train_all(chosen, trainings, end) and cell is not None and seed is None:
        collect(cell, trainings)
