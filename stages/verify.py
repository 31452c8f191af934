"""`repro verify`: whether this machine's scores are those that the repository holds."""

from typing import Annotated

import typer

from repro.core.errors import RunError, UserError
from repro.core.paths import find_root

from . import Stage, load_stages

STAGE = Stage(purpose="run")


def command(
    commit: Annotated[str, typer.Option(help="Compare with the results that this commit holds.")] = "HEAD",
    save: Annotated[
        bool,
        typer.Option("--save", help="Keep the scores in results/measured/<device>, beside those of other machines."),
    ] = False,
    first_epochs: Annotated[
        bool,
        typer.Option(
            "--first-epochs", help="Train the first epochs of what older code trained outside the pipeline, instead."
        ),
    ] = False,
) -> None:
    """Compare the scores under results/ with those that a commit holds; exit 1 where the 95 % intervals do not meet.

    Speeds and times are not compared. With --first-epochs, a stale record whose beginning the code here repeats is stale
    no more.
    """
    if first_epochs:
        if save or commit != "HEAD":
            raise UserError("verify: --first-epochs goes alone; leave --commit and --save out")
        _follow_records()
        return
    from repro.core.runtime import load_runtime
    from repro.report.reproduced import describe_scores, list_scores, save_scores

    paths = find_root()
    scores = list_scores(paths, [name for name, row in load_stages().items() if row.task], commit)
    print("\n".join(describe_scores(scores, commit)))
    if save:
        print(f"{save_scores(paths, load_runtime(paths), scores).relative_to(paths.root)}: written")
    if left := [score for score in scores if score.has_left]:
        raise RunError(f"verify: {len(left)} of {len(scores)} scores differ by more than chance, or are missing")


def _follow_records() -> None:
    from repro.graph import list_stale_records
    from repro.papers import find_rooms
    from repro.papers.first_epochs import follow_records
    from repro.papers.variants import load_variants

    from .readings import choose_readings

    paths = find_root()
    names = [record.path for record in list_stale_records(paths)]
    grids = [grid for room in find_rooms() if (grid := load_variants(room))]
    tasks = {name: row.task for name, row in load_stages().items() if row.task}
    for line in follow_records(paths, names, [*grids, choose_readings()], tasks):
        print(line, flush=True)
