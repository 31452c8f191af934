"""`repro forms`: the recurrent and the parallel form of inner learners, timed over the tokens on this device."""

from repro.core.paths import find_root
from repro.core.runtime import load_runtime

from . import Stage

STAGE = Stage(purpose="prove")


def command() -> None:
    """Time inner learners, recurrent and parallel, over the tokens."""
    from repro.bench.forms import run_forms

    paths = find_root()
    run_forms(paths, load_runtime(paths))
