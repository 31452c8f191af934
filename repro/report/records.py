"""The records under results/, read once; a damaged one is a one-line error.

Of an experiment that several machines scored, one record represents the others: their seeds are never joined.
"""

import dataclasses
import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ..core.csvfile import parse_csv
from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import find_run, name_machine, read_record, serialise_recipe
from ..core.statistics import Interval, clip_share, describe_sample, share_interval
from .markdown import show_interval

_Item = TypeVar("_Item")
_Trained = TypeVar("_Trained")  # has `most_seeds`
PIPELINE, OUTSIDE = "the pipeline", "outside the pipeline"  # a record's origin: DVC, or a command that a person ran
_OF_IMAGES = ("top1_percent", "top5_percent")  # scores that are shares of the held-out images


class Missing(Exception):
    """A number that was not measured. Its `args` are the reason and the command that would measure it.

    Where no command can, the command is `none`, perhaps with a remark; see `is_remark`.
    """


def is_remark(command: str) -> bool:
    """Tell whether the command of `Missing` or of a ledger is only a remark, which pages do not show as code."""
    return command.startswith("none")


@dataclasses.dataclass(frozen=True)
class Source:
    """A record, as `repro.core.record.write_record` writes it."""

    path: str  # relative to the checkout
    metrics: Mapping[str, Any]
    identity: Mapping[str, Any]
    stage: str | None = None  # the pipeline's stage that wrote it; None for a run outside the pipeline
    cell: str | None = None  # the stage's cell that wrote it; None also for a stage without cells
    curve: tuple[str, ...] = ()  # a training's learning curve: lines of a CSV table, a row per epoch and seed
    others: tuple["Source", ...] = ()  # the records of the same experiment by other machines

    @property
    def machine(self) -> str:
        """The device without its number of threads."""
        return name_machine(self.identity)

    @property
    def device(self) -> str:
        """The device, such as `cpu: NAME, 2 threads`; `none: ` and the reason for numbers that are counted, not run."""
        return str(self.identity.get("device", "–"))

    @property
    def commit(self) -> str:
        """The first 12 digits of the commit that the code was based on; `–` where it is unknown."""
        return str(self.identity.get("parent_commit") or "–")[:12]

    @property
    def place(self) -> str:
        """The experiment's name `<stage>/<cell>`, for the pipeline's records and for those of a device."""
        parts = PurePosixPath(self.path).with_suffix("").parts[1:]
        return "/".join(parts[2:] if parts[0] == "replications" else parts[:-1])

    @property
    def run_file(self) -> str:
        """The file with the date and seconds of the record's run, relative to the checkout; Git ignores it."""
        return find_run(Path(self.path)).as_posix()

    @property
    def unit(self) -> str:
        """DVC's name for the stage or cell that wrote the record: `pretrain@nano`; also its key in pipeline.json."""
        return f"{self.stage}@{self.cell}" if self.cell else str(self.stage)

    @property
    def most_seeds(self) -> int:
        """The number of seeds of the recorded training; 0 for a record of anything else."""
        return len(self.metrics.get("by_seed", ()))

    @property
    def recipe(self) -> str | None:
        """The training recipe as JSON, without device and backend; None for a record without a recipe."""
        return serialise_recipe(self.identity)

    @property
    def scored_on(self) -> tuple[Any, ...]:
        """The data set, the split and its number of images: only scores that share them are compared."""
        return tuple(self.metrics.get(key) for key in ("data", "split", "held_out_images"))

    @property
    def init_hash(self) -> str | None:
        """The hash of the weights that a training started from; None for random ones."""
        return (self.metrics.get("init") or {}).get("weights_hash")

    def by_seed(self, key: str) -> dict[int, Any]:
        """Return seed -> a metric of a training, which each of its seeds must have."""
        return {run["seed"]: run[key] for run in self.metrics["by_seed"]}


