"""`repro report`: the paper's numbers beside ours, and the status of each, from the records under results/."""

import dataclasses
from typing import Literal

from repro.core.config import load_section
from repro.core.paths import Paths, find_root
from repro.core.record import write_json, write_text

from . import profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportParams:
    """The `report:` section.

    Args:
        speed_dtype: precision of the rows that are set beside the paper's speed and memory; the paper does not name its own.
    """

    speed_dtype: Literal["fp32", "bf16", "fp16"] = "fp16"


def command() -> None:
    """Write results/tables.md, claims.csv and claims.json: each number of the paper, ours, and what became of it."""
    paths = find_root()
    run(load_section(ReportParams, paths.params, "report"), paths)


def run(params: ReportParams, paths: Paths) -> None:
    """Judge every entry of the ledger and write results/{tables.md, claims.csv, claims.json, figures/}.

    Raises:
        UserError: a record under results/ is damaged; a missing one leaves its entries `not measured`.
    """
    from repro.report.ablations import draw_figures
    from repro.report.claims import judge, status_counts
    from repro.report.export import claims_csv, claims_json
    from repro.report.ledger import load_ledger
    from repro.report.sources import Results
    from repro.report.tables import tables_md

    ledger = load_ledger()
    results = Results(paths, ledger.default_options, ledger.own_families)
    verdicts = judge(ledger, results, params.speed_dtype)
    write_text(paths.results / "tables.md", tables_md(ledger, verdicts, results, profile.active(paths, besides=("runtime",))))
    (paths.results / "figures").mkdir(parents=True, exist_ok=True)  # an output of the graph, also while there is nothing to draw
    draw_figures(results, paths.results / "figures")
    write_text(paths.results / "claims.csv", claims_csv(verdicts))
    write_json(paths.results / "claims.json", claims_json(ledger, verdicts))
    counts = status_counts(verdicts)
    print(
        f"matched {counts['matched']} / differs {counts['differs']} / not measured {counts['not measured']} / "
        f"paper inconsistent {counts['paper inconsistent']} of {len(verdicts)}"
    )
