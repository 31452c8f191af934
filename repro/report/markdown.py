"""A `document.Document` as Markdown: results/tables.md, the pages of other papers, and the blocks of README.md."""

from urllib.parse import quote

from .document import (
    Block,
    Bullets,
    Code,
    Comparison,
    Document,
    Emphasis,
    Heading,
    Line,
    Link,
    Mark,
    Picture,
    Piece,
    Strong,
    Table,
    make_anchor,
)


def render_markdown(document: Document, to_results: str = "") -> str:
    """The whole page; `to_results` leads from its folder to results/, e.g. `../`."""
    parts = [f"# {document.title}", *(render_block(block, to_results) for block in document.lead)]
    for section in document.sections:
        parts += [f"## {section.title}", *(render_block(block, to_results) for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def render_block(block: Block, to_results: str = "") -> str:
    """One block, without a line break at its end."""
    match block:
        case Heading(title=title):
            return f"### {title}"
        case Bullets(lines=lines):
            return "\n".join(f"- {_render(line, to_results)}" for line in lines)
        case Table():
            rows = [[_render(line, to_results).replace("|", "\\|").replace("\n", " ") for line in row] for row in block.rows]
            rule = ["---:" if right else "---" for right in block.right_aligned]
            return "\n".join([f"| {' | '.join(block.header)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)])
    return _render(block.line, to_results)


def _render(line: Line, to_results: str) -> str:
    return "".join(_render_piece(piece, to_results) for piece in line)


def _render_piece(piece: Piece, to_results: str) -> str:
    match piece:
        case str():
            return piece.replace("<", "&lt;")
        case Code(text=text):
            return f"`{text}`"
        case Strong(text=text):
            return f"**{text}**"
        case Emphasis(text=text):
            return f"*{text}*"
        case Link(text=text, section=section):
            return f"[{text}](#{make_anchor(section)})"
        case Picture(file=file, alt=alt):
            return f"![{alt}]({to_results}{quote(file)})"
        case Mark():
            return piece.shown
        case Comparison(paper=paper, ours=ours, result=result):
            return f"{paper} → {_render_piece(ours, to_results)}" + (f" {_render(result, to_results)}" if result else "")
    return piece.text
