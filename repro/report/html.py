"""results/report.html: the pages and ledgers of all papers as one file, from `template.html`; all text is escaped."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ..core.errors import UserError
from .claims import Report
from .markdown import make_anchor
from .records import OUTSIDE, PIPELINE
from .template import make_environment
from .verdicts import KIND_MEANINGS, STATUSES, Status, Verdict, count_statuses, format_delta, format_ours

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

_LARGEST = 1400  # largest side of an embedded picture in pixels: a screen shows no more, and the page stays small
_PROSE = 22  # a cell with more characters holds text to read, and gets more width
_MARKS = "|".join(sorted({status.mark for status in STATUSES}, key=len, reverse=True))
# a cell with the paper's number, ours and marks, as `comparison` writes it, or marks alone; a lone dash is no mark, as
# it may stand for any value
_STATUS = rf"(?:{_MARKS})(?: \([+−][\d.]+\))?(?: / | |$)"
_CELL = re.compile(rf"(?:(?P<paper>(?!{_STATUS})[^ →]*) ?(?P<to>→ (?P<ours>[^→]+?))?(?: |$))?(?P<marks>(?:{_STATUS})*)")


def render_html(pages: Sequence[tuple[Report, str]]) -> str:
    """Return the page as HTML, with a tab for each paper where there are several; the primary paper comes first.

    Args:
        pages: (report, its page in Markdown, whose links start from the checkout's root).

    Raises:
        UserError: a picture cannot be read.
    """
    environment = make_environment(Path(__file__).parent, autoescape=True)
    first, _ = pages[0]
    environment.filters |= {"anchor": make_anchor, "delta": format_delta, "ours": format_ours}
    parser = make_parser(first.results.paths.results.resolve())
    prefixes = ["", *(f"{report.paper.id}-" for report, _ in pages[1:])]
    described = [_describe(*page, prefix, parser) for page, prefix in zip(pages, prefixes, strict=True)]
    return environment.get_template("template.html").render(pages=described, kinds=KIND_MEANINGS, statuses=STATUSES)


def _describe(report: Report, page: str, prefix: str, parser: "MarkdownIt") -> dict[str, Any]:
    """Return the template's variables for a paper, whose HTML ids begin with `prefix`.

    The page splits at its headings of the first two levels, into (title, line break, body): the first is the opening.
    """
    lead, *sections = (part.partition("\n") for part in re.split(r"^##? ", page, flags=re.M)[1:])
    return {
        "paper": report.paper,
        "prefix": prefix,
        "title": lead[0],
        "lead": render_section(parser, lead[0], lead[2], prefix),
        "sections": [
            (prefix + make_anchor(title), title, render_section(parser, title, body, prefix))
            for title, _, body in sections
        ],
        "places": list(dict.fromkeys(place for verdict in report.all for place in verdict.entry.places)),
        "counts": count_statuses(report.all),
        "verdicts": [(verdict, _explain(verdict, report)) for verdict in report.all],
    }


def render_section(parser: "MarkdownIt", title: str, body: str, prefix: str) -> str:
    """Return a section's Markdown as HTML, with ids that begin with `prefix`."""
    tokens = parser.parse(body)
    _adapt(tokens, title, prefix)
    return parser.renderer.render(tokens, parser.options, {})


def make_parser(folder: Path) -> "MarkdownIt":
    """Return a Markdown parser that embeds the pictures of a folder; raw HTML and `<links>` stay text."""
    from markdown_it import MarkdownIt
    from markdown_it.common.utils import escapeHtml

    embed = cache(partial(_embed, folder))  # several papers show the same pictures

    def render_picture(renderer: Any, tokens: "Sequence[Token]", place: int, *_: Any) -> str:
        """Return a picture in a button that enlarges it; its text alone if there is no such file."""
        alt, found = escapeHtml(tokens[place].content), embed(unquote(str(tokens[place].attrs["src"])))
        shown = found and '<img alt="{}" width="{width}" height="{height}" src="{url}">'.format(alt, **found)
        return f'<button type="button" class="zoom" title="Enlarge">{shown}</button>' if shown else alt

    def render_table(renderer: Any, tokens: "Sequence[Token]", place: int, *_: Any) -> str:
        """Return the opening tags of a table in a box that scrolls; `_adapt` and `_adapt_cell` set the token's `meta`."""
        about = tokens[place].meta
        read, label = " read" * about["is_read"], escapeHtml(about["title"])
        return f'<div class="scroll{read}" role="region" tabindex="0" aria-label="{label}, table"><table>'

    parser = (
        MarkdownIt("commonmark", {"html": False}).enable("table").disable(["autolink", "html_inline", "html_block"])
    )
    parser.add_render_rule("image", render_picture)
    parser.add_render_rule("table_open", render_table)
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return parser


def _adapt(tokens: "Sequence[Token]", title: str, prefix: str) -> None:
    """Adapt tokens in place: ids of headings, links relative to results/, and the style sheet's attributes of cells.

    An opening token, such as `td_open`, is followed by the token of its content and by its closing one.
    """
    table, labels, column = None, [], 0  # the open table, its headings, and the place of the next cell in its row
    for token, inside, end in zip_longest(tokens, tokens[1:], tokens[2:]):
        for child in token.children or ():
            if child.type == "link_open":
                href = str(child.attrs["href"])
                if href.startswith("#"):
                    href = f"#{prefix}{href[1:]}"
                elif href.startswith("results/"):
                    href = href.removeprefix("results/")
                elif not href.startswith("http"):
                    href = f"../{href}"
                child.attrs["href"] = href
        if token.type == "heading_open":
            token.attrs["id"] = prefix + make_anchor(inside.content)
        elif token.type == "table_open":
            table, labels = token, []
            table.meta = {"title": title, "is_read": False}
        elif token.type == "tr_open":
            column = 0
        elif token.type == "th_open":
            token.attrs["scope"] = "col"
            labels.append(inside.content)
        elif token.type == "td_open":
            # a first column without a title, next to columns with one, holds the heads of the rows
            if column == 0 and not labels[0] and any(labels):
                token.attrs["scope"] = "row"
                token.tag = end.tag = "th"
            else:
                _adapt_cell(token, inside, table, labels[column], is_first=column == 0)
            column += 1


def _adapt_cell(cell: "Token", inside: "Token", table: "Token", label: str, *, is_first: bool) -> None:
    """Adapt a cell that is no head: its column's label for narrow screens, its marks, and room for text to read."""
    from markdown_it.token import Token

    if label:
        cell.attrs["data-label"] = label
    text = "".join(child.content for child in inside.children or ())
    is_plain = all(child.type == "text" for child in inside.children or ())
    found = _CELL.fullmatch(text) if is_plain and text != "–" else None
    if found and (found["to"] or found["marks"]):
        inside.children = [Token("html_inline", "", 0, content=_show_compared(found))]
    elif len(text) > _PROSE and not any(child.type == "image" for child in inside.children or ()):
        cell.attrs["class"] = "prose"
        table.meta["is_read"] |= not is_first


def _show_compared(found: re.Match[str]) -> str:
    """Return a cell that matches `_CELL` as HTML."""
    from markupsafe import escape

    def show_mark(mark: re.Match[str]) -> str:
        """Return a mark with the words of its statuses, as a tooltip and for screen readers; `–` has several."""
        first, *_ = words = [status for status in STATUSES if status.mark == mark[0]]
        said = " or ".join(words)
        return f'<span class="mark {make_anchor(first)}" title="{said}">{mark[0]}<span class="unseen"> {said}</span></span>'

    paper, to, ours, marks = (escape(found[name] or "") for name in ("paper", "to", "ours", "marks"))
    ours, marks = (re.sub(_MARKS, show_mark, text) for text in (ours, marks))
    if not to:
        return f"{paper} {marks}".strip()
    return (
        f'<span class="compared"><span class="paper">{paper}</span><span class="to">→</span>'
        f'<span class="ours">{ours}</span><span>{marks}</span></span>'
    )


def _explain(verdict: Verdict, report: Report) -> list[tuple[str, str]]:
    """Return (label, text) of each detail that the page shows on demand for a verdict."""
    entry, status = verdict.entry, verdict.status
    missing = [
        ("why the paper contradicts itself", verdict.evidence),
        ("why not measured", verdict.reason),
        ("what would measure it", verdict.command),
    ]
    if status == Status.NOT_MEASURABLE:
        missing = [("why nobody can have measured it", verdict.evidence)]
    about = [
        ("entry", entry.id),
        *missing,
        ("why ours differs", verdict.explanation),
        ("agrees by", verdict.how),
        ("why it is no evidence", entry.fitted if status == Status.FITTED else None),
        *(("elsewhere", str(each)) for each in verdict.elsewhere),
    ]
    for path in verdict.sources:
        about.append(("record", path))
        if source := report.results.find(path):
            how = PIPELINE if source.stage else OUTSIDE
            about += [("device", source.device), ("parameters", how), ("parent commit", source.commit)]
    return [(label, text) for label, text in about if text]


def _embed(folder: Path, name: str) -> Mapping[str, Any] | None:
    """Return a picture's width, height and data URL; None if the folder has no such file.

    Args:
        folder: the resolved path of results/.
        name: `results/` and the picture's path in the folder.

    Raises:
        UserError: the file is not a readable picture.
    """
    from PIL import Image

    file = (folder / name.removeprefix("results/")).resolve()
    if not (file.is_file() and file.is_relative_to(folder)):
        return None
    stream = io.BytesIO()
    try:
        image = Image.open(file).convert("RGBA")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # SyntaxError: a PNG's chunks
        raise UserError(f"{file}: not a picture that can be read ({error}); make it again, or remove it") from None
    image.thumbnail((_LARGEST, _LARGEST))
    image.save(stream, "WEBP", quality=75)
    data = base64.b64encode(stream.getvalue()).decode()
    return {"width": image.width, "height": image.height, "url": f"data:image/webp;base64,{data}"}
