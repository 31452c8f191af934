"""`repro readings`: effect of each interpretation on the printed counts; the profile digits trains a nano with each."""

from repro.core.paths import find_root

from . import Stage

STAGE = Stage(hidden=True)


def command() -> None:
    """Count parameters and multiply-adds for each reading of the paper, and for pairs of readings."""
    from repro.papers.vision_ttt.readings import record_fits

    record_fits(find_root())
