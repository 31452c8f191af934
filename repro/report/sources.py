"""What we measured: the records under results/, and the functions through which the ledger's expressions read them."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.config import load_yaml
from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import read_json

STAGES = ("complexity", "pretrain", "baselines", "detect", "segment", "ablate", "efficiency", "visualize")
# a score counts for the paper's data set only when it was taken on that set's whole validation split
FULL_VALIDATION = {"imagenet": 50_000, "coco": 5_000, "ade20k": 2_000}
NAMES = {"imagenet": "ImageNet-1K", "coco": "COCO 2017", "ade20k": "ADE20K"}
_SECTIONS = {"imagenet": ("pretrain", "ablate"), "coco": ("detect",), "ade20k": ("segment",)}
_SPEED_FIELDS = (
    "model",
    "attention",
    "resolution",
    "batch",
    "dtype",
    "device",
    "mode",
    "status",
    "throughput_img_per_s",
    "latency_ms",
    "latency_ms_ci95",
    "peak_memory_mib",
    "macs_g",
)
_BACKENDS = ("triton", "torch")


class Missing(Exception):
    """A number that was not measured.

    Args:
        reason: why there is none.
        command: what would measure it.
    """

    def __init__(self, reason: str, command: str):
        super().__init__(reason)
        self.reason, self.command = reason, command


@dataclasses.dataclass(frozen=True)
class Source:
    """One record: `path` relative to the checkout, and what `repro.core.record.write_record` wrote."""

    path: str
    metrics: Mapping[str, Any]
    identity: Mapping[str, Any]

    @property
    def device(self) -> str:
        """What the record says of its device."""
        return str(self.identity.get("device", "–"))


@dataclasses.dataclass(frozen=True, order=True)
class SpeedGroup:
    """Rows that may be set against each other: one device, batch, dtype and mode (`infer` or `train`, and whether compiled)."""

    device: str
    batch: int
    dtype: str
    mode: str

    def __str__(self) -> str:
        return f"{self.device}, batch {self.batch}, {self.dtype}"


class Results:
    """Every record of a checkout, read once.

    Args:
        paths: the checkout.
        defaults: options that are a model's default and therefore do not name it: {design: conv2d, ...}.
        own_families: prefixes of model names that this project trains, e.g. `vittt`.

    `used` collects the paths of the records that numbers were read from; who asks for a number empties it before.

    Raises:
        UserError: a record is damaged; a missing one is no error.
    """

    def __init__(self, paths: Paths, defaults: Mapping[str, str], own_families: tuple[str, ...]):
        self.paths, self.defaults, self.own_families = paths, defaults, own_families
        root = paths.results
        files = [f for stage in STAGES for f in sorted([*root.glob(f"{stage}/metrics.json"), *root.glob(f"{stage}/*/metrics.json")])]
        files += sorted(f for f in root.glob("measured/**/*.json") if not f.name.endswith(("run.json", "recipe.json")))
        self.sources = [self._read(file) for file in files]
        self.used: set[str] = set()

    @cached_property
    def counts(self) -> dict[str, tuple[Mapping[str, Any], Source]]:
        """`model[option=value]@side` -> row of the complexity stage."""
        return {
            f"{self.model_key(row, where)}@{_side(row, where)}": (row, source)
            for source in self._of_stage("complexity")
            for name, row in _mapping(source, "rows").items()
            for where in [f"{source.path}: {name}"]
        }

    @cached_property
    def speed_rows(self) -> dict[SpeedGroup, list[tuple[Mapping[str, Any], Source]]]:
        """The efficiency rows of all devices, grouped by what may be compared."""
        groups: dict[SpeedGroup, list] = {}
        for source in [*self._of_stage("efficiency"), *self._of_stage("measured")]:
            for row in _speed_rows(source):
                if row.get("run", 1) > 1:  # measured again, to see how well the two agree
                    continue
                mode = f"{row['mode']}, compiled" if row.get("compile") else row["mode"]
                group = SpeedGroup(row["device"], row["batch"], row["dtype"], mode)
                groups.setdefault(group, []).append((row, source))
        return dict(sorted(groups.items()))

    @property
    def score_cells(self) -> list[Source]:
        """Records of a trained or evaluated model: they name their data set."""
        return [s for s in self.sources if isinstance(s.metrics.get("data"), str) and isinstance(s.metrics.get("model"), str)]

    @property
    def mini_cells(self) -> list[Source]:
        """Score cells on anything but a whole data set of the paper: never set beside the paper's numbers. Ablations stand elsewhere."""
        return [s for s in self.score_cells if not self.is_full(s) and "/ablate/" not in s.path]

    def without(self, source: Source) -> "Results":
        """The same, read anew, but for one record."""
        others = Results(self.paths, self.defaults, self.own_families)
        others.sources.remove(source)
        return others

    def functions(self) -> dict[str, Callable]:
        """What expressions may call that depends neither on a device nor on the paper."""
        return {
            "params_m": lambda row: self._count(row)["params"] / 1e6,
            "macs_g": lambda row: self._count(row)["macs_g"],
            "macs_g_paper_convention": lambda row: _field(self._count(row), "macs_g_paper_convention", row),
            "complexity": self._complexity,
            "accuracy": self._score,
            "images": self._images,
            "profile": self._profile,
            "operator": self._operator,
        }

    def speed_functions(self, group: SpeedGroup, deit: str = "unfused") -> dict[str, Callable]:
        """`fps` and `memory_mib` over the rows of one group; those with `deit` attention stand for the paper's, which are unfused."""

        def read(field: str) -> Callable:
            def look_up(model: str, side: int, attention: str | None = None) -> float:
                return self._speed(group, field, model, side, deit if attention == "unfused" else attention)

            return look_up

        return {"fps": read("throughput_img_per_s"), "memory_mib": read("peak_memory_mib")}

    def model_key(self, record: Mapping[str, Any], where: str) -> str:
        """`model[option=value,...]`, options in alphabetical order and without defaults."""
        options = record.get("options") or {}
        if not isinstance(options, Mapping):
            raise UserError(f"{where}: options: expected a mapping, got {options!r}")
        shown = [f"{k}={v}" for k, v in sorted(options.items()) if self.defaults.get(k) != str(v)]
        return f"{_field(record, 'model', where)}[{','.join(shown)}]" if shown else str(_field(record, "model", where))

    def _read(self, file: Path) -> Source:
        path = file.relative_to(self.paths.root).as_posix()
        content = read_json(file)
        parts = [content.get(name) if isinstance(content, Mapping) else None for name in ("metrics", "identity")]
        if not all(isinstance(part, Mapping) for part in parts):
            raise UserError(f"{path}: expected {{metrics, identity}}; remove the file and run its stage again")
        return Source(path, *(_named(part, f"{path}: {name}") for part, name in zip(parts, ("metrics", "identity"), strict=True)))

    def _of_stage(self, stage: str) -> list[Source]:
        return [s for s in self.sources if s.path.startswith(f"results/{stage}/")]

    def _complexity(self, key: str) -> float:
        for source in self._of_stage("complexity"):
            name, size = key.split(".")
            value = _mapping(source, name).get(size)
            if value is not None:
                self.used.add(source.path)
                return value
        raise Missing("not counted yet", "repro complexity")

    def _count(self, row: str) -> Mapping[str, Any]:
        if row not in self.counts:
            why = "no such row in results/complexity: not built yet, or not listed in params.yaml" if self.counts else "not counted yet"
            raise Missing(why, "repro complexity")
        found, source = self.counts[row]
        self.used.add(source.path)
        return found

    def is_full(self, source: Source) -> bool:
        """Scored on the whole validation split of a data set of the paper."""
        images = source.metrics.get("val_images", source.metrics.get("images"))
        return images is not None and images == FULL_VALIDATION.get(source.metrics["data"])

    def _score(self, data: str, model: str, key: str, image_size: int | None = None) -> float:
        found = []
        for source in self.score_cells:
            record = source.metrics
            # what was evaluated from a weights file without its options may be any variant of the model
            known = "options" in record or record.get("weights") == "timm"
            size_fits = image_size is None or record.get("image_size", image_size) == image_size
            # an evaluation has the choice; training always evaluates in fp32
            exact = "image_size" not in record or "recipe" in record or source.identity.get("dtype") == "fp32"
            # a detector or segmenter from random weights, or what the command line may have shortened, is none of the paper's
            by_hand = source.path.startswith("results/measured/") and ("initial" in record or "recipe" in record)
            varied = record.get("initial") == "random" or by_hand
            if (
                record["data"] == data
                and self.is_full(source)
                and known
                and size_fits
                and exact
                and not varied
                and self.model_key(record, source.path) == model
            ):
                found.append((-(record.get("epochs") or 0), source.path, source))
        if not found:
            raise Missing(f"no run on all of {NAMES[data]}; smaller runs are never compared", self._score_command(data, model))
        source = min(found)[2]  # the longest training, and then by name: never by the score
        if not isinstance(source.metrics.get(key), (int, float)):
            raise Missing(f"{source.path} has no {key}", self._score_command(data, model))
        self.used.add(source.path)
        return source.metrics[key]

    def _score_command(self, data: str, model: str) -> str:
        for section in _SECTIONS[data]:
            if (cell := self._profile_cell(section, model, data)) is not None:
                return f"repro profile use paper && repro {section} --cell {cell}"
        if data == "imagenet" and not model.startswith(self.own_families):
            return f"repro evaluate --model {model} --pretrained --data imagenet"
        return f"repro {_SECTIONS[data][0]}  # once profiles/paper.yaml has a cell for it"

    def _images(self, kind: str, split: str) -> int:
        for file in sorted(self.paths.results.glob("prepare_data/*/manifest.json")):
            manifest = read_json(file)
            where = file.relative_to(self.paths.root).as_posix()
            if _field(manifest, "kind", where) == kind and not manifest.get("departures"):
                self.used.add(where)
                return len(_field(manifest, "classes", where)) if split == "classes" else manifest["splits"][split]["images"]
        raise Missing(f"{NAMES[kind]} is not here", f"repro data check {kind} ROOT")

    @cached_property
    def _paper_profile(self) -> Mapping[str, Any]:
        file = self.paths.profiles / "paper.yaml"
        return load_yaml(file) if file.is_file() else {}

    def _profile_cell(self, section: str, model: str, data: str) -> str | None:
        profile = self._paper_profile
        for name, cell in (profile.get(section) or {}).items():
            prepared = (profile.get("prepare_data") or {}).get(cell.get("data")) or {}
            if (
                prepared.get("kind") == data
                and cell.get("model")
                and self.model_key(cell, f"profiles/paper.yaml: {section}.{name}") == model
            ):
                return name
        return None

    def _profile(self, section: str, model: str, data: str, key: str) -> float:
        cell = self._profile_cell(section, model, data)
        if cell is None:
            raise Missing(f"profiles/paper.yaml has no {section} cell for it", "repro profile show paper")
        value: Any = self._paper_profile[section][cell]
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            raise Missing(
                f"profiles/paper.yaml: {section}.{cell} does not state {key}; the code's default holds", "repro profile show paper"
            )
        self.used.add("profiles/paper.yaml")
        return value

    def _speed(self, group: SpeedGroup, field: str, model: str, side: int, attention: str | None) -> float:
        found = [
            (_BACKENDS.index(row["backend"]) if row.get("backend") in _BACKENDS else len(_BACKENDS), source.path, row)
            for row, source in self.speed_rows.get(group, [])
            if self.model_key(row, source.path) == model and _side(row, source.path) == str(side) and row.get("attention") == attention
        ]
        _, path, row = min(found, key=lambda item: item[:2]) if found else (None, None, None)
        if row is None or row.get(field) is None:
            why = f"{row.get('status')}: {row.get('reason')}" if row else "no such row"
            raise Missing(f"{model} at {side}×{side} on {group}: {why}", "repro efficiency")
        gates = next(source.metrics for source in self.sources if source.path == path).get("gates", [])
        for gate in gates:  # a model whose operator is slower than it could be is set beside nothing
            if (
                model.startswith(f"{gate['family']}_")
                and (gate["batch"], gate["dtype"]) == (group.batch, group.dtype)
                and not gate["holds"]
            ):
                share = f"{gate['share_of_copy_percent']:.0f} % of the bandwidth of a copy"
                raise Missing(f"{gate['operator']} reaches {share}, {gate['at_least_percent']} % are asked for", "repro efficiency")
        self.used.add(path)
        return row[field]

    def _operator(self, key: str) -> float:
        for source in self.sources:
            op = source.metrics.get("op")
            if isinstance(op, Mapping) and op.get(key) is not None:
                self.used.add(source.path)
                return op[key]
        raise Missing("the reference path was not measured against the kernel", "repro kernels bench")


