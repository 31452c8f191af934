"""The paper's figures in its order, each with our pictures of it or the command that draws them; example pictures; and
the picture of its model against a baseline over the image size.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..core.figures import against_resolution
from ..core.speeds import HOST, bound_ratio
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
    drawn = {each.place: list_pictures(report.results, each.files) for each in report.paper.figures}
    blocks: list[str] = []
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
    return {**plan_figures(report), **plan_comparison(report), **plan_dense(report), **report.paper.drawings(report)}


def list_pictures(results: Results, pattern: str) -> list[str]:
    """The files of a pattern, sorted, as paths relative to results/."""
    root = results.paths.results
    return sorted(file.relative_to(root).as_posix() for file in root.glob(pattern))


def _find_beside(name: str, results: Results) -> list[Source]:
    """The records in a picture's folder or above it."""
    beside = {f"results/{folder}{end}" for folder in Path(name).parents for end in ("/metrics.json", ".json")}
    return [source for source in results.sources if source.path in beside]


COMPILED = {True: "`torch.compile`", "graphs": "CUDA graphs"}
_BACKENDS = {"numba": ["compiled loops"], "triton": ["compiled kernels"]}


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one record of the model and its baseline under equal conditions."""

    group: SpeedGroup
    source: Source
    rows: Mapping[tuple[str, str | None, int], Mapping[str, Any]]  # by registered name, attention and image size

    def find_ratios(self, comparison: Comparison) -> dict[str, dict[int, str]]:
        """Attention of the baseline -> image size -> how many times as fast the model is, in words, with the ratios of
        the ends of both ranges; `HOST` where a time is the host's.
        """
        found: dict[str, dict[int, str]] = {attention: {} for attention in ATTENTIONS}
        for attention, size, ours, theirs in self._pair(comparison):
            if ratio := bound_ratio(ours, theirs):
                found[attention][size] = format_ratio(*ratio)
            elif HOST in (ours["host"], theirs["host"]):
                found[attention][size] = HOST
        return found

    def find_memory(self, comparison: Comparison) -> dict[str, dict[int, str]]:
        """Attention of the baseline -> image size -> how much more or less memory the model takes, in words."""
        found: dict[str, dict[int, str]] = {attention: {} for attention in ATTENTIONS}
        for attention, size, ours, theirs in self._pair(comparison):
            if ours["peak_memory_mib"] and theirs["peak_memory_mib"]:
                more = 100 * (ours["peak_memory_mib"] / theirs["peak_memory_mib"] - 1)
                found[attention][size] = f"{abs(more):.0f} % {'more' if more > 0 else 'less'} memory"
        return found

    def describe_crossings(self, comparison: Comparison) -> str:
        """The crossing of the model's line below the baseline's beyond doubt, in words: the measured sizes on
        either side of it, or that there is none. Empty where too few sizes have ranges over processes.
        """
        said = []
        for key, name in {"latency_ms": "in time", "peak_memory_mib": "in memory"}.items():
            ratios = [(each, size, bound_ratio(*rows, key)) for each, size, *rows in self._pair(comparison)]
            places = []
            for attention in ATTENTIONS:
                ends = {size: ratio.ends for each, size, ratio in ratios if each == attention and ratio and ratio.ends}
                if where := _place_crossing(ends):
                    places.append(f"{where} ({attention} attention)")
            if places:
                said.append(f"{name}, {' and '.join(places)}")
        line = f"{comparison.ours[1]}'s line lies below {comparison.theirs[1]}'s"
        return f"{line}, by more than processes differ: {'; '.join(said)}." if said else ""

    def describe_sides(self, comparison: Comparison) -> str:
        """The state of either side, compiled, frozen or neither, and the device, in words."""
        said = []
        for (name, label), is_frozen in ((comparison.ours, comparison.frozen), (comparison.theirs, False)):
            row = next(row for (of, *_), row in self.rows.items() if of == name)
            words = [*([COMPILED[row["compile"]]] if row.get("compile") else []), *_BACKENDS.get(row["backend"], [])]
            how = " and ".join([*words, *(["frozen weights"] if is_frozen else [])])
            said.append(f"{label} has {how}" if how else f"{label} is neither compiled nor frozen")
        return f"{', '.join(said)} ({self.group.device.partition(': ')[2]})"

    def _pair(self, comparison: Comparison) -> Iterator[tuple[str, int, Mapping[str, Any], Mapping[str, Any]]]:
        """Attention of the baseline, image size, and the rows of the model and of the baseline."""
        for (name, attention, size), theirs in self.rows.items():
            ours = self.rows.get((comparison.ours[0], None, size))
            if name == comparison.theirs[0] and attention in ATTENTIONS and ours is not None:
                yield attention, size, ours, theirs

    @property
    def is_gpu(self) -> bool:
        return self.group.device.startswith("cuda")

    @property
    def scope(self) -> str:
        """Device, conditions and commit, in words, and whether the host had a share."""
        return f"{self.group}, {self.group.mode}, commit {self.source.commit}{self.group.caveat}"


def _place_crossing(ends: Mapping[int, tuple[float, float]]) -> str | None:
    """The crossing in words, by the least and the largest ratio at each image size; None for too few sizes."""
    from ..bench.conclude import crossover  # loads numpy

    verdict, start = crossover(ends)
    if start is None or verdict == "always":
        return {"always": "at every size", "never": "at no size", "open": "from no size on", None: None}[verdict]
    above = [size for size, (_, most) in ends.items() if size < start and most < 1]
    return f"from between {max(above)}² and {start}² on" if above else f"from {start}² on"


def plan_comparison(report: Report) -> Drawings:
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
    return max(find_all_speeds(comparison, results), key=partial(_rank, comparison), default=None)


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
                found = candidates.setdefault((group, source.path), Speeds(group, source, {}))
                found.rows[(*key, height)] = row
    names = {comparison.ours[0], comparison.theirs[0]}
    both = [speeds for speeds in candidates.values() if {name for name, _, _ in speeds.rows} == names]
    kinds = group_by(both, lambda speeds: (speeds.is_gpu, speeds.group.batch_size))
    return [max(kinds[kind], key=partial(_rank, comparison)) for kind in sorted(kinds, reverse=True)]


def find_fastest(
    comparison: Comparison, results: Results
) -> Iterator[tuple[str, int, int, list[Mapping[str, Any]], list[Mapping[str, Any]]]]:
    """Find each side's rows of inference from the fastest to the slowest, of any dtype, attention and compilation.

    Yields:
        Device, batch size, image size, the model's rows, and the baseline's, where both sides have one. Times of the
        host are left out: they say nothing of the device.
    """
    sides: dict[tuple[str, int, int], dict[str, list[Mapping[str, Any]]]] = {}
    for group, rows in results.speed_rows.items():
        for row, source in rows:
            height, width = row["image_size"]
            is_measured = group.mode.startswith("infer") and row["latency_ms"] and row["host"] != HOST
            if is_measured and height == width and height in comparison.sizes:
                place = sides.setdefault((group.device, group.batch_size, height), {})
                place.setdefault(results.model_key(row, source.path), []).append(row)
    for place in sorted(sides, key=lambda place: (place[0].startswith("cuda"), *place[1:]), reverse=True):
        found = [sides[place].get(name, []) for name in (comparison.ours[0], comparison.theirs[0])]
        if all(found):
            yield *place, *(sorted(map(_keep_most, group_by(rows, _find_way).values()), key=_latency) for rows in found)


def _find_way(row: Mapping[str, Any]) -> tuple:
    return row["dtype"], row["attention"], row.get("compile")


def _keep_most(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row over most processes: the fastest of several would be chosen by chance."""
    return max(rows, key=lambda row: row["processes"])


def _latency(row: Mapping[str, Any]) -> float:
    return row["latency_ms"]


def _rank(comparison: Comparison, speeds: Speeds) -> tuple:
    wanted = sum((*model, size) in speeds.rows for model in comparison.series.values() for size in comparison.sizes)
    return wanted, len(speeds.rows), speeds.is_gpu, speeds.source.path
