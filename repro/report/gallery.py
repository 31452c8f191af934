"""The paper's figures in its order, each with our pictures of it or the command that draws them; and example pictures."""

from pathlib import Path

from .claims import Report
from .document import Block, Heading, Paragraph, Picture, Section, code, paragraph, table
from .paper import Figure
from .records import Source
from .results import Results
from .statuses import format_counts
from .variants import find_drawn


def figures_section(report: Report) -> Section:
    """The paper's figures and ours, and what the ledger says of each."""
    text = "The paper's figures in its order, and ours, with the device and the record from which each picture is drawn."
    blocks: list[Block] = [paragraph(text)]
    for figure in report.paper.figures:
        blocks += _figure(figure, report)
    return Section("Figures", tuple(blocks))


def examples_section(report: Report) -> Section:
    """What trained models see in held-out images, one row of pictures for each run."""
    results = report.results
    blocks: list[Block] = [paragraph("Held-out images with what trained models see in them. The paper prints none.")]
    runs: dict[str, list[str]] = {}
    for stage in results.scores:
        for pattern in (f"{stage}/*/examples/*.png", f"measured/*/{stage}/*/examples/*.png"):
            for name in find_pictures(results, pattern):
                runs.setdefault(name.rpartition("/examples/")[0], []).append(name)
    for run, names in runs.items():
        pictures = [Picture(name, f"{run}, {Path(name).stem}") for name in names]
        blocks += [
            paragraph(code(run), f": {describe_origin(find_beside(names[0], results), report.named)}"),
            table([""] * len(pictures), [pictures]),
        ]
    if not runs:
        blocks.append(paragraph("There are none yet: ", code("repro detect"), ", ", code("repro segment"), "."))
    return Section("Example pictures", tuple(blocks))


def picture_blocks(name: str, alt: str, report: Report) -> tuple[Paragraph, Paragraph]:
    """A picture, and below it the device and the profile of the records that it is drawn from."""
    is_ours = name.startswith("figures/")  # drawn by the report itself
    sources = find_drawn(report).get(Path(name).name, []) if is_ours else find_beside(name, report.results)
    return paragraph(Picture(name, alt)), paragraph(code(name), f": {describe_origin(sources, report.named)}")


def find_pictures(results: Results, pattern: str) -> list[str]:
    """The files of a pattern, sorted, as paths relative to results/."""
    root = results.paths.results
    return sorted(file.relative_to(root).as_posix() for file in root.glob(pattern))


def find_beside(name: str, results: Results) -> list[Source]:
    """The records that lie beside a picture or above it."""
    beside = {f"results/{folder}{end}" for folder in Path(name).parents for end in ("/metrics.json", ".json")}
    return [source for source in results.sources if source.path in beside]


def describe_origin(sources: list[Source], named: str) -> str:
    """The devices of records, and the profile that they were made with."""
    if not sources:
        return "no record beside it"
    how = named if any(source.stage for source in sources) else "run by hand"
    return f"{', '.join(dict.fromkeys(source.device for source in sources))}; {how}"


def _figure(figure: Figure, report: Report) -> list[Block]:
    results = report.results
    files = find_pictures(results, figure.files) if figure.files else []
    shared = next(
        (other for other in report.paper.figures if other.place == figure.shared_with and find_pictures(results, other.files)), None
    )
    if figure.files is None:
        state = ("It is a diagram of the method, which has nothing to measure.",)
    elif files:
        state = (f"We have {'one picture' if len(files) == 1 else f'{len(files)} pictures'}.",)
    elif shared:
        state = (f"The pictures of {shared.place} show it too.",)
    else:
        state = ("Not drawn yet: ", code(figure.command), ".")
    entries = format_counts(verdict for verdict in report.all if figure.place in verdict.entry.places)
    blocks: list[Block] = [
        Heading(figure.place),
        paragraph(f"The paper shows: {figure.shows}."),
        paragraph(*state, f" The ledger's entries on it: {entries or 'none'}."),
    ]
    for name in files:
        blocks += picture_blocks(name, f"{figure.place}, ours: {Path(name).stem}", report)
    return blocks
