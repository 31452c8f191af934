"""All pages of the report: put together from their sections, and written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ..core.csvfile import write_csv
from ..core.errors import UserError
from ..core.record import replace_block, write_json, write_text
from . import comparison, measured
from .answer import draw_contest, lead_blocks, readme_blocks
from .claims import Verdict, judge_entries
from .document import Document, Section
from .export import export_json, export_rows
from .gallery import examples_section, figures_section
from .html import render_html
from .markdown import render_markdown
from .paper import Paper
from .records import Source
from .results import Results
from .statuses import STATUSES, count_statuses
from .variants import draw_variants, find_shown, variants_section

# what a value of another type or form than today's leads to
RECORD_ERRORS = (TypeError, ValueError, AttributeError, LookupError)


def write_report(
    papers: Sequence[Paper], results: Results, speed_dtype: str, verbs: Sequence[str], profile: str | None, *, with_html: bool = True
) -> str:
    """Judge the ledgers of all papers and write their pages, claims, figures, report.html and the blocks of README.md.

    Results: tables.md, claims.{json,csv} and figures/ for the primary paper, papers/<id>.md and papers/<id>.claims.json for each
    other, report.html for all of them.

    Args:
        papers: the primary one first.
        results: the records of the checkout.
        speed_dtype: see `judge_entries`.
        verbs: of the command line.
        profile: the profile that params.yaml equals; None where it was edited.
        with_html: also write report.html.

    Returns:
        How many entries of the primary paper have each status, as a line.

    Raises:
        UserError: a record or a picture under results/ is damaged, or a record is of another version. Nothing is then written but
            figures. A missing record leaves its entries `not measured`.
    """
    named = f"the {profile} profile" if profile else "edited parameters that equal no profile"
    figures = results.paths.results / "figures"

    def build(results: Results, figures: Path) -> tuple[list[tuple[Paper, Document, Mapping[str, Verdict]]], str | None]:
        figures.mkdir(parents=True, exist_ok=True)  # an output of the graph, also while there is nothing to draw
        pages = []
        for paper in papers:
            draw_variants(paper, results, figures)
            draw_contest(paper, results, figures)
            verdicts = judge_entries(paper, results, speed_dtype, verbs)
            pages.append((paper, build_document(paper, verdicts, results, named), verdicts))
        return pages, render_html(pages, results, profile) if with_html else None

    try:
        pages, page = build(results, figures)
    except RECORD_ERRORS as error:
        broken = find_broken_record(results, build)
        if broken is None:
            raise
        reason = f"cannot be read as a record of this version ({error}); run its stage again, or move the file out of results/"
        raise UserError(f"{broken.path}: {reason}") from error
    for paper, document, verdicts in pages:
        _write_page(paper, document, verdicts, results)
        if paper.primary:
            _update_readme(results.paths.root / "README.md", readme_blocks(paper, verdicts, results, named))
    if page is not None:
        write_text(results.paths.results / "report.html", page)
    _, _, verdicts = pages[0]
    counts = count_statuses(verdicts.values())
    return " / ".join(f"{word} {counts[word]}" for word in STATUSES) + f" of {len(verdicts)}"


def build_document(paper: Paper, verdicts: Mapping[str, Verdict], results: Results, named: str) -> Document:
    """A paper's page; that of the primary paper also shows the records that no paper is compared with.

    Args:
        paper, verdicts: the paper and what became of its entries.
        results: the records.
        named: what params.yaml holds, in words.
    """
    sections: list[Section] = [comparison.how_to_read(paper, named)]
    if paper.primary:
        sections += measured.missing_records(results)
    sections.append(comparison.summary(verdicts))
    if paper.headlines:
        sections.append(comparison.headlines(paper, verdicts))
    sections += [comparison.table_section(table, verdicts) for table in paper.ledger.tables]
    if paper.figures:
        sections.append(figures_section(paper, verdicts, results, named))
    if paper.variants:
        sections.append(variants_section(paper, results))
    if paper.ledger.paper.speed_device:
        sections.append(comparison.cost_claims(paper, verdicts))
    if paper.primary:
        sections += [
            measured.speed_and_memory(results),
            measured.other_runs(results, find_shown(paper, results)),
            examples_section(results, named),
        ]
    sections += [
        comparison.all_claims(paper, verdicts),
        comparison.contradictions(verdicts),
        comparison.not_measured(verdicts),
        comparison.where_checked(paper, verdicts, results),
    ]
    if paper.primary:
        sections.append(measured.provenance(results))
    title = "The paper's numbers and ours" if paper.primary else f"{paper.name}: the paper's numbers and ours"
    return Document(title, lead_blocks(paper, verdicts, results, named), tuple(sections))


def find_broken_record(results: Results, build) -> Source | None:
    """The record without which `build(results, folder)` succeeds; None where it fails without any one of them."""
    for source in results.sources:
        try:
            with TemporaryDirectory() as figures:
                build(results.without(source), Path(figures))
        except RECORD_ERRORS:
            continue
        return source
    return None


def _write_page(paper: Paper, document: Document, verdicts: Mapping[str, Verdict], results: Results) -> None:
    folder = results.paths.results
    if paper.primary:
        write_text(folder / paper.page, render_markdown(document))
        write_json(folder / "claims.json", export_json(paper, verdicts))
        write_csv(folder / "claims.csv", export_rows(verdicts))
    else:
        write_text(folder / paper.page, render_markdown(document, "../"))
        write_json(folder / "papers" / f"{paper.id}.claims.json", export_json(paper, verdicts))


def _update_readme(readme: Path, blocks: Mapping[str, str]) -> None:
    """Write the blocks whose markers README.md has."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    for name, block in blocks.items():
        if f"<!-- {name} -->\n" in text:
            replace_block(readme, name, block)
