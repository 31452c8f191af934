"""`repro theory`: what can be checked of the paper by arithmetic alone. Theorems in fp64, closed forms, a search behind its FLOPs."""

from . import Stage

STAGE = Stage(models=lambda params: ["vittt_tiny_patch16_224"])


def command() -> None:
    """Check the paper by arithmetic."""
    import time

    from repro.core.csvfile import write_csv
    from repro.core.paths import find_root
    from repro.core.record import make_identity, write_record
    from repro.papers.vision_ttt.closed_forms import list_closed_forms
    from repro.papers.vision_ttt.flop_search import run_flop_search
    from repro.papers.vision_ttt.theorems import Sizes, measure_theorems

    paths, started, sizes = find_root(), time.monotonic(), Sizes()
    folder = paths.results / "theory"
    print("theory: measuring theorems, and searching the terms behind the paper's FLOPs")
    search, hypotheses = run_flop_search()
    metrics = {"theorems": measure_theorems(sizes), "closed_forms": list_closed_forms(), "flop_search": search}
    write_csv(folder / "flop_terms.csv", hypotheses)
    identity = make_identity(paths.root, ["stages.theory"], sizes, device="cpu", dtype="fp64", backend="reference")
    write_record(folder, metrics, identity, time.monotonic() - started)
    best = ", ".join(f"{found['explained']} by {rule}" for rule, found in search["best"].items())
    print(f"theory: of {search['entries']} FLOPs, the best of {search['hypotheses']} hypotheses explain {best}")