class _Part(dict):
    """A mapping of a record at `where`; a key that is not there, as in a record of an older version, is one line that names it."""

    def __init__(self, items: Mapping[str, Any], where: str):
        super().__init__({key: _named(value, f"{where}.{key}") for key, value in items.items()})
        self.where = where

    def __missing__(self, key: str) -> Any:
        raise UserError(
            f"{self.where}.{key}: missing, as in a record of another version; run its stage again, or move the file out of results/"
        )


def _named(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_named(item, f"{where}[{i}]") for i, item in enumerate(value)]
    return _Part(value, where) if isinstance(value, dict) else value


def missing_cells(paths: Paths) -> list[tuple[str, str]]:
    """(record, command) of each metrics file that the stages of dvc.yaml write for the cells of params.yaml, where it is not there.

    DVC allows no dependency on dvc.yaml itself; a stage more in it is a section more in the parameters that the report depends on.
    """
    params, missing = load_yaml(paths.params), []
    for stage in load_yaml(paths.root / "dvc.yaml")["stages"].values():
        cells = params.get(stage["foreach"].strip("${}")) or {} if "foreach" in stage else [""]
        for cell in cells:
            made = stage.get("do", stage)
            for record in (name.replace("${key}", cell) for metrics in made.get("metrics", []) for name in metrics):
                if not (paths.root / record).is_file():
                    missing.append((record, made["cmd"].replace("${key}", cell)))
    return missing


