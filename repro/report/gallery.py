"""The paper's figures in its order, each with our pictures of it or the command that draws them; example pictures; and
the picture of its model against a baseline over the image size.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..bench.figures import against_resolution
from ..bench.pooling import HOST, Row, bound_ratio
from .claims import Report
from .dense import plan_dense
from .markdown import join, picture
from .paper import ATTENTIONS, Comparison, Drawings
from .records import Source, describe_origin, group_by
from .results import Results, SpeedGroup
from .variants import plan_figures
from .verdicts import format_counts, format_ratio


def list_figures(report: Report) -> str:
    """The paper's figures and ours, with the ledger's words on each."""
    root = report.results.paths.results
    drawn = {
        each.place: sorted(file.relative_to(root).as_posix() for file in root.glob(each.files))
        for each in report.paper.figures
    }
    blocks = []
    drawings = list_drawings(report)
    for figure in report.paper.figures:
        if files := drawn[figure.place]:
            state = f"We have {'one picture' if len(files) == 1 else f'{len(files)} pictures'}."
        elif drawn.get(figure.shared_with):
            state = f"The pictures of {figure.shared_with} show it too."
        else:
            state = f"Not drawn yet: `{figure.command}`."
        entries = format_counts(verdict for verdict in report.all if figure.place in verdict.entry.places)
        about = f"{state} Entries: {entries or 'none'}."
        blocks += [f"### {figure.place}", f"The paper shows: {figure.shows}.", about]
        for name in files:
            # pictures elsewhere are drawn by the stage that wrote the record in their folder
            is_ours = name.startswith("figures/")
            sources = drawings.get(Path(name).name, ([],))[0] if is_ours else _find_beside(name, report.results)
            blocks.append(picture_blocks(name, f"{figure.place}, ours: {Path(name).stem}", sources, report))
    return join(blocks)


def list_examples(report: Report) -> str:
    """The pictures of dense tasks: learning curves and confusions."""
    drawn = plan_dense(report).items()
    return join(
        picture_blocks(f"figures/{name}", Path(name).stem.replace("_", " "), of, report) for name, (of, _) in drawn
    )


def picture_blocks(name: str, alt: str, sources: Sequence[Source], report: Report) -> str:
    """A picture, and below it the device and the profile of the records that it is drawn from."""
    return join([picture(name, alt), f"`{name}`: {describe_origin(sources)}"])


def list_drawings(report: Report) -> Drawings:
    """All pictures that the report draws from records."""
    return {**plan_figures(report), **_plan_comparison(report), **plan_dense(report), **report.paper.drawings(report)}


def _find_beside(name: str, results: Results) -> list[Source]:
    """The records in a picture's folder or above it."""
    beside = {f"results/{folder}{end}" for folder in Path(name).parents for end in ("/metrics.json", ".json")}
    return [source for source in results.sources if source.path in beside]


