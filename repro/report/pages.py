"""All pages of the report: building them from their sections, writing them, and comparing them with the checkout."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ..core.csvfile import format_csv
from ..core.record import replace_block, sweep, write_text
from . import answer, comparison, gallery, measured, variants
from .answer import note_pipeline, readme_blocks
from .claims import Report, judge_paper
from .errata import list_errata
from .gallery import list_drawings
from .html import render_html
from .markdown import place_on_page
from .paper import Paper, list_functions
from .results import Results
from .template import render_template
from .verdicts import STATUSES, count_statuses, export_rows

_PAGE, _RUNS, _ERRATA = (Path(__file__).with_name(f"{name}.md") for name in ("page", "runs", "errata"))
_ERRATA_PAGE = "results/papers/errata.md"
# a block of a page that people write: its marker and its text
_BLOCK = re.compile(r"<!-- ([\w ]+) -->\n(.*?)<!-- /\1 -->", re.S)
_Passage = tuple[str, str, str]  # file relative to the checkout, marker, text


def write_report(
    papers: Sequence[Paper], results: Results, *, passages: Iterable[_Passage] = (), with_html: bool = True
) -> str:
    """Judge the ledgers of all papers, and write pages, claims, figures and passages.

    The pages and claims are those of `Paper.page`, `Paper.runs_page` and `Paper.claims_file`.

    Args:
        papers: the primary paper first.
        results: the records.
        passages: further passages than those that the papers declare.
        with_html: whether to write report.html.

    Returns:
        A line with the number of the primary paper's entries for each status.

    Raises:
        UserError: a record or picture is damaged or of another version; nothing is then written but figures.
    """
    note_pipeline(results)  # README says how long the pipeline took
    folder = results.paths.results
    sweep(folder, folder / "figures", folder / "papers")
    reports = [judge_paper(paper, results) for paper in papers]
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)  # an output of the graph, which must exist even without a picture
    # a picture of several papers is drawn once
    drawings = {name: draw for report in reports for name, (_, draw) in list_drawings(report).items()}
    for name, draw in drawings.items():
        draw(figures / name)
    pages, files, built = _build_pages(reports)
    html = render_html(pages) if with_html else None  # a damaged picture ends this before anything is written
    _write_pages(files, [*built, *passages], results.paths.root)
    if html is not None:
        write_text(folder / "report.html", html)
    counts = count_statuses(reports[0].all)
    return " / ".join(f"{word} {counts[word]}" for word in STATUSES) + f" of {counts.total()}"


def find_outdated(papers: Sequence[Paper], results: Results, *, passages: Iterable[_Passage] = ()) -> list[str]:
    """Return the pages and blocks of pages that `write_report` would change, without pictures; write nothing."""
    root = results.paths.root
    with TemporaryDirectory() as folder:
        written = Path(folder)
        for pattern in ("README.md", "docs/*.md", "results/*.md"):  # the pages that may have blocks
            for file in sorted(root.glob(pattern)):
                write_text(written / file.relative_to(root), file.read_text(encoding="utf-8"))
        _, files, built = _build_pages([judge_paper(paper, results) for paper in papers])
        _write_pages(files, [*built, *passages], written)
        made = (file for file in sorted(written.rglob("*")) if file.is_file())
        names = [file.relative_to(written).as_posix() for file in made]
        return [each for name in names for each in _compare_files(root / name, written / name, name)]


def _build_pages(reports: Sequence[Report]) -> tuple[list[tuple[Report, str]], dict[str, str], list[_Passage]]:
    """Return the pages for report.html, the files that Git keeps by name, and the passages.

    The pages show the pictures that exist, so `write_report` draws them first.
    """
    pages, documents, passages = [], {}, []
    for report in reports:
        paper = report.paper
        runs = build_runs(report, reports)
        page = build_document(report, reports, runs)
        # report.html has one page for each paper, so the runs follow without their title
        pages.append((report, page + re.sub(r"^# .*?(?=^## |\Z)", "\n", runs, flags=re.M | re.S)))
        documents |= {paper.page: page} | ({paper.runs_page: runs} if runs else {})
        documents |= {each.file: _render(each.text, report, reports) for each in paper.documents}
        passages += build_passages(report)
    first = reports[0]
    documents[_ERRATA_PAGE] = _render(_ERRATA, first, reports)
    passages += [("README.md", name, block) for name, block in readme_blocks(reports).items()]
    claims = first.paper.ledger_file.with_name("claims.md.j2")
    if claims.is_file():
        passages.append(("README.md", "claims", _render(claims, first, reports).rstrip()))
    files = {name: place_on_page(text, name) for name, text in documents.items()}
    files |= {report.paper.claims_file: format_csv(export_rows(report.all)) for report in reports}
    return pages, files, passages


def _write_pages(files: Mapping[str, str], passages: Iterable[_Passage], root: Path) -> None:
    """Write the files, and the passages whose page has their marker, into the checkout at `root`."""
    for name, text in files.items():
        write_text(root / name, text)
    for name, marker, text in passages:
        file = root / name
        if file.is_file() and f"<!-- {marker} -->\n" in file.read_text(encoding="utf-8"):
            replace_block(file, marker, place_on_page(text, name))


def _compare_files(found: Path, expected: Path, name: str) -> list[str]:
    """Return the name of a missing or different file, or of each different block in it; empty for equal files."""
    if not found.is_file():
        return [f"{name}, which is missing"]
    if found.read_bytes() == expected.read_bytes():
        return []
    contents = [dict(_BLOCK.findall(file.read_text(encoding="utf-8"))) for file in (found, expected)]
    return [f"{name}, block {block}" for block, text in contents[1].items() if contents[0].get(block) != text] or [name]


def build_document(report: Report, reports: Sequence[Report] = (), runs: str | None = None) -> str:
    """Return a paper's page in Markdown, whose links start from the checkout's root, see `markdown.place_on_page`.

    Args:
        report: on the paper.
        reports: on all papers, to whose pages it links.
        runs: the result of `build_runs`; None to build it.
    """
    runs = build_runs(report, reports) if runs is None else runs
    return _render(_PAGE, report, reports, find_runs_page=lambda _: report.paper.runs_page if runs else "")


def build_runs(report: Report, reports: Sequence[Report] = ()) -> str:
    """Return the page of trainings on other data than the paper's; empty where it has no section."""
    page = _render(_RUNS, report, reports)
    return page if "\n## " in page else ""


