"""Our results: the functions by which a ledger's expressions read numbers from the records."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

from ..bench.kernels import find_memory_ratio, read_bench
from ..bench.pooling import COMMAND, HOST, UNKNOWN, Row, find_slow_operator, mark_host, pool_runs
from ..core.config import DEFAULT_PROFILE, load_profiles
from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import read_json
from ..core.statistics import Interval
from ..data.kinds import IMAGENET_1K, KINDS
from .paper import Paper
from .records import Missing, Source, check_mapping, list_all, name_keys, read_sources, read_speeds
from .trainings import TrainingFilter, fits_training, parse_training

_PROFILE = "profiles/paper.yaml"
_ADAPTER = "vit_adapter"  # the model name in counts of a backbone with its adapter
# conventions of counting multiply-adds, see `repro.bench.flops`
_CONVENTIONS = "macs_g", "macs_g_paper_convention", "macs_g_of_authors", "macs_g_fvcore"
# the protocol of published scores of generated pictures: their number, and the reference batch
_DRAWN, _REFERENCE = 50_000, "VIRTUAL_imagenet256_labeled.npz"
# (a speed's row in words, its median, the ends of its range over processes, None for one process) -> the speed to use;
# `claims` evaluates a statement once at the medians and once at each combination of the ends
Choose = Callable[[str, float, Interval | None], float]
# of rows that measure the same, the one of the first of these backends counts, then the one over most processes
_BACKENDS = ("triton", "numba", "torch")


def _starts_pretrained(kind: str) -> bool:
    """Tell whether a paper's trainings on a kind of data set start from weights that were pretrained elsewhere."""
    return "folders" not in KINDS[kind].parts


