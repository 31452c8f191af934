"""`repro resolution`: trained classifiers at larger images than they were trained on, in accuracy and time."""

from repro.core.config import load_section
from repro.core.paths import find_root
from repro.core.runtime import load_runtime
from repro.inference.params import ResolutionParams

from . import Stage

# no task is declared: the files of weights name their models
STAGE = Stage(params=ResolutionParams, alone=True, hidden=True)


def command() -> None:
    """Evaluate and time trained classifiers at several image sizes."""
    from repro.inference.resolution import measure_resolution

    paths = find_root()
    measure_resolution(load_section(ResolutionParams, paths.params, "resolution"), paths, load_runtime(paths))
