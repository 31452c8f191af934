"""`repro readings`: effects of each interpretation on the printed counts; the profile digits trains a nano by each."""

from repro.core.paths import find_root

from . import Stage

STAGE = Stage(hidden=True)


def command() -> None:
    """Count what each reading of the paper changes: parameters and multiply-adds, of pairs too."""
    from repro.papers.vision_ttt.readings import record_fits

    record_fits(find_root())
