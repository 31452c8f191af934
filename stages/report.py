"""`repro report`: the paper's numbers beside ours, and the status of each, from the records under results/."""

import dataclasses
from typing import Annotated, Literal

import typer

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


def command(
    html: Annotated[bool, typer.Option("--html/--no-html", help="Also report.html, the same as one page for a browser.")] = True,
) -> None:
    """Write results/tables.md, report.html, claims.csv and claims.json: each number of the paper, ours, and what became of it."""
    paths = find_root()
    run(load_section(ReportParams, paths.params, "report"), paths, html=html)


def run(params: ReportParams, paths: Paths, *, html: bool = True) -> None:
    """Judge every entry of the ledger and write results/{tables.md, claims.csv, claims.json}, and with `html` report.html.

    Raises:
        UserError: a record under results/ is damaged or of another version; a missing one leaves its entries `not measured`.
    """
    from repro.report.claims import judge, status_counts
    from repro.report.export import claims_csv, claims_json
    from repro.report.ledger import load_ledger
    from repro.report.page import report_html
    from repro.report.sources import Results
    from repro.report.tables import tables_md

    ledger = load_ledger()
    results = Results(paths, ledger.default_options, ledger.own_families)
    verdicts = judge(ledger, results, params.speed_dtype)
    named = profile.active(paths, besides=("runtime",))
    tables = tables_md(ledger, verdicts, results, named)
    write_text(paths.results / "tables.md", tables)
    if html:
        write_text(paths.results / "report.html", report_html(ledger, verdicts, results, named, tables))
    write_text(paths.results / "claims.csv", claims_csv(verdicts))
    write_json(paths.results / "claims.json", claims_json(ledger, verdicts))
    counts = status_counts(verdicts)
    print(
        f"matched {counts['matched']} / differs {counts['differs']} / not measured {counts['not measured']} / "
        f"paper inconsistent {counts['paper inconsistent']} of {len(verdicts)}"
    )
