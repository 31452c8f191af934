"""`repro theory`: the paper's theorems, checked by arithmetic in fp64."""

from . import Stage

STAGE = Stage(hidden=True)


def command() -> None:
    """Check the paper's theorems by arithmetic."""
    import time

    from repro.core.paths import find_root
    from repro.core.record import make_identity, write_record
    from repro.papers.vision_ttt.theorems import ExampleSizes, measure_theorems

    paths, started, sizes = find_root(), time.monotonic(), ExampleSizes()
    theorems = measure_theorems(sizes)
    identity = make_identity(paths.root, sizes, device="cpu", dtype="fp64", backend="reference")
    write_record(
        paths.results / "theory" / "metrics.json", {"theorems": theorems}, identity, time.monotonic() - started
    )
    print("theory: largest errors:", ", ".join(f"{name} {error:.0e}" for name, error in theorems.items()))
