"""results/report.html: the pages of all papers and their ledgers as one file that needs no network, from `template.html`.

Whatever comes from a record is escaped, here or by the template.
"""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from .claims import Report, Verdict
from .document import Block, Bullets, Comparison, Document, Heading, Line, Link, Mark, Picture, Piece, Table, Text, make_anchor, plain
from .statuses import KINDS, STATUSES, count_statuses
from .wording import format_delta, format_ours

TEMPLATE = Path(__file__).with_name("template.html")
LARGEST = 1400  # pixels across of an embedded picture; a screen shows no more, and the page stays small
TAGS = {"code": "code", "strong": "strong", "emphasis": "em"}  # of styles; numbers have none
PROSE = 22  # a cell with more characters than this holds text to read, and gets the width for it


def render_html(pages: Sequence[tuple[Report, Document]]) -> str:
    """The page, with a tab for each paper where there are several; the primary paper comes first.

    Raises:
        UserError: a picture cannot be read.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    papers = [_describe(report, document, is_first=not place) for place, (report, document) in enumerate(pages)]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(papers=papers, kinds=KINDS)


def _describe(report: Report, document: Document, *, is_first: bool) -> dict[str, Any]:
    """What the template shows of a paper. Its ids begin with the paper's, but for the first one's."""
    paper, counts = report.paper, count_statuses(report.all)
    render = _Renderer(report.results.paths.results, "" if is_first else f"{paper.id}-")
    return {
        "id": paper.id,
        "name": paper.name,
        "model": paper.model,
        "prefix": render.prefix,
        "title": document.title,
        "lead": render.blocks(document.lead, document.title),
        "sections": [
            (render.prefix + make_anchor(each.title), each.title, render.blocks(each.blocks, each.title)) for each in document.sections
        ],
        "places": list(dict.fromkeys(place for verdict in report.all for place in verdict.entry.places)),
        "statuses": [(status.word, make_anchor(status.word), status.mark, counts[status.word]) for status in STATUSES.values()],
        "entries": [_entry(verdict, report) for verdict in report.all],
    }


def _entry(verdict: Verdict, report: Report) -> dict[str, Any]:
    """A row of the ledger. `about` is shown on demand."""
    entry, sources = verdict.entry, {source.path: source for source in report.results.sources}
    about = [("entry", entry.id), ("why the paper contradicts itself", verdict.evidence), ("why not measured", verdict.reason)]
    about += [("what would measure it", verdict.command), ("matched by", verdict.how)]
    about += [("elsewhere", str(each)) for each in verdict.elsewhere]
    for path in verdict.sources:
        about.append(("record", path))
        if source := sources.get(path):
            commit = str(source.identity.get("parent_commit") or "–")[:12]
            about += [("device", source.device), ("parameters", report.named if source.stage else "run by hand"), ("parent commit", commit)]
    return {
        "id": entry.id,
        "status": verdict.status,
        "slug": make_anchor(verdict.status),
        "mark": STATUSES[verdict.status].mark,
        "kind": entry.kind,
        "place": entry.place,
        "places": "|".join(entry.places),
        "says": entry.says,
        "unit": entry.unit,
        "paper": entry.printed or "",
        "ours": "" if verdict.ours is None else format_ours(verdict),
        "delta": "" if verdict.delta is None else format_delta(verdict),
        "delta_value": verdict.delta,
        "ours_value": verdict.ours,
        "about": [(label, text) for label, text in about if text],
    }


class _Renderer:
    """Blocks as HTML; `prefix` begins every id, and `folder` holds the pictures."""

    def __init__(self, folder: Path, prefix: str):
        self.folder, self.prefix = folder.resolve(), prefix

    def blocks(self, blocks: Sequence[Block], title: str) -> str:
        return "\n".join(self._block(block, title) for block in blocks)

    def _block(self, block: Block, title: str) -> str:
        match block:
            case Heading(title=own):
                return f'<h3 id="{self.prefix}{_escape(make_anchor(own))}">{_escape(own)}</h3>'
            case Bullets(lines=lines):
                return f"<ul>{''.join(f'<li>{self._line(line)}</li>' for line in lines)}</ul>"
            case Table():
                return self._table(block, title)
        return f"<p>{self._line(block.line)}</p>"

    def _table(self, block: Table, title: str) -> str:
        aligned = block.right_aligned
        head = "".join(f'<th scope="col"{_right(right)}>{_escape(text)}</th>' for text, right in zip(block.header, aligned, strict=True))
        rows = "".join(
            f"<tr>{''.join(self._cell(line, block, column, aligned[column]) for column, line in enumerate(row))}</tr>" for row in block.rows
        )
        box = f'<div class="scroll" role="region" tabindex="0" aria-label="{_escape(title)}, table">'
        return f"{box}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"

    def _cell(self, line: Line, block: Table, column: int, right: bool) -> str:
        if block.has_row_heads and column == 0:
            return f'<th scope="row">{self._line(line)}</th>'
        is_prose = len(plain(line)) > PROSE and not any(isinstance(piece, Picture | Comparison) for piece in line)
        prose = ' class="prose"' if is_prose else ""
        return f"<td{_right(right)}{prose}>{self._line(line)}</td>"

    def _line(self, line: Line) -> str:
        return "".join(self._piece(piece) for piece in line)

    def _piece(self, piece: Piece) -> str:
        match piece:
            case Text(text=text, style=style) if style in TAGS:
                return f"<{TAGS[style]}>{_escape(text)}</{TAGS[style]}>"
            case Link(text=text, section=section):
                return f'<a href="#{self.prefix}{_escape(make_anchor(section))}">{_escape(text)}</a>'
            case Mark():
                unseen = f'<span class="unseen"> {piece.word}</span>'
                return f'<span class="mark {make_anchor(piece.status.word)}" title="{piece.word}">{piece.text}{unseen}</span>'
            case Comparison(paper=paper, ours=ours, result=result):
                numbers = (
                    f'<span class="paper">{_escape(paper)}</span><span class="to">→</span><span class="ours">{self._piece(ours)}</span>'
                )
                return f'<span class="compared">{numbers}<span>{self._line(result)}</span></span>'
            case Picture():
                return self._picture(piece)
        return _escape(plain((piece,)))

    def _picture(self, picture: Picture) -> str:
        """An embedded picture that opens large; its text alone where the file does not lie in results/."""
        from PIL import Image

        file = (self.folder / picture.file).resolve()
        if not (file.is_file() and file.is_relative_to(self.folder)):
            return _escape(picture.text)
        stream = io.BytesIO()
        try:
            image = Image.open(file).convert("RGBA")
        except OSError as error:
            raise UserError(f"{file}: not a picture that can be read ({error}); make it again, or remove it") from None
        image.thumbnail((LARGEST, LARGEST))
        image.save(stream, "WEBP", quality=85)
        data = base64.b64encode(stream.getvalue()).decode()
        shown = f'<img alt="{_escape(picture.text)}" width="{image.width}" height="{image.height}" src="data:image/webp;base64,{data}">'
        return f'<button type="button" class="zoom" title="Enlarge">{shown}</button>'


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _right(right: bool) -> str:
    return ' style="text-align:right"' if right else ""
