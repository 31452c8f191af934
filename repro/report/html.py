"""results/report.html: the pages of all papers and their ledgers as one file, from `template.html`; all is escaped."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from .claims import Report
from .document import (
    Block,
    Bullets,
    Comparison,
    Heading,
    Line,
    Link,
    Mark,
    Picture,
    Piece,
    Section,
    Table,
    Text,
    make_anchor,
    plain,
)
from .records import OUTSIDE
from .verdicts import KINDS, STATUSES, Status, Verdict, count_statuses, format_delta, format_ours

LARGEST = 1400  # pixels across of an embedded picture; a screen shows no more, and the page stays small
TAGS = {"code": "code", "strong": "strong", "emphasis": "em"}  # of styles; numbers have none
PROSE = 22  # a cell with more characters than this holds text to read, and gets the width for it


def render_html(pages: Sequence[tuple[Report, Sequence[Section]]]) -> str:
    """The page, with a tab for each paper where there are several; the primary paper comes first.

    Raises:
        UserError: a picture cannot be read.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"anchor": make_anchor, "delta": format_delta}
    environment.filters["ours"] = lambda verdict: plain(format_ours(verdict))
    prefixes = ["", *(f"{report.paper.id}-" for report, _ in pages[1:])]
    described = [_describe(*page, prefix) for page, prefix in zip(pages, prefixes, strict=True)]
    template = environment.from_string(Path(__file__).with_name("template.html").read_text(encoding="utf-8"))
    return template.render(pages=described, kinds=KINDS, statuses=STATUSES)


def _describe(report: Report, page: Sequence[Section], prefix: str) -> dict[str, Any]:
    """What the template shows of a paper, whose ids begin with `prefix`."""
    render = _Renderer(report.results.paths.results, prefix)
    (_, title, lead), *sections = [(prefix + make_anchor(each.title), each.title, render.blocks(each)) for each in page]
    return {
        "paper": report.paper,
        "prefix": prefix,
        "title": title,
        "lead": lead,
        "sections": sections,
        "places": list(dict.fromkeys(place for verdict in report.all for place in verdict.entry.places)),
        "counts": count_statuses(report.all),
        "verdicts": [(verdict, _explain(verdict, report)) for verdict in report.all],
    }


def _explain(verdict: Verdict, report: Report) -> list[tuple[str, str]]:
    """(label, text) of what is shown of a verdict on demand."""
    entry, status = verdict.entry, verdict.status
    about = [("entry", entry.id)]
    if status == Status.NOT_MEASURABLE:
        about.append(("why nobody can have measured it", verdict.evidence))
    else:
        about += [("why the paper contradicts itself", verdict.evidence), ("why not measured", verdict.reason)]
        about.append(("what would measure it", verdict.command))
    about += [("why ours differs", verdict.explanation), ("agrees by", verdict.how)]
    about.append(("why it is no evidence", entry.fitted if status == Status.FITTED else None))
    about += [("elsewhere", str(each)) for each in verdict.elsewhere]
    for path in verdict.sources:
        about.append(("record", path))
        if source := report.results.find(path):
            how = report.named if source.stage else OUTSIDE
            about += [("device", source.origin), ("parameters", how), ("parent commit", source.commit)]
    return [(label, text) for label, text in about if text]


def _is_prose(line: Line) -> bool:
    return len(plain(*line)) > PROSE and not any(isinstance(piece, Picture | Comparison) for piece in line)


class _Renderer:
    """Blocks as HTML; `prefix` begins every id, and `folder` holds the pictures."""

    def __init__(self, folder: Path, prefix: str):
        self.folder, self.prefix = folder.resolve(), prefix

    def blocks(self, section: Section) -> str:
        return "\n".join(self._block(block, section.title) for block in section.blocks)

    def _block(self, block: Block, title: str) -> str:
        match block:
            case Heading(title=own):
                return f'<h3 id="{self.prefix}{escape(make_anchor(own))}">{escape(own)}</h3>'
            case Bullets(lines=lines):
                return f"<ul>{''.join(f'<li>{self._line(line)}</li>' for line in lines)}</ul>"
            case Table():
                return self._table(block, title)
        return f"<p>{self._line(block)}</p>"

    def _table(self, block: Table, title: str) -> str:
        styles = [' style="text-align:right"' if right else "" for right in block.right_aligned]
        heads = zip(block.header, styles, strict=True)
        head = "".join(f'<th scope="col"{style}>{escape(text)}</th>' for text, style in heads)
        rows, is_read = "", False
        for first, *rest in block.rows:
            is_read |= any(map(_is_prose, rest))
            row_head = self._cell(first, styles[0], block.header[0])
            if block.has_row_heads:
                row_head = f'<th scope="row">{self._line(first)}</th>'
            rows += f"<tr>{row_head}{''.join(map(self._cell, rest, styles[1:], block.header[1:]))}</tr>"
        # a table with text to read is stacked on a phone, where its last columns would lie beyond the screen
        box = f'<div class="scroll{" read" if is_read else ""}" role="region" tabindex="0" aria-label="{escape(title)}, table">'
        return f"{box}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"

    def _cell(self, line: Line, style: str, label: str) -> str:
        prose = ' class="prose"' if _is_prose(line) else ""
        named = f' data-label="{escape(label)}"' if label else ""
        return f"<td{style}{prose}{named}>{self._line(line)}</td>"

    def _line(self, line: Line) -> str:
        return "".join(self._piece(piece) for piece in line)

    def _piece(self, piece: Piece) -> str:
        match piece:
            case Text(text=text, style=style) if style in TAGS:
                return f"<{TAGS[style]}>{escape(text)}</{TAGS[style]}>"
            case Link(text=text):
                return f'<a href="{escape(piece.find_target(prefix=self.prefix))}">{escape(text)}</a>'
            case Mark(text=text, word=word):
                unseen = f'<span class="unseen"> {word}</span>'
                return f'<span class="mark {make_anchor(word)}" title="{word}">{text}{unseen}</span>'
            case Comparison(paper=paper, ours=ours, result=result):
                numbers = f'<span class="paper">{escape(paper)}</span><span class="to">→</span><span class="ours">{self._piece(ours)}</span>'
                return f'<span class="compared">{numbers}<span>{self._line(result)}</span></span>'
            case Picture():
                return self._picture(piece)
        return escape(plain(piece))

    def _picture(self, picture: Picture) -> str:
        """An embedded picture that opens large; its text alone where the file does not lie in results/."""
        from PIL import Image

        file = (self.folder / picture.file).resolve()
        if not (file.is_file() and file.is_relative_to(self.folder)):
            return escape(picture.text)
        stream = io.BytesIO()
        try:
            image = Image.open(file).convert("RGBA")
        except OSError as error:
            raise UserError(f"{file}: not a picture that can be read ({error}); make it again, or remove it") from None
        image.thumbnail((LARGEST, LARGEST))
        image.save(stream, "WEBP", quality=85)
        data = base64.b64encode(stream.getvalue()).decode()
        shown = f'<img alt="{escape(picture.text)}" width="{image.width}" height="{image.height}" src="data:image/webp;base64,{data}">'
        return f'<button type="button" class="zoom" title="Enlarge">{shown}</button>'