COMPILED = {True: "`torch.compile`", "graphs": "CUDA graphs"}
_BACKENDS = {"numba": "compiled loops", "triton": "compiled kernels"}


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one record of a paper's model and its baseline under equal conditions."""

    comparison: Comparison
    group: SpeedGroup
    source: Source
    rows: dict[tuple[str, str | None, int], Row]  # by registered name, attention and image size

    def find_ratio(self, attention: str, size: int) -> str:
        """Say how many times as fast the model is as the baseline with this attention, with the ratios of the ends of
        both ranges; `HOST` where a time is the host's, empty where there is no ratio.
        """
        rows = self._pair(attention, size)
        if ratio := rows and bound_ratio(*rows):
            return format_ratio(*ratio)
        return HOST if any(row["host"] == HOST for row in rows) else ""

    def find_memory(self, attention: str, size: int) -> str:
        """Say how much more or less memory the model takes than the baseline; empty where a peak is not known."""
        peaks = [row["peak_memory_mib"] for row in self._pair(attention, size)]
        if not peaks or not all(peaks):
            return ""
        more = 100 * (peaks[0] / peaks[1] - 1)
        return f"{abs(more):.0f} % {'more' if more > 0 else 'less'} memory"

    def describe_crossings(self) -> str:
        """The crossing of the model's line below the baseline's beyond doubt, in words: the measured sizes on
        either side of it, or that there is none. Empty where too few sizes have ranges over processes.
        """
        sizes = sorted({size for *_, size in self.rows})
        said = []
        for key, name in {"latency_ms": "in time", "peak_memory_mib": "in memory"}.items():
            places = []
            for attention in ATTENTIONS:
                pairs = {size: rows for size in sizes if (rows := self._pair(attention, size))}
                ratios = {size: bound_ratio(*rows, key) for size, rows in pairs.items()}
                if where := _place_crossing({size: each.ends for size, each in ratios.items() if each and each.ends}):
                    places.append(f"{where} ({attention} attention)")
            if places:
                said.append(f"{name}, {' and '.join(places)}")
        line = f"{self.comparison.ours[1]}'s line lies below {self.comparison.theirs[1]}'s"
        return f"{line}, by more than processes differ: {'; '.join(said)}." if said else ""

    def describe_sides(self) -> str:
        """The state of either side, compiled, frozen or neither, and the device, in words."""
        said = []
        for (name, label), is_frozen in (
            (self.comparison.ours, self.comparison.frozen),
            (self.comparison.theirs, False),
        ):
            row = next(row for (of, *_), row in self.rows.items() if of == name)
            words = [COMPILED.get(row.get("compile")), _BACKENDS.get(row["backend"]), is_frozen and "frozen weights"]
            how = " and ".join(filter(None, words))
            said.append(f"{label} has {how}" if how else f"{label} is neither compiled nor frozen")
        return f"{', '.join(said)} ({self.group.device.partition(': ')[2]})"

    def _pair(self, attention: str, size: int) -> tuple[Row, ...]:
        """The rows of the model and of the baseline with this attention; empty where one is missing."""
        (ours, _), (theirs, _) = self.comparison.ours, self.comparison.theirs
        rows = self.rows.get((ours, None, size)), self.rows.get((theirs, attention, size))
        return rows if all(rows) else ()

    @property
    def rank(self) -> tuple:
        """Most of the comparison's image sizes, then most rows, then a GPU."""
        models, sizes = self.comparison.series.values(), self.comparison.sizes
        wanted = sum((*model, size) in self.rows for model in models for size in sizes)
        return wanted, len(self.rows), self.is_gpu, self.source.path

    @property
    def is_gpu(self) -> bool:
        return self.group.device.startswith("cuda")


def _place_crossing(ends: Mapping[int, tuple[float, float]]) -> str | None:
    """The crossing in words, by the least and the largest ratio at each image size; None for too few sizes."""
    from ..bench.conclude import crossover  # loads numpy

    verdict, start = crossover(ends)
    if start is None or verdict == "always":
        return {"always": "at every size", "never": "at no size", "open": "from no size on", None: None}[verdict]
    above = [size for size, (_, most) in ends.items() if size < start and most < 1]
    return f"from between {max(above)}² and {start}² on" if above else f"from {start}² on"


def _plan_comparison(report: Report) -> Drawings:
    """The picture of a paper's baseline comparison, if its rows were measured."""
    comparison = report.paper.comparison
    if (speeds := find_speeds(comparison, report.results)) is None:
        return {}
    rows = {line: [row for key, row in speeds.rows.items() if key[:2] == of] for line, of in comparison.series.items()}
    series = {line: own for line, own in rows.items() if own}
    title = f"{comparison.title} ({speeds.group}, {speeds.group.mode})"

    def draw(path: Path) -> None:
        against_resolution(path, series, title, ("latency_ms", "peak_memory_mib"))

    return {comparison.picture: ([speeds.source], draw)}


def find_speeds(comparison: Comparison | None, results: Results) -> Speeds | None:
    """The record that a picture shows: the best of `find_all_speeds`, among equals a GPU's."""
    return max(find_all_speeds(comparison, results), key=lambda speeds: speeds.rank, default=None)


def find_all_speeds(comparison: Comparison | None, results: Results) -> list[Speeds]:
    """The best record of inference for each kind of device and batch size: a GPU's first, then large batches.

    The best has most of the comparison's image sizes; among equals, most rows.
    """
    if comparison is None:
        return []
    models = set(comparison.series.values())
    candidates: dict[tuple[SpeedGroup, str], Speeds] = {}
    for group, rows in results.speed_rows.items():
        for row, source in rows:
            key = (results.model_key(row, source.path), row["attention"])
            height, width = row["image_size"]
            if group.mode == "infer" and key in models and height == width:
                found = candidates.setdefault((group, source.path), Speeds(comparison, group, source, {}))
                found.rows[(*key, height)] = row
    names = {comparison.ours[0], comparison.theirs[0]}
    both = [speeds for speeds in candidates.values() if {name for name, _, _ in speeds.rows} == names]
    kinds = group_by(both, lambda speeds: (speeds.is_gpu, speeds.group.batch_size))
    return [max(kinds[kind], key=lambda speeds: speeds.rank) for kind in sorted(kinds, reverse=True)]
