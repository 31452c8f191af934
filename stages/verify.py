"""`repro verify`: whether this machine's scores are those that the repository holds."""

from typing import Annotated

import typer

from repro.core.errors import RunError
from repro.core.paths import find_root

from . import Stage, load_stages

STAGE = Stage(purpose="run")


def command(
    commit: Annotated[str, typer.Option(help="Compare with the results that this commit holds.")] = "HEAD",
) -> None:
    """Compare the scores under results/ with those that a commit holds; exit 1 where one is outside its 95 % interval.

    Speeds and times are not compared.
    """
    from repro.report.reproduced import describe_scores, list_scores

    scores = list_scores(find_root(), [name for name, row in load_stages().items() if row.task], commit)
    print("\n".join(describe_scores(scores, commit)))
    if left := [score for score in scores if score.has_left]:
        raise RunError(f"verify: {len(left)} of {len(scores)} scores are outside their intervals, or missing")
