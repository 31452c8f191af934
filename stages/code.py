"""Stage `code`: the hash of the sources on which each stage depends, so that an edit restarts what it concerns and
nothing else.

It always runs. dvc.yaml makes every stage, or cell, depend on its file under results/code.
"""

from . import Stage, load_stages

STAGE = Stage()


def command() -> None:
    """Write the hash of each stage's sources, on which its results depend."""
    from repro.core.paths import find_root
    from repro.graph import write_code_hashes

    write_code_hashes(find_root(), load_stages())
