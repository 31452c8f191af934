"""results/report.html: the pages of all papers and their ledgers as one file, from `template.html`; all is escaped."""

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from . import document
from .claims import Report
from .document import Comparison, Line, Picture, Section, Table, make_anchor, plain
from .records import OUTSIDE, PIPELINE
from .verdicts import KINDS, STATUSES, Status, Verdict, count_statuses, format_delta, format_ours

LARGEST = 1400  # pixels across of an embedded picture; a screen shows no more, and the page stays small
PROSE = 22  # a cell with more characters than this holds text to read, and gets the width for it


def render_html(pages: Sequence[tuple[Report, Sequence[Section]]]) -> str:
    """The page, with a tab for each paper where there are several; the primary paper comes first.

    Raises:
        UserError: a picture cannot be read.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    first, _ = pages[0]
    environment.filters |= {"anchor": make_anchor, "delta": format_delta, "plain": plain}
    environment.filters["ours"] = lambda verdict: plain(format_ours(verdict))
    environment.filters["embed"] = cache(partial(_embed, first.results.paths.results.resolve()))
    for name in ("Heading", "Bullets", "Table", "Text", "Link", "Mark", "Comparison", "Picture"):
        environment.tests[name] = lambda each, kind=getattr(document, name): isinstance(each, kind)
    environment.tests |= {"prose": _is_prose, "read": _is_read}
    prefixes = ["", *(f"{report.paper.id}-" for report, _ in pages[1:])]
    described = [_describe(*page, prefix) for page, prefix in zip(pages, prefixes, strict=True)]
    return environment.get_template("template.html").render(pages=described, kinds=KINDS, statuses=STATUSES)


def _describe(report: Report, page: Sequence[Section], prefix: str) -> dict[str, Any]:
    """What the template shows of a paper, whose ids begin with `prefix`."""
    lead, *sections = page
    return {
        "paper": report.paper,
        "prefix": prefix,
        "lead": lead,
        "sections": [(prefix + make_anchor(each.title), each) for each in sections],
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
            how = PIPELINE if source.stage else OUTSIDE
            about += [("device", source.device), ("parameters", how), ("parent commit", source.commit)]
    return [(label, text) for label, text in about if text]


def _is_prose(line: Line) -> bool:
    return len(plain(*line)) > PROSE and not any(isinstance(piece, Picture | Comparison) for piece in line)


def _is_read(table: Table) -> bool:
    """Whether a cell but for the heads of the rows holds text to read."""
    return any(_is_prose(line) for _, *rest in table.rows for line in rest)


def _embed(folder: Path, picture: Picture) -> Mapping[str, Any] | None:
    """A picture's size and its data; None where its file does not lie in the folder."""
    from PIL import Image

    file = (folder / picture.file).resolve()
    if not (file.is_file() and file.is_relative_to(folder)):
        return None
    stream = io.BytesIO()
    try:
        image = Image.open(file).convert("RGBA")
    except OSError as error:
        raise UserError(f"{file}: not a picture that can be read ({error}); make it again, or remove it") from None
    image.thumbnail((LARGEST, LARGEST))
    image.save(stream, "WEBP", quality=75)
    data = base64.b64encode(stream.getvalue()).decode()
    return {"width": image.width, "height": image.height, "url": f"data:image/webp;base64,{data}"}
