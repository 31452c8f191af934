"""The paper's figures in its order, each with our pictures of it or the command that draws them; and example pictures."""

from collections.abc import Sequence
from pathlib import Path

from .claims import Report
from .contest import plan_contest
from .dense import plan_dense
from .document import Block, Heading, Line, Picture, code, prose, table
from .paper import Drawings
from .records import Source, describe_age, describe_twins, group_by
from .results import Results
from .variants import plan_figures
from .verdicts import format_counts

OUTSIDE = "outside the pipeline"  # of a record that a person's own command made


def list_figures(report: Report) -> list[Block]:
    """The paper's figures and ours, and what the ledger says of each."""
    drawn = {each.place: find_pictures(report.results, each.files) for each in report.paper.figures}
    blocks: list[Block] = []
    for figure in report.paper.figures:
        files = drawn[figure.place]
        if files:
            state = f"We have {'one picture' if len(files) == 1 else f'{len(files)} pictures'}."
        elif drawn.get(figure.shared_with):
            state = f"The pictures of {figure.shared_with} show it too."
        else:
            state = f"Not drawn yet: `{figure.command}`."
        entries = format_counts(verdict for verdict in report.all if figure.place in verdict.entry.places)
        about = prose(f"{state} Entries: {entries or 'none'}.")
        blocks += [Heading(figure.place), (f"The paper shows: {figure.shows}.",), about]
        for name in files:
            blocks += picture_blocks(name, f"{figure.place}, ours: {Path(name).stem}", report)
    return blocks


def list_examples(report: Report) -> list[Block]:
    """What trained models see in held-out images, a row of pictures for each run; then the pictures of dense tasks."""
    results = report.results
    blocks: list[Block] = []
    patterns = (f"{where}{stage}/*/examples/*.png" for stage in results.scores for where in ("", "measured/*/"))
    files = (name for pattern in patterns for name in find_pictures(results, pattern))
    for run, names in group_by(files, lambda name: name.rpartition("/examples/")[0]).items():
        beside = find_beside(names[0], results)
        if all(results.stands_on(report.paper, source.metrics["model"]) for source in beside):
            pictures = [Picture(name, f"{run}, {Path(name).stem}") for name in names]
            blocks += [_origin_line(run, beside, report), table([""] * len(pictures), [pictures])]
    for name, (sources, _) in plan_dense(report).items():
        picture = Picture(f"figures/{name}", Path(name).stem.replace("_", " "))
        blocks += [(picture,), _origin_line(picture.file, sources, report)]
    return blocks


def picture_blocks(name: str, alt: str, report: Report) -> tuple[Line, Line]:
    """A picture, and below it the device and the profile of the records that it is drawn from."""
    is_ours = name.startswith("figures/")  # drawn by the report itself
    sources = list_drawings(report).get(Path(name).name, ([],))[0] if is_ours else find_beside(name, report.results)
    return (Picture(name, alt),), _origin_line(name, sources, report)


def list_drawings(report: Report) -> Drawings:
    """All pictures that the report draws from records."""
    return {**plan_figures(report), **plan_contest(report), **plan_dense(report), **report.paper.drawings(report)}


def find_pictures(results: Results, pattern: str) -> list[str]:
    """The files of a pattern, sorted, as paths relative to results/."""
    root = results.paths.results
    return sorted(file.relative_to(root).as_posix() for file in root.glob(pattern))


def find_beside(name: str, results: Results) -> list[Source]:
    """The records that lie beside a picture or above it."""
    beside = {f"results/{folder}{end}" for folder in Path(name).parents for end in ("/metrics.json", ".json")}
    return [source for source in results.sources if source.path in beside]


def describe_origin(sources: Sequence[Source], named: str) -> str:
    """The devices of records, the profile `named` or that a person ran them, their age, and other machines."""
    if not sources:
        return "no record beside it"
    devices = dict.fromkeys(source.device for source in sources)
    # on no device, and by no parameters that a run would have
    if all(device.startswith("none: ") for device in devices):
        return ", ".join(device.removeprefix("none: ") for device in devices) + describe_age(sources)
    profiles = dict.fromkeys(named if source.stage else OUTSIDE for source in sources)
    return f"{', '.join(devices)}; {' and '.join(profiles)}{describe_age(sources)}{describe_twins(sources)}"


def _origin_line(name: str, sources: Sequence[Source], report: Report) -> Line:
    return code(name), f": {describe_origin(sources, report.named)}"
