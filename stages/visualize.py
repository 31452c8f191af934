"""`repro visualize`: gradient magnitude maps, receptive fields and reconstruction losses (Fig. 3, 8 to 11)."""

from repro.core.config import load_section
from repro.core.paths import find_root
from repro.core.runtime import load_runtime
from repro.inference.params import VisualizeParams

from . import Stage

# no task is declared: the files of weights name their models
STAGE = Stage(params=VisualizeParams, hidden=True)


def command() -> None:
    """Draw where models look and what the inner learner does, and measure both."""
    from repro.inference.visualize import visualize

    paths = find_root()
    visualize(load_section(VisualizeParams, paths.params, "visualize"), paths, load_runtime(paths))
