"""results/report.html: tables.md and the ledger as one page without a network, from `template.html` beside this file.

Whatever comes from a record is escaped: by the template, or by the Markdown renderer, which lets no HTML through.
"""

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..core.errors import UserError
from .claims import STATUSES, Verdict, status_counts
from .sources import Results
from .wording import KINDS, MARKS, ours, signed

TEMPLATE = Path(__file__).with_name("template.html")
LEDGER = "the-ledger"
# pixels across; more is not seen on a screen, and the page stays small
_LARGEST = 1400
# characters from which on a cell is text to read, and wants a width for it
_PROSE = 22
_COMPARED = re.compile(r"(\S+) → (\S+)(?: (.+))?")
_MARK = re.compile(r"(✓ᵗ|✓|≠|⚠)")
_WORDS = {**{mark: status for status, mark in MARKS.items()}, "✓ᵗ": "matched by truncation"}
_PLACE = re.compile(
    r"Table \d(?: \(\w+\))?|Fig\. \d+[a-z]?|Eq\. \d+|Algorithm \d|Theorem [\w.]+|Section \d(?:\.\d)?|Appendix \w|Abstract", re.I
)


def report_html(verdicts: Mapping[str, Verdict], results: Results, profile: str | None, tables: str) -> str:
    """The page.

    Args:
        verdicts, results, profile: as for `tables_md`.
        tables: what `tables_md` returned.

    Raises:
        UserError: a picture cannot be read.
    """
    from jinja2 import Environment, StrictUndefined

    head, *sections = _rendered(tables, results.paths.results)
    places = dict.fromkeys(place for verdict in verdicts.values() for place in _places(verdict))
    counts = status_counts(verdicts)
    return (
        Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        .from_string(TEMPLATE.read_text(encoding="utf-8"))
        .render(
            head=head,
            sections=sections,
            ledger_id=LEDGER,
            kinds=KINDS,
            places=places,
            statuses=[(status, _slug(status), MARKS[status], counts[status]) for status in STATUSES],
            entries=[_entry(verdict, results, profile) for verdict in verdicts.values()],
        )
    )


def _entry(verdict: Verdict, results: Results, profile: str | None) -> dict[str, Any]:
    """A row of the ledger; `about` is shown on demand."""
    entry = verdict.entry
    about = [("entry", entry.id), ("paper contradicts itself", verdict.evidence), ("why not measured", verdict.reason)]
    about += [("what would measure it", verdict.command), ("matched by", verdict.how)]
    about += [("elsewhere", str(each)) for each in verdict.elsewhere]
    for path in verdict.sources:
        source = next((source for source in results.sources if source.path == path), None)
        about.append(("record", path))
        if source is not None:
            how = "none, run by hand" if path.startswith("results/measured/") else profile or "none, edited parameters"
            about += [("device", source.device), ("profile", how), ("parent commit", str(source.identity.get("parent_commit") or "–")[:12])]
    return {
        "id": entry.id,
        "status": verdict.status,
        "slug": _slug(verdict.status),
        "mark": MARKS[verdict.status],
        "kind": entry.kind,
        "place": entry.place,
        "places": "|".join(_places(verdict)),
        "says": entry.says,
        "unit": entry.unit,
        "paper": entry.printed or "",
        "ours": "" if verdict.ours is None else ours(verdict),
        "delta": "" if verdict.delta is None else signed(verdict.delta, verdict),
        "delta_value": verdict.delta,
        "ours_value": verdict.ours,
        "about": [(label, text) for label, text in about if text],
    }


def _places(verdict: Verdict) -> list[str]:
    found = [place[0].upper() + place[1:] for place in _PLACE.findall(verdict.entry.place)]
    return list(dict.fromkeys(found)) or [verdict.entry.place]