def _render(file: Path, report: Report, reports: Sequence[Report], **more: Callable) -> str:
    """Fill a template with the functions of the report, of the paper and of this module.

    Of functions with one name, that of `more` is called, or else the paper's.
    """
    paper = report.paper
    parts = {
        **list_functions(answer, comparison, gallery, measured, variants),
        "name": lambda report: paper.name,
        # `places` or `about` of the paper's ablations, in words
        "find_words": lambda report, what: getattr(paper.ablations, what),
        "links": lambda report: _link_pages(reports or (report,)),
        "own_sections": lambda report: _render(paper.text, report, reports) if paper.text else "",
        "shared_counts": lambda report: comparison.shared_counts(reports) if paper.primary else "",
        "list_errata": lambda report: list_errata(reports),
    }
    return render_template(file, report, parts | {**paper.parts} | more)


def _link_pages(reports: Iterable[Report]) -> str:
    """Return the links on top of each page: front page, papers, errata and documentation, all of them kept by Git."""
    pages = {"README": "README.md"} | {each.paper.name: each.paper.page for each in reports}
    pages |= {"errata": _ERRATA_PAGE, "documentation": "docs/README.md"}
    return " · ".join(f"[{text}]({file})" for text, file in pages.items())


def build_passages(report: Report) -> list[_Passage]:
    """Return the passages that a paper declares, as (file, marker, text)."""
    return [
        (file, marker, build(report))
        for file, passages in report.paper.passages.items()
        for marker, build in passages.items()
    ]
