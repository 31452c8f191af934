"""`repro verify`: comparison of this machine's scores with those in the repository."""

from typing import Annotated

import typer

from repro.core.errors import RunError
from repro.core.paths import find_root

from . import Stage, load_stages

STAGE = Stage(purpose="run")


def command(
    commit: Annotated[str, typer.Option(help="Compare with the results that this commit holds.")] = "HEAD",
) -> None:
    """Compare the scores under results/ with those that a commit holds; exit 1 where the 95 % intervals do not meet.

    Speeds and times are not compared.
    """
    from repro.report.reproduced import describe_scores, list_scores

    paths = find_root()
    # without `pretrain_seeds`, whose records come from files of the repository: they would be equal anywhere
    scores = list_scores(paths, [name for name, row in load_stages().items() if row.task and row.shown], commit)
    print("\n".join(describe_scores(scores, commit)))
    if left := [score for score in scores if score.is_beyond_chance]:
        raise RunError(f"verify: {len(left)} of {len(scores)} scores differ by more than chance, or are missing")