def read_speeds(paths: Paths) -> list[Source]:
    """Return one source per CSV file of speeds, that of the stage first; its `metrics` holds the file's `rows`."""
    from ..bench.rows import read_rows

    found = []
    for file in (*paths.results.glob("efficiency/rows.csv"), *sorted(paths.speed.glob("*.csv"))):
        if rows := read_rows(file):
            # a CSV file has no identity, so its first row names the device and its last the commit; `repro plan` reads
            # `params_hash`, and without it `answer.note_pipeline` would leave out the stage's seconds
            identity = {"device": rows[0]["device"], "parent_commit": rows[-1]["commit"], "params_hash": None}
            stage = "efficiency" if file.parent.name == "efficiency" else None
            found.append(Source(file.relative_to(paths.root).as_posix(), {"rows": rows}, identity, stage))
    return found


def read_sources(paths: Paths, stages: Iterable[str]) -> list[Source]:
    """Return the records of the given stages, in that order, then those of results/replications.

    Where several machines scored one experiment, the record with the most seeds represents it, the pipeline's among
    equals, and has the rest in `others`.

    Raises:
        UserError: a record is damaged.
    """
    root = paths.results
    files = []
    for stage in stages:
        files += [(file, stage, None) for file in root.glob(f"{stage}/metrics.json")]
        files += [(file, stage, file.parent.name) for file in sorted(root.glob(f"{stage}/*/metrics.json"))]
    others = (file for file in sorted(root.glob("replications/**/*.json")) if not f".{file.name}".endswith(".run.json"))
    files += [(file, None, None) for file in others]
    sources = [_read(paths, *each) for each in files]

    def name_experiment(source: Source) -> Hashable:
        """Return a key that an experiment's records share across machines; the path of a record without scores."""
        # a time belongs to a machine, a score does not
        is_scored = "by_seed" in source.metrics or "trials" in source.metrics
        return (source.place, source.recipe) if is_scored else source.path

    merged = []
    for alike in group_by(sources, name_experiment).values():
        first, *others = sorted(alike, key=lambda each: (-each.most_seeds, each.stage is None, each.path))
        merged.append(dataclasses.replace(first, others=tuple(others)))
    return merged


def list_all(sources: Iterable[Source]) -> list[Source]:
    """Return the records, each followed by those that other machines made of the same experiment."""
    return [each for source in sources for each in (source, *source.others)]


def rank_machine(sources: Collection[Source]) -> tuple[int, int]:
    """Return the rank of a machine's records for a comparison: their number, then their seeds."""
    return len(sources), sum(each.most_seeds for each in sources)


def describe_origin(sources: Sequence[Source]) -> str:
    """Return the devices of records in words, and whether the pipeline or a person ran them."""
    if not sources:
        return "no record beside it"
    devices = ", ".join(dict.fromkeys(source.device.removeprefix("none: ") for source in sources))
    run = [source for source in sources if not source.device.startswith("none: ")]
    made = " and ".join(dict.fromkeys(PIPELINE if source.stage else OUTSIDE for source in run))
    return "; ".join(filter(None, (devices, made)))


