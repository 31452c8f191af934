"""`repro complexity`: parameters and multiply-adds of the models of Tables 1 to 4 (those of Table 2 with adapters),
Fig. 1 and Fig. 6.
"""

from repro.bench.params import ComplexityParams
from repro.core.config import load_section
from repro.core.paths import find_root

from . import Stage

STAGE = Stage(params=ComplexityParams)


def command() -> None:
    """Count parameters and multiply-adds; nothing runs on data."""
    from repro.bench.complexity import run_complexity

    paths = find_root()
    run_complexity(load_section(ComplexityParams, paths.params, "complexity"), paths)
