"""Pictures of a paper's page: its figures with ours, learning curves, and its model's speed against a baseline."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ..bench.figures import against_resolution
from ..bench.pooling import HOST, Row, bound_ratio
from ..core.statistics import Interval
from .claims import Report
from .dense import plan_dense
from .markdown import join, picture
from .paper import ATTENTIONS, Comparison, Drawings
from .records import Source, describe_origin, group_by
from .results import Results, SpeedGroup
from .variants import plan_figures
from .verdicts import format_counts, format_ratio


def list_figures(report: Report) -> str:
    """Return a section per figure of the paper: our pictures or the command that draws them, and its statuses.

    page.md calls it by name, as runs.md does `list_examples`.
    """
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
            # a picture outside figures/ is drawn by the stage that wrote the record in the picture's folder
            is_ours = name.startswith("figures/")
            sources = drawings.get(Path(name).name, ([],))[0] if is_ours else _find_beside(name, report.results)
            blocks.append(picture_blocks(name, f"{figure.place}, ours: {Path(name).stem}", sources))
    return join(blocks)


def list_examples(report: Report) -> str:
    """Return the pictures of dense tasks: learning curves and confusions."""
    drawn = plan_dense(report).items()
    return join(picture_blocks(f"figures/{name}", Path(name).stem.replace("_", " "), of) for name, (of, _) in drawn)


def picture_blocks(name: str, alt: str, sources: Sequence[Source]) -> str:
    """Return a picture, and below it the devices and the origin of the records that it is drawn from.

    `name` is the file relative to results/; `alt` describes it for those who do not see it.
    """
    return join([picture(name, alt), f"`{name}`: {describe_origin(sources)}"])


def list_drawings(report: Report) -> Drawings:
    """Return all pictures that the report draws from records for a paper."""
    return {**plan_figures(report), **_plan_comparison(report), **plan_dense(report), **report.paper.drawings(report)}


def _find_beside(name: str, results: Results) -> list[Source]:
    """Return the records in a picture's folder or above it."""
    beside = {f"results/{folder}{end}" for folder in Path(name).parents for end in ("/metrics.json", ".json")}
    return [source for source in results.sources if source.path in beside]


# a row's `compile` and its backend in words; what neither has is plain PyTorch
COMPILED = {True: "`torch.compile`", "graphs": "CUDA graphs"}
_BACKENDS = {"numba": "compiled loops", "triton": "compiled kernels"}


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one record for a paper's model and its baseline, under equal conditions."""

    comparison: Comparison
    group: SpeedGroup
    source: Source
    rows: dict[tuple[str, str | None, int], Row]  # (registered name, attention, image size in pixels) -> row

    def describe_ratio(self, attention: str, size: int) -> str:
        """Return the model's speed as a multiple of the baseline's with this attention, with the ends of the ratio.

        The ends follow from the ranges over processes. The result is `HOST` if a time is the host's, and empty if there
        is no ratio.
        """
        rows = self._pair(attention, size)
        if rows and (ratio := bound_ratio(*rows)):
            return format_ratio(*ratio)
        return HOST if any(row["host"] == HOST for row in rows) else ""

    def describe_memory(self, attention: str, size: int) -> str:
        """Say by how many percent the model takes more or less memory than the baseline; empty for an unknown peak."""
        peaks = [row["peak_memory_mib"] for row in self._pair(attention, size)]
        if not peaks or not all(peaks):
            return ""
        more = 100 * (peaks[0] / peaks[1] - 1)
        return f"{abs(more):.0f} % {'more' if more > 0 else 'less'} memory"

    def describe_crossings(self) -> str:
        """Say from which image size on the model's time and memory lie below the baseline's beyond the ranges of both.

        A crossing is named by the measured sizes on both of its sides. Empty if too few sizes have ranges.
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
        """Say how the model and the baseline ran, compiled, frozen or neither, and on which device."""
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
        """Return the rows of the model and of the baseline with this attention; empty if one is missing."""
        (ours, _), (theirs, _) = self.comparison.ours, self.comparison.theirs
        rows = self.rows.get((ours, None, size)), self.rows.get((theirs, attention, size))
        return rows if all(rows) else ()

    @property
    def rank(self) -> tuple:
        """The sort key of the best record.

        Most of the comparison's image sizes come first, then most of these over several processes, since one says
        nothing of the next, then most rows, and then a GPU.
        """
        models, sizes = self.comparison.series.values(), self.comparison.sizes
        wanted = [row for model in models for size in sizes if (row := self.rows.get((*model, size)))]
        over_several = sum(row["latency_range_ms"] is not None for row in wanted)
        return len(wanted), over_several, len(self.rows), self.group.is_gpu, self.source.path


def _place_crossing(ends: Mapping[int, Interval]) -> str | None:
    """Return in words from which image size on the model is better; None for too few sizes.

    Args:
        ends: image size in pixels -> (least, largest) ratio of the baseline's value to the model's.
    """
    from ..bench.conclude import crossover  # loads PyTorch

    verdict, start = crossover(ends)
    if start is None or verdict == "always":
        return {"always": "at every size", "never": "at no size", "open": "from no size on", None: None}[verdict]
    # the largest size below it at which the model is surely worse: the crossing lies between these two
    above = [size for size, (_, most) in ends.items() if size < start and most < 1]
    return f"from between {max(above)}² and {start}² on" if above else f"from {start}² on"


def _plan_comparison(report: Report) -> Drawings:
    """Plan the picture of a paper's comparison with its baseline, if its rows were measured."""
    comparison = report.paper.comparison
    if (speeds := find_speeds(comparison, report.results)) is None:
        return {}
    series = {
        line: own
        for line, of in comparison.series.items()
        if (own := [row for key, row in speeds.rows.items() if key[:2] == of])
    }
    title = f"{comparison.title} ({speeds.group}, {speeds.group.mode})"
    draw = partial(against_resolution, series=series, title=title, quantities=("latency_ms", "peak_memory_mib"))
    return {comparison.picture: ([speeds.source], draw)}


def find_speeds(comparison: Comparison | None, results: Results) -> Speeds | None:
    """Return the record that the picture shows, the best of `find_all_speeds`; None without any."""
    return max(find_all_speeds(comparison, results), key=lambda speeds: speeds.rank, default=None)


def find_all_speeds(comparison: Comparison | None, results: Results) -> list[Speeds]:
    """Return the best record of inference for each kind of device and batch size: GPUs first, then large batches.

    The best record is the first by `Speeds.rank`.
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
    kinds = group_by(both, lambda speeds: (speeds.group.is_gpu, speeds.group.batch_size))
    return [max(kinds[kind], key=lambda speeds: speeds.rank) for kind in sorted(kinds, reverse=True)]