def name_commits(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the commits of rows of a CSV file in words, each once."""
    return " and ".join(dict.fromkeys(row["commit"][:12] for row in rows))


def describe_seeds(sources: Iterable[Source]) -> str:
    """Return the numbers of seeds of trainings in words: `one seed`, `5 seeds`, or `one seed or 5 seeds`."""
    counts = sorted({source.most_seeds for source in sources})
    return " or ".join("one seed" if count == 1 else f"{count} seeds" for count in counts)


def show_mean(source: Source, key: str, form: str, unit: str = "", *, is_share: bool = False) -> str:
    """Return a number's mean over a training's seeds that have it, with its 95 % interval; empty where none has."""
    values = [run[key] for run in source.metrics["by_seed"] if run.get(key) is not None]
    if not values:
        return ""
    sample = describe_sample(values, is_share=is_share)
    return show_interval(sample.mean, _widen(sample.ci95, source.metrics, key, sample.mean), form, unit)


def keep_best(found: Iterable[_Trained], name: Callable[[_Trained], Hashable]) -> list[_Trained]:
    """Return, for each name, the record or group of records with the most seeds; the first among equals."""
    return [max(alike, key=lambda each: each.most_seeds) for alike in group_by(found, name).values()]


def group_by(items: Iterable[_Item], key: Callable[[_Item], Any]) -> dict[Any, list[_Item]]:
    """Group items by their key, in the order in which the keys first appear."""
    found: dict[Any, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def find_score_interval(metrics: Mapping[str, Any], key: str) -> Interval | None:
    """Return the 95 % interval over seeds of a score in percent, as a record has it; None where it has none.

    Seeds with equal scores show no spread. The interval is then over the held-out images if the score is a share of
    them, else None.
    """
    interval = metrics.get(f"{key.removesuffix('_percent')}_ci95_percent")
    return _widen(clip_share(interval), metrics, key, metrics[key]) if interval else None


def _widen(interval: Interval | None, metrics: Mapping[str, Any], key: str, mean: float) -> Interval | None:
    """Replace an interval over seeds without spread by the one over the held-out images, see `find_score_interval`."""
    if interval is None or interval[1] - interval[0] > 1e-9:
        return interval
    return share_interval(mean, metrics["held_out_images"]) if key in _OF_IMAGES else None


def warn_of_seeds(sources: Iterable[Source]) -> str:
    """Return the warning before a section with too few seeds for any verdict; empty where they are enough."""
    most = max((source.most_seeds for source in sources), default=0)
    if most not in (1, 2):
        return ""
    first = "One seed decides nothing" if most == 1 else "Two seeds decide nothing"
    return f"**{first}**: what follows describes these trainings, and ranks none."


def read_curves(source: Source, key: str = "epoch") -> dict[int, dict[int, float]]:
    """Return seed -> epoch -> value of a column of a record's learning curve; empty without a curve or column.

    The default column is for callers that only ask whether there is a curve.
    """
    curves: dict[int, dict[int, float]] = {}
    for row in parse_csv("\n".join(source.curve), f"{source.path}: curve") if source.curve else ():
        if row.get(key) is not None:
            curves.setdefault(row["seed"], {})[row["epoch"]] = row[key]
    return curves


def average_curves(curves: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return epoch -> mean over the seeds, for the epochs that all seeds have."""
    return {epoch: statistics.mean(points[epoch] for points in curves.values()) for epoch in find_common(curves)}


def find_common(values: Mapping[Any, Mapping[int, Any]]) -> list[int]:
    """Return, in order, the seeds or epochs that all of the given curves or variants have."""
    return sorted(set.intersection(*map(set, values.values()))) if values else []


def name_keys(value: Any, where: str) -> Any:
    """Return a copy of JSON data whose mappings raise a `UserError` on a missing key, with its path from `where`."""
    if isinstance(value, list):
        return [name_keys(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return _Named({key: name_keys(item, f"{where}.{key}") for key, item in value.items()}, where)
    return value


def check_mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Return the value if it is a mapping; else raise a `UserError` that names `where`."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected a mapping; remove the file and run its stage again")
    return value


class _Named(dict):
    """A mapping of a record, for `name_keys`; `get` and `in` work as usual."""

    def __init__(self, items: Mapping[str, Any], where: str):
        super().__init__(items)
        self._where = where

    def __missing__(self, key: str) -> Any:
        what_to_do = "run its stage again, or move the file out of results/"
        raise UserError(f"{self._where}.{key}: missing, as in a record of another version; {what_to_do}")


def _read(paths: Paths, file: Path, stage: str | None, cell: str | None) -> Source:
    """Read a record; `stage` and `cell` are those that wrote it, as in `Source`."""
    path = file.relative_to(paths.root).as_posix()
    content = read_record(file)
    halves = "metrics", "identity"
    if not isinstance(content, Mapping) or not all(isinstance(content.get(half), Mapping) for half in halves):
        raise UserError(f"{path}: expected {{metrics, identity}}; remove the file and run its stage again")
    metrics, identity = (name_keys(content[half], f"{path}: {half}") for half in halves)
    return Source(path, metrics, identity, stage, cell, tuple(content.get("curve", ())))