def _slug(text: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def _rendered(tables: str, folder: Path) -> list[tuple[str, str, str]]:
    """(anchor, title, HTML) of each part of tables.md: what stands before the first section, then the sections."""
    from markdown_it import MarkdownIt

    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    renderer.add_render_rule("image", lambda self, tokens, i, options, env: _image(tokens[i], folder))
    parts = []
    for part in re.split(r"(?m)^## ", tables):
        title, _, body = part.partition("\n") if parts else ("", "", part)
        tokens = renderer.parse(body)
        for i, token in enumerate(tokens):
            if token.type == "heading_open":
                token.attrSet("id", _slug(tokens[i + 1].content))
        _mark_cells(tokens)
        text = renderer.renderer.render(tokens, renderer.options, {})
        name = html.escape(title or "table", quote=True)
        box = f'<div class="scroll" role="region" tabindex="0" aria-label="{name}, table">'
        parts.append((_slug(title), title, text.replace("<table>", f"{box}<table>").replace("</table>", "</table></div>")))
    return parts


def _mark_cells(tokens: Sequence[Any]) -> None:
    """In the cells of tables: numbers of the paper and ours one below the other, and a word and a colour with each mark."""
    header: list[str] = []
    column = 0
    for i, (before, token) in enumerate(pairwise(tokens)):
        if before.type == "thead_open":
            header = []
        elif before.type == "tr_open":
            column = 0
        elif before.type == "th_open":
            before.attrSet("scope", "col")
            header.append(token.content)
        elif before.type == "td_open":
            if not (column or header[0]) and any(header):  # a corner left empty: the first column names the rows
                before.tag = tokens[i + 2].tag = "th"
                before.attrSet("scope", "row")
            compared = _COMPARED.fullmatch(token.content)
            alone = header[column] in ("status", "mark")
            if compared and header[column]:
                paper, our, marks = (part or "" for part in compared.groups())
                our = html.escape(our) if our != MARKS["not measured"] else _marked(our, alone=True)
                numbers = f'<span class="paper">{html.escape(paper)}</span><span class="to">→</span><span class="ours">{our}</span>'
                _replace(token, f'<span class="compared">{numbers}<span>{_marked(marks)}</span></span>')
            elif len(token.content) > _PROSE and "![" not in token.content:
                before.attrJoin("class", "prose")
            if not compared and "`" not in token.content and "[" not in token.content and (alone or _MARK.search(token.content)):
                _replace(token, _marked(token.content, alone=alone))
            column += 1


def _replace(token: Any, text: str) -> None:
    token.children = [type(token)("html_inline", "", 0, content=text)]


def _marked(text: str, *, alone: bool = False) -> str:
    """Escaped text with each mark in its colour, and its word for those who do not see the colour; `alone`: a dash is a mark too."""
    pattern = re.compile(f"{_MARK.pattern[:-1]}|{MARKS['not measured']})") if alone else _MARK

    def mark(found: re.Match) -> str:
        word = _WORDS[found[0]]
        return f'<span class="mark {_slug(word.partition(" by ")[0])}" title="{word}">{found[0]}<span class="unseen"> {word}</span></span>'

    return pattern.sub(mark, html.escape(text))


def _image(token: Any, folder: Path) -> str:
    """An embedded picture that opens large; its alternative text alone where the file is no picture of results/."""
    from PIL import Image

    text = html.escape(token.content, quote=True)
    file = (folder / unquote(token.attrs["src"])).resolve()
    if not (file.is_file() and file.is_relative_to(folder.resolve())):
        return text
    stream = io.BytesIO()
    try:
        picture = Image.open(file).convert("RGBA")
    except OSError as error:
        raise UserError(f"{file}: not a picture that can be read ({error}); make it again, or remove it") from None
    picture.thumbnail((_LARGEST, _LARGEST))
    picture.save(stream, "WEBP", quality=85)
    data = base64.b64encode(stream.getvalue()).decode()
    size = f'width="{picture.width}" height="{picture.height}"'
    return f'<button type="button" class="zoom" title="Enlarge"><img alt="{text}" {size} src="data:image/webp;base64,{data}"></button>'
