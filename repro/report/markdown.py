"""A page as Markdown: results/tables.md, the pages of other papers, and the blocks of README.md."""

from collections.abc import Iterable, Sequence
from urllib.parse import quote

from .document import Block, Bullets, Comparison, Heading, Line, Link, Picture, Piece, Section, Table, Text

_AROUND = {"code": "`", "strong": "**", "emphasis": "*", "number": ""}


def render_markdown(page: Sequence[Section], to_results: str = "") -> str:
    """The whole page, whose first section is its opening; `to_results` leads from its folder to results/, e.g. `../`."""
    marks = ["#"] + ["##"] * (len(page) - 1)
    bodies = [render_blocks(section.blocks, to_results) for section in page]
    parts = zip(marks, page, bodies, strict=True)
    return "\n".join(f"{mark} {section.title}\n\n{body}\n" for mark, section, body in parts)


def render_blocks(blocks: Iterable[Block], to_results: str = "") -> str:
    """Blocks with empty lines between them."""
    return "\n\n".join(_render_block(block, to_results) for block in blocks)


def _render_block(block: Block, to_results: str) -> str:
    match block:
        case Heading(title=title):
            return f"### {title}"
        case Bullets(lines=lines):
            return "\n".join(f"- {_render(line, to_results)}" for line in lines)
        case Table():
            rows = [[_render(line, to_results) for line in row] for row in block.rows]
            cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
            rule = ["---:" if right else "---" for right in block.right_aligned]
            lines = [f"| {' | '.join(block.header)} |", f"|{'|'.join(rule)}|"]
            return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])
    return _render(block, to_results)


def _render(line: Line, to_results: str) -> str:
    return "".join(_render_piece(piece, to_results) for piece in line)


def _render_piece(piece: Piece, to_results: str) -> str:
    match piece:
        case str():
            return piece.replace("<", "&lt;")
        case Text(text=text, style=style):
            return f"{_AROUND[style]}{text}{_AROUND[style]}"
        case Link(text=text):
            return f"[{text}]({piece.find_target(to_results)})"
        case Picture(file=file, text=text):
            return f"![{text}]({to_results}{quote(file)})"
        case Comparison(paper=paper, ours=ours, result=result):
            return f"{paper} → {_render((ours,), to_results)}" + (f" {_render(result, to_results)}" if result else "")
    return piece.text
