"""`repro report`: the paper's numbers beside ours, and the status of each, from the records under results/."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import load_section
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.record import write_json, write_text

from . import Stage, profile

# what a value of another type or form than today's leads to
_ODD = (TypeError, ValueError, AttributeError, LookupError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportParams:
    """The `report:` section.

    Args:
        speed_dtype: precision of the rows that are set beside the paper's speed and memory; the paper does not name its own.
    """

    speed_dtype: Literal["fp32", "bf16", "fp16"] = "fp16"


STAGE = Stage(params=ReportParams)


def command(
    html: Annotated[bool, typer.Option("--html/--no-html", help="Also report.html, the same as one page for a browser.")] = True,
) -> None:
    """Write results/tables.md, report.html, claims.csv and claims.json: each number of the paper, ours, and what became of it."""
    paths = find_root()
    run(load_section(ReportParams, paths.params, "report"), paths, html=html)


def run(params: ReportParams, paths: Paths, *, html: bool = True) -> None:
    """Judge every entry of the ledger and write results/{tables.md, claims.csv, claims.json, figures/}, and with `html` report.html.

    Raises:
        UserError: a record or a picture under results/ is damaged, or a record of another version; a missing one leaves its entries `not measured`.
    """
    from repro.report.ledger import load_ledger
    from repro.report.sources import Results

    ledger = load_ledger()
    results = Results(paths, ledger.default_options, ledger.own_families)
    try:
        pages, line = _pages(params, ledger, results, html, paths.results / "figures")
    except _ODD as error:
        blamed = _blamed(error, params, ledger, results, html)
        if blamed is None:
            raise
        raise blamed from error
    for name, content in pages.items():
        (write_text if isinstance(content, str) else write_json)(paths.results / name, content)
    print(line)


def _pages(params: ReportParams, ledger: Any, results: Any, html: bool, figures: Path) -> tuple[dict[str, Any], str]:
    """File under results/ -> its content, and the line of counts; what the report draws itself goes into `figures` before."""
    from repro.report.ablations import draw_figures
    from repro.report.claims import STATUSES, judge, status_counts
    from repro.report.export import claims_csv, claims_json
    from repro.report.page import report_html
    from repro.report.tables import tables_md

    figures.mkdir(parents=True, exist_ok=True)  # an output of the graph, also while there is nothing to draw
    draw_figures(results, ledger, figures)
    verdicts = judge(ledger, results, params.speed_dtype)
    named = profile.active(results.paths, besides=("runtime",))
    tables = tables_md(ledger, verdicts, results, named)
    pages = {"tables.md": tables, "claims.csv": claims_csv(verdicts), "claims.json": claims_json(ledger, verdicts)}
    if html:
        pages["report.html"] = report_html(verdicts, results, named, tables)
    counts = status_counts(verdicts)
    return pages, " / ".join(f"{status} {counts[status]}" for status in STATUSES) + f" of {len(verdicts)}"


def _blamed(error: Exception, params: ReportParams, ledger: Any, results: Any, html: bool) -> UserError | None:
    """The error as one line that names the record without which it does not occur; None where it occurs without each."""
    for source in results.sources:
        try:
            with tempfile.TemporaryDirectory() as figures:
                _pages(params, ledger, results.without(source), html, Path(figures))
        except _ODD:
            continue
        return UserError(
            f"{source.path}: cannot be read as a record of this version ({error}); run its stage again, or move the file out of results/"
        )
    return None