def _field(record: Mapping[str, Any], name: str, where: str) -> Any:
    if not isinstance(record, Mapping) or name not in record:
        raise UserError(f"{where}: {name}: missing; remove the file and run its stage again")
    return record[name]


def _speed_rows(source: Source) -> list[Mapping[str, Any]]:
    """The rows of an efficiency record; other records under results/measured have none."""
    rows = source.metrics.get("rows")
    is_list = isinstance(rows, list)
    if not source.path.startswith("results/efficiency/"):
        rows = [row for row in rows if isinstance(row, Mapping) and "throughput_img_per_s" in row] if is_list else []
    elif not is_list:
        raise UserError(f"{source.path}: metrics.rows: expected a list; remove the file and run its stage again")
    for row in rows:
        for name in _SPEED_FIELDS:
            _field(row, name, source.path)
    return rows


def _side(row: Mapping[str, Any], where: str) -> str:
    size = _field(row, "resolution", where)
    height, width = size if isinstance(size, list) else (size, size)
    return str(height) if height == width else f"{height}x{width}"


def _mapping(source: Source, name: str) -> Mapping[str, Any]:
    value = source.metrics.get(name)
    if not isinstance(value, Mapping):
        raise UserError(f"{source.path}: metrics.{name}: expected a mapping; remove the file and run its stage again")
    return value