@dataclasses.dataclass(frozen=True, order=True)
class SpeedGroup:
    """The conditions that comparable speed rows share; `mode` is `infer` or `train`, and any compilation."""

    device: str
    batch_size: int
    dtype: str
    mode: str

    def __str__(self) -> str:
        return f"{self.device}, batch {self.batch_size}, {self.dtype}"

    @classmethod
    def of(cls, row: Row, device: str) -> "SpeedGroup":
        """Return the group of a speed row, or of a comparison by `bench.conclude`, which has no field `device`.

        Rows of compiled models differ in `mode`, so `infer` alone, which `claims` and `gallery` ask for, has none.
        """
        how = {"graphs": ", through CUDA graphs", True: ", compiled"}.get(row.get("compile"), "")
        return cls(device, row["batch_size"], row["dtype"], row["mode"] + how)

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, whose name begins with `cuda: `."""
        return self.device.startswith("cuda")

    @property
    def caveat(self) -> str:
        """The suffix of numbers from these rows: `UNKNOWN` on a GPU without CUDA graphs, else empty.

        Rows whose time is the host's give no speed, so they need no suffix.
        """
        return f"; {UNKNOWN}" if self.is_gpu and not self.mode.endswith("graphs") else ""


class Results:
    """The records of a checkout, read once.

    `scores`: stage -> keys of its scores -> labels, see `stages.Stage.scores`. Only the records of these stages, those
    in results/replications and the rows of speed are read. `used` collects the paths of the files that numbers were
    read from; the caller clears it before each lookup.
    """

    def __init__(self, paths: Paths, papers: Iterable[Paper], scores: Mapping[str, Mapping[str, str]]):
        self.paths, self.scores = paths, scores
        self.families = {family: options for paper in papers for family, options in paper.families.items()}
        self.sources = [*read_sources(paths, scores), *read_speeds(paths)]
        self.used: set[str] = set()

    @cached_property
    def counts(self) -> dict[str, tuple[Row, Source]]:
        """The rows of the complexity stage with their records, by `model[option=value]@size`, as ledgers name them."""
        found = {}
        for source in self.sources:
            if source.stage == "complexity":
                for name, row in check_mapping(source.metrics["rows"], f"{source.path}: metrics.rows").items():
                    check_mapping(row, f"{source.path}: {name}")
                    found[f"{self.model_key(row)}@{_name_size(row)}"] = row, source
        return found

    @cached_property
    def speed_rows(self) -> dict[SpeedGroup, list[tuple[Row, Source]]]:
        """The speed rows of all devices with their records, pooled over processes, with `host`, by `SpeedGroup`."""
        groups: dict[SpeedGroup, list] = {}
        for source in (each for each in self.sources if each.path.endswith(".csv")):  # those of `read_speeds`
            for row in mark_host(pool_runs(source.metrics["rows"])):
                groups.setdefault(SpeedGroup.of(row, row["device"]), []).append((row, source))
        return dict(sorted(groups.items()))

    @cached_property
    def score_sources(self) -> list[Source]:
        """The records of trained or evaluated models: those that name a kind of data set and a model."""
        return [s for s in self.sources if all(isinstance(s.metrics.get(key), str) for key in ("kind", "model"))]

    def functions(self) -> dict[str, Callable]:
        """Return the functions of a ledger's expressions that depend neither on a device nor on the paper.

        Each raises `Missing` where no record has the number, and adds the files that it read to `used`.
        """
        return {
            "params_m": lambda row: self._count(row, "num_params") / 1e6,
            **{field: partial(self._count, field=field) for field in _CONVENTIONS},
            "macs_saved_percent": partial(self._read, "complexity", "counted", "saved_at_1280_percent"),
            "complexity": partial(self._read, "complexity", "counted"),
            "accuracy": self._score,
            "drawn": self._drawn,
            "raised_percent": self._raised,
            "images": self._images,
            "profile": self._profile,
            "profile_setting": lambda section, key: self._state(f" does not state {section}.{key}", section, key),
            "expected": self._expected,
            "theory": partial(self._read, "theory", "computed", "theorems"),
            "memory_reference_over_kernel": self._memory_ratio,
        }

    def speed_functions(
        self, group: SpeedGroup, attention: str = "unfused", choose: Choose | None = None
    ) -> dict[str, Callable]:
        """Return `fps` and `memory_mib` over the rows of one group.

        Rows with `attention` stand for the paper's unfused ones. `choose` picks each speed; None takes the median.
        """

        def find_row(field: str, model: str, size: int, asked: str | None = None) -> Row:
            return self._speed(group, field, model, size, attention if asked == "unfused" else asked)

        def fps(model: str, size: int, asked: str | None = None) -> float:
            """Return images per second at an image size in pixels; `asked` is the attention of a baseline."""
            row = find_row("throughput_img_per_s", model, size, asked)
            speed, latencies = row["throughput_img_per_s"], row["latency_range_ms"]
            if choose is None:
                return speed
            # from the slowest process to the fastest; None for one process
            ends = latencies and tuple(speed * row["latency_ms"] / end for end in reversed(latencies))
            return choose(f"{model} at {size}, {row['attention']}", speed, ends)

        def memory_mib(*asked: Any) -> float:
            """Return the peak memory in MiB; the arguments are those of `fps`."""
            return find_row("peak_memory_mib", *asked)["peak_memory_mib"]

        return {"fps": fps, "memory_mib": memory_mib}

    def stands_on(self, paper: Paper, model: str) -> bool:
        """Tell whether a paper's page shows a model's runs; a family of no paper is on the primary paper's page."""
        family = model.split("_")[0]
        return family in paper.families or (paper.primary and family not in self.families)

    def model_key(self, record: Mapping[str, Any], where: str = "") -> str:
        """Return `model[option=value,...]` of a record or cell, with sorted options, without the family's defaults.

        `where` names the record in the `UserError` about options that are no mapping.
        """
        options = record.get("options") or {}
        if not isinstance(options, Mapping):
            raise UserError(f"{where}: options: expected a mapping, got {options!r}")
        model = str(record["model"])
        defaults = self.families.get(model.split("_")[0], {})
        shown = [f"{name}={value}" for name, value in sorted(options.items()) if defaults.get(name) != str(value)]
        return f"{model}[{','.join(shown)}]" if shown else model

    def is_full(self, source: Source) -> bool:
        """Tell whether a score is on a benchmark's whole validation split, not on another split of the same size."""
        m = source.metrics
        release = KINDS[m["kind"]].official if m["kind"] in KINDS else None
        return release is not None and (m.get("split"), m.get("held_out_images")) == ("val", release.counts.val)

    def require(self, fits: Callable[[Source], object], reason: str, command: str) -> list[Source]:
        """Return the records that fit, not those in `others`; raise `Missing` with reason and command without any."""
        found = [source for source in self.sources if fits(source)]
        if not found:
            raise Missing(reason, command)
        return found

    def find(self, path: str) -> Source | None:
        """Return the record at a path; None for another file from which a number was read, such as a manifest."""
        return next((source for source in list_all(self.sources) if source.path == path), None)

    def is_by_default(self, source: Source) -> bool:
        """Tell whether `make reproduce` writes a record: one of a stage without cells, or of a cell of profiles/mini.yaml."""
        if source.stage is None or source.cell is None:
            return source.stage is not None
        sections = self._profiles.get(DEFAULT_PROFILE, {})
        return source.stage not in sections or source.cell in (sections[source.stage] or {})

    @cached_property
    def _profiles(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections of each profile by its name; a checkout may lack some."""
        return dict(load_profiles(self.paths))

    @property
    def _paper_profile(self) -> Mapping[str, Any]:
        """The sections of the profile that trains at the scale of the papers."""
        return self._profiles.get("paper", {})

    @cached_property
    def _hashes(self) -> set[str]:
        """The hashes of the weights that the stages trained, by which an evaluation of them is known."""
        return {each.metrics["weights_hash"] for each in list_all(self.score_sources) if each.most_seeds and each.stage}

    def _read(self, stage: str, done: str, key: str, name: str) -> float:
        """Read a number of a mapping in a stage's record; raise `Missing` if it is not `done`, e.g. `counted`, yet."""
        for source in self.sources:
            if source.stage == stage:
                value = check_mapping(source.metrics[key], f"{source.path}: metrics.{key}").get(name)
                if value is not None:
                    self.used.add(source.path)
                    return value
        raise Missing(f"not {done} yet", f"dvc repro {stage}")

    def _count(self, row: str, field: str) -> float:
        """Read a field of a row of `counts`; raise `Missing` if there is no such row or field."""
        if row not in self.counts:
            absent = "no such row in results/complexity: not built yet, or not listed in params.yaml"
            raise Missing(absent if self.counts else "not counted yet", "repro complexity")
        found, source = self.counts[row]
        self.used.add(source.path)
        # Both names have one number. For a family it is its authors' convention, which was not fitted to the rows, and
        # `macs_g_of_authors` is evidence for it; for the adapter it was, and `claims` marks the other name as fitted.
        if field == "macs_g_of_authors":
            field = "macs_g_paper_convention"
            if found["model"] == _ADAPTER or field not in found:
                raise Missing("nobody has written down by which convention its authors count", "none")
        if field not in found:
            why = f"the row has no {field}"
            if field == "macs_g_fvcore":
                why = "counted by our convention alone: the row's group in params.yaml does not say `fvcore`"
            raise Missing(why, "repro complexity")
        return found[field]

    def _score(self, kind: str, model: str, key: str, *asked: int | str) -> float:
        """Read a score of a model on a kind of data set, all of whose validation images it must be on.

        Args:
            kind: a key of `KINDS` whose row has a release.
            model: the result of `model_key`.
            key: the score's name in the record.
            asked: conditions on the training, see `parse_training`.
        """
        training = parse_training(asked)
        command = self._score_command(kind, model, training)
        fitting = [
            each
            for each in list_all(self.score_sources)
            if each.metrics["kind"] == kind
            and self.is_full(each)
            and self._is_as_described(each, training)
            and self.model_key(each.metrics, each.path) == model
        ]
        if not fitting:
            raise Missing(f"no run on all of {KINDS[kind].official.name}; smaller runs are never compared", command)
        # the longest training, then the first by path: the score itself must not decide
        source = min(fitting, key=lambda source: (-(source.metrics.get("epochs") or 0), source.path))
        if not isinstance(source.metrics.get(key), (int, float)):
            raise Missing(f"{source.path} has no {key}", command)
        self.used.add(source.path)
        return source.metrics[key]

    def _is_as_described(self, source: Source, training: TrainingFilter) -> bool:
        """Tell whether a record's training and evaluation allow a comparison with a paper's score."""
        record = source.metrics
        # an evaluation of a file that does not name the model's variant has no options
        if "options" not in record or not fits_training(record, training):
            return False
        if source.most_seeds:
            # outside the stages, a command line may have shortened it; other first weights are another experiment
            starts_pretrained = _starts_pretrained(record["kind"]) or "frozen" in training
            return source.stage is not None and (record.get("init") is not None) == starts_pretrained
        # `repro evaluate` evaluates in a given dtype, and a training in fp32; it does not know how weights were trained
        is_known = record.keys() & {"weights_tag", "weights_file"} or record.get("weights_hash") in self._hashes
        return bool(is_known) and training.keys() <= {"image_size"} and source.identity.get("dtype") == "fp32"

    def _score_command(self, kind: str, model: str, training: TrainingFilter) -> str:
        """Return the command that would measure a score; `none` with a reason where no cell trains the model so."""
        # timm has pretrained classifiers of families that are none of a paper's own
        is_foreign = model.split("_")[0] not in self.families
        if is_foreign and not _starts_pretrained(kind) and training.keys() <= {"image_size"}:
            return f"repro evaluate --model {model} --pretrained --data {kind}"
        for section in self.scores:  # the stages' names are those of the profile's sections
            if (cell := self._find_cell(section, model, kind, training)) is not None:
                return f"repro profile use paper && repro {section} --cell {cell}"
        return f"none: {_PROFILE} has no cell that trains it so"

    def _raised(self, probe: str) -> float:
        """Return the percentage of probed models whose inner loss is higher after the steps of a probe than before."""
        missing = f"no trained model ran with `{probe}`", f"repro explain --probe {probe} --weights WEIGHTS --data DATA"
        found = self.require(lambda source: source.metrics.get("probe") == probe, *missing)
        self.used.update(source.path for source in found)
        after = [source.metrics["probed"] for source in found]
        return 100 * sum(each["inner_loss_after"] > each["inner_loss_before"] for each in after) / len(after)

    def _images(self, kind: str, split: str) -> int:
        """Count the images of a split of a prepared data set, or its `classes`, if it is as it was published."""
        for file in sorted(self.paths.results.glob("prepare_data/*/manifest.json")):
            where = file.relative_to(self.paths.root).as_posix()
            manifest = check_mapping(name_keys(read_json(file), where), where)
            if manifest["kind"] == kind and not manifest.get("departures"):
                self.used.add(where)
                return len(manifest["classes"]) if split == "classes" else manifest["splits"][split]["images"]
        raise Missing(f"{KINDS[kind].official.name} is not here", f"repro data check {kind} ROOT")

    @cached_property
    def profile_cells(self) -> dict[str, Any]:
        """The cells of all profiles by `SECTION.NAME`, which has the same definition in all of them."""
        found = {}
        for content in self._profiles.values():
            for section, cells in content.items():
                found |= {f"{section}.{name}": cell for name, cell in (cells or {}).items()}
        return found

    def _find_cell(self, section: str, model: str, kind: str, training: TrainingFilter) -> str | None:
        """Find the cell of profiles/paper.yaml that trains a model on a kind of data; None if there is none."""
        prepared = self._paper_profile.get("prepare_data") or {}
        for name, cell in (self._paper_profile.get(section) or {}).items():
            if not isinstance(cell, Mapping) or "model" not in cell or not fits_training(cell, training):
                continue
            is_of_kind = (prepared.get(cell.get("data")) or {}).get("kind") == kind
            if is_of_kind and self.model_key(cell, f"{_PROFILE}: {section}.{name}") == model:
                return name
        return None

    def _state(self, absent: str, *path: str | None) -> Any:
        """Read the value at a key path of profiles/paper.yaml; if there is none, raise `Missing` by `absent`.

        A None in the path, for a cell that was not found, leads to no value.
        """
        value: Any = self._paper_profile
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            raise Missing(f"{_PROFILE}{absent}", "repro profile show paper")
        self.used.add(_PROFILE)
        return value

    def _profile(self, section: str, model: str, kind: str, key: str) -> float:
        """Read a setting of the cell in profiles/paper.yaml that trains a model on a kind of data, whatever is active.

        `key` is its key path, such as `optim.lr`; raises `Missing` if no cell states it.
        """
        cell, absent = self._find_cell(section, model, kind, {}), f" has no {section} cell for it"
        if cell is not None:
            absent = f": {section}.{cell} does not state {key}, so the code's default holds"
        value = self._state(absent, section, cell, *key.split("."))
        # a training with several image sizes is evaluated at the last
        return value[-1] if isinstance(value, list) else value

    def _expected(self, kind: str, split: str) -> int:
        """Read the images of a split, or the `classes`, that profiles/paper.yaml requires of a kind of data set."""
        prepared = (self._paper_profile.get("prepare_data") or {}).items()
        own = (name for name, cell in prepared if cell.get("kind") == kind and split in (cell.get("expected") or {}))
        name = next(own, None)
        return self._state(f" has no data set of kind {kind}", "prepare_data", name, "expected", split)

    def _drawn(self, model: str, key: str) -> float:
        """Read a score of generated pictures against ADM's reference batch.

        Only pictures by weights of a whole training, as the profile's cell describes it, count.
        """
        cell = self._find_cell("generate", model, "latents", {})
        if cell is None:
            raise Missing(f"{_PROFILE} has no generate cell for it", "none")
        asked = self._paper_profile["generate"][cell]
        # fields of the training's record, then of the record of its pictures
        about = {name: asked[name] for name in ("epochs", "batch_size")} | {"kind": "latents", "classes": 1000}
        about |= {"steps": asked["epochs"] * asked["steps_per_epoch"], "init": None, "image_size": 256}
        about |= {"split": "val", "held_out_images": IMAGENET_1K.val}
        alike = (source for source in self.score_sources if about.items() <= source.metrics.items())
        own = (source for source in alike if self.model_key(source.metrics, source.path) == model)
        trained = {run["weights_hash"] for source in own for run in source.metrics.get("by_seed", ())}
        drawn = {"protocol": _REFERENCE, "samples": _DRAWN, "image_size": 256, "sampling": asked["sampling"]}
        for source in self.sources:
            m = source.metrics
            is_alike = drawn.items() <= m.items() and m.get(key) is not None
            if is_alike and m["weights_hash"] in trained and len(m["classes"]) == about["classes"]:
                self.used.add(source.path)
                return m[key]
        files = "--vae DECODER --inception inception-2015-12-05.pt"
        draw = f"repro generate --weights WEIGHTS --samples {_DRAWN} {files} --data {_REFERENCE}"
        why = f"no {_DRAWN:,} pictures by a whole training were scored against ADM's reference batch"
        train = f"repro profile use paper && repro generate --cell {cell}"
        raise Missing(f"{why}; others are never compared", f"{train} && {draw}")

    def _speed(self, group: SpeedGroup, field: str, model: str, size: int, attention: str | None) -> Row:
        """Find the speed row to read a field from.

        Raises:
            Missing: the row is absent or failed, its time is the host's, or our operator is too slow to compare.
        """

        def rank(found: tuple[Row, Source]) -> tuple:
            """Return the sort key by which the row that counts is the smallest, see `_BACKENDS`."""
            row, source = found
            place = _BACKENDS.index(row["backend"]) if row["backend"] in _BACKENDS else len(_BACKENDS)
            return place, -row["processes"], source.path

        fitting = [
            (row, source)
            for row, source in self.speed_rows.get(group, [])
            if (self.model_key(row, source.path), _name_size(row), row["attention"]) == (model, str(size), attention)
        ]
        row, source = min(fitting, key=rank, default=(None, None))
        if row is None or row["status"] != "ok" or row[field] is None:
            why = f"{row['status']}: {row.get('reason')}" if row else "no such row"
            raise Missing(f"{model} at {size}×{size} on {group}: {why}", "repro efficiency")
        if field == "throughput_img_per_s" and row["host"] == HOST:
            raise Missing(f"{model} at {size}×{size} on {group}: {HOST}", COMMAND)
        if slow := find_slow_operator(row):
            raise Missing(slow, "repro efficiency")
        self.used.add(source.path)
        return row

    def _memory_ratio(self) -> float:
        """Return the peak memory of the reference path as a multiple of the kernel's, by the first GPU that has both."""
        for file in sorted(self.paths.speed.glob("kernels/*.csv")):  # of GPUs alone: no kernel runs on a CPU
            if ratio := find_memory_ratio(read_bench(file)):
                self.used.add(file.relative_to(self.paths.root).as_posix())
                return ratio
        raise Missing(
            "the reference path was not measured against the kernel on a GPU", "repro kernels bench  # on a GPU"
        )


def _name_size(row: Row) -> str:
    """Return the image size of a row in pixels: `224`, or `800x1344` (height x width) if it is no square."""
    height, width = row["image_size"]
    return str(height) if height == width else f"{height}x{width}"
