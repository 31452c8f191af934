"""All pages of the report: put together from their sections, and written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ..core.csvfile import write_csv
from ..core.errors import UserError
from ..core.record import replace_block, write_json, write_text
from . import comparison, measured
from .answer import draw_contest, lead_blocks, note_pipeline, readme_blocks
from .claims import Report, judge_paper
from .document import Section
from .gallery import examples_section, figures_section
from .html import render_html
from .markdown import render_blocks, render_markdown
from .paper import Paper
from .records import Source
from .results import Results
from .variants import draw_variants, find_shown, variants_section
from .verdicts import STATUSES, count_statuses, export_json, export_rows

# what a value of another type or form than today's leads to
RECORD_ERRORS = (TypeError, ValueError, AttributeError, LookupError)


def write_report(
    papers: Sequence[Paper], results: Results, speed_dtype: str, verbs: Sequence[str], profile: str | None, *, with_html: bool = True
) -> str:
    """Judge the ledgers of all papers, the primary one first, and write their pages, claims, figures, passages and the blocks of README.md.

    Results: tables.md, claims.{json,csv} and figures/ for the primary paper, papers/<id>.md and papers/<id>.claims.json for each
    other, and, `with_html`, report.html for all of them. For `speed_dtype`, `verbs` and `profile` see `judge_paper`.

    Returns:
        How many entries of the primary paper have each status, as a line.

    Raises:
        UserError: a record or a picture under results/ is damaged, or a record is of another version. Nothing is then written but
            figures. A missing record leaves its entries `not measured`.
    """

    def build(results: Results, figures: Path) -> tuple[list[tuple[Report, list[Section]]], list[tuple[Path, str, str]], str | None]:
        figures.mkdir(parents=True, exist_ok=True)  # an output of the graph, also while there is nothing to draw
        pages, passages = [], []
        for paper in papers:
            report = judge_paper(paper, results, speed_dtype=speed_dtype, verbs=verbs, profile=profile)
            draw_variants(report, figures)
            draw_contest(report, figures)
            pages.append((report, build_document(report)))
            passages += build_passages(report)
        return pages, passages, render_html(pages) if with_html else None

    folder = results.paths.results
    try:
        pages, passages, html = build(results, folder / "figures")
    except RECORD_ERRORS as error:
        broken = find_broken_record(results, build)
        if broken is None:
            raise
        reason = f"cannot be read as a record of this version ({error}); run its stage again, or move the file out of results/"
        raise UserError(f"{broken.path}: {reason}") from error
    note_pipeline(pages[0][0])
    for report, page in pages:
        _write_page(report, page)
        for document in report.paper.documents:
            write_text(results.paths.root / "docs" / document.file, render_markdown(document.build(report), "../results/"))
    for passage in passages:
        write_passage(*passage)
    if html is not None:
        write_text(folder / "report.html", html)
    counts = count_statuses(pages[0][0].all)
    return " / ".join(f"{word} {counts[word]}" for word in STATUSES) + f" of {counts.total()}"


def build_document(report: Report) -> list[Section]:
    """A paper's page, its opening first; that of the primary paper also shows the records that no paper is compared with."""
    paper, results = report.paper, report.results
    title = "The paper's numbers and ours" if paper.primary else f"{paper.name}: the paper's numbers and ours"
    page = [Section(title, lead_blocks(report)), comparison.how_to_read(report)]
    if paper.primary:
        page += measured.missing_records(results)
    page.append(comparison.summary(report))
    if paper.headlines:
        page.append(comparison.headlines(report))
    page += [comparison.table_section(table, report) for table in paper.ledger.tables]
    if paper.figures:
        page.append(figures_section(report))
    if paper.variants:
        page.append(variants_section(report))
    if paper.ledger.paper.speed_device:
        page.append(comparison.cost_claims(report))
    if paper.primary:
        page += [measured.speed_and_memory(results), measured.other_runs(results, find_shown(report)), *measured.searches(results)]
        page.append(examples_section(report))
    page += [section for build_section in paper.sections for section in build_section(report)]
    page += [comparison.all_claims(report), comparison.contradictions(report), comparison.differences(report)]
    page += [*comparison.not_measurable(report), comparison.not_measured(report), comparison.where_checked(report)]
    if paper.primary:
        page.append(measured.provenance(results))
    return page


def build_passages(report: Report) -> list[tuple[Path, str, str]]:
    """(file, marker, text) of each passage that a paper's room declares."""
    root = report.results.paths.root
    return [
        (root / file, marker, render_blocks(build(report), f"{'../' * file.count('/')}results/"))
        for file, passages in report.paper.passages.items()
        for marker, build in passages.items()
    ]


def find_broken_record(results: Results, build: Callable[[Results, Path], object]) -> Source | None:
    """The record without which `build(results, folder for figures)` succeeds; None where it fails without any one of them."""
    for source in results.sources:
        try:
            with TemporaryDirectory() as figures:
                build(results.without(source), Path(figures))
        except RECORD_ERRORS:
            continue
        return source
    return None


def _write_page(report: Report, page: list[Section]) -> None:
    paper, folder = report.paper, report.results.paths.results
    claims = export_json(paper.ledger.paper.version, report.all)
    if not paper.primary:
        write_text(folder / "papers" / f"{paper.id}.md", render_markdown(page, "../"))
        write_json(folder / "papers" / f"{paper.id}.claims.json", claims)
        return
    write_text(folder / "tables.md", render_markdown(page))
    write_json(folder / "claims.json", claims)
    write_csv(folder / "claims.csv", export_rows(report.all))
    for name, block in readme_blocks(report).items():
        write_passage(report.results.paths.root / "README.md", name, block)


def write_passage(file: Path, marker: str, text: str) -> None:
    """Write what stands between two markers, where the file has them."""
    if file.is_file() and f"<!-- {marker} -->\n" in file.read_text(encoding="utf-8"):
        replace_block(file, marker, text)
