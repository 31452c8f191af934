"""Which sources a recorded number depends on, by its kind, and so whether the code here would give the same number.

A record has two hashes of its code. `code_hash` covers all that its modules import, and decides whether an unfinished
run may continue. `number_hash` covers the files that can change the number, and decides whether the number is fresh.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

from .hashing import hash_sources, import_closure

# why a record is old
OTHER_CODE = "made by older code"
OLDER_VERSION = "made by an older version, which does not name the code of its numbers"
RENEWED = "made by older code, and renewed by the code here on another machine"
FOLLOWED = "made by older code, whose first epochs the code here trains again alike"
STALE = (OTHER_CODE, OLDER_VERSION)  # the reasons for which a record is made again
# how a record keeps which trainings the code here follows, see `repro.papers.first_epochs`
FIRST_EPOCHS = "first_epochs"

# kind -> patterns of the files that a number of this kind depends on; see `find_kind` for the order
_FILES: dict[str, tuple[str, ...]] = {
    "speed": (
        "repro/models/*",
        *(f"repro/bench/{name}.py" for name in ("adapted", "build", "conclude", "flops", "forms", "fvcore", "memory")),
        *(f"repro/bench/{name}.py" for name in ("op_rate", "speed", "sweep")),
        "repro/inference/export.py",
        "kernels/*",
    ),
    "count": (
        "repro/models/*",
        *(f"repro/bench/{name}.py" for name in ("adapted", "build", "flops", "fvcore")),
        *(f"repro/papers/*/{name}.py" for name in ("formulas", "readings", "theorems")),
        "kernels/*/op.py",
        "kernels/*/reference.py",
    ),
    # what a kernel computes is said by its reference, to which the tests hold every other path
    "score": (
        "repro/models/*",
        "repro/tasks/*",
        "repro/inference/*",
        "repro/runs/job.py",
        *(f"repro/training/{name}.py" for name in ("guard", "loop", "optim", "params")),
        *(
            f"repro/data/{name}.py"
            for name in ("ade20k", "classification", "coco", "detection", "latents", "loader", "masks", "pixels")
        ),
        *(f"repro/data/{name}.py" for name in ("settings", "tree", "embedded/*")),
        "repro/core/statistics.py",
        "kernels/*/reference.py",
    ),
}
_NEVER = ("kernels/tools/*",)
_LAUNCHES = ("repro/models/fused_block.py",)  # calls kernels, and is held to the plain block as they are to a reference
# what does not run on a CPU, and what runs nowhere else; on a CPU the check of the kernels alone interprets Triton
_ELSEWHERE = {True: ("kernels/*triton_*.py",), False: ("kernels/cpu_*.py", "kernels/*/numba_path.py")}
_KERNELS = "stages.kernels"
# kind -> patterns of modules; a record with one of them in its code is of this kind, and any other is a score
_MODULES: dict[str, tuple[str, ...]] = {
    "speed": ("repro.bench.speed", "repro.bench.*", "stages.efficiency", _KERNELS, "stages.measure"),
    "count": ("stages.complexity", "stages.theory", "repro.papers.*.readings"),
}


def find_kind(modules: Iterable[str]) -> str:
    """What the numbers of a record are by the modules that it names: `speed`, `count` or `score`; the first whose
    pattern fits.
    """
    named = list(modules)
    fitting = (
        kind for kind, patterns in _MODULES.items() if any(fnmatch(name, each) for name in named for each in patterns)
    )
    return next(fitting, "score")


def hash_number(root: Path, modules: Iterable[str], device: str) -> str:
    """The short hash of the sources that the numbers of a record depend on, by the modules that it names and, for a
    speed, the label of its device; see `hash_sources`.
    """
    named = sorted(set(modules))
    kind, never = find_kind(named), _NEVER
    on_cpu = device.startswith("cpu")
    if kind == "speed" and not (on_cpu and _KERNELS in named):
        never += _ELSEWHERE[on_cpu]
    elif kind == "score":
        never += _LAUNCHES
    closure = (file for file in import_closure(root, named) if not any(fnmatch(file, each) for each in never))
    return hash_sources(root, [file for file in closure if any(fnmatch(file, each) for each in _FILES[kind])])


def hash_row(root: Path, model: str, device: str) -> str:
    """The short hash of the sources that a row of speed of a model depends on, its family's alone: no import names the
    others.
    """
    # a family's module begins the names of its models; timm's own models have none here
    return hash_number(root, ["repro.bench.speed", f"repro.models.{model.partition('_')[0]}"], device)


def find_old(root: Path, records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name -> why it is old, for the old ones of some records, {metrics, identity}; what has no code hash is no record.

    A record is old where the files that its numbers depend on have another content now, or where it does not name them.
    An old record is `RENEWED` where another machine's with the same shared name, see `find_shared_name`, and as many seeds
    is not old; and `FOLLOWED` where the code here was found to begin its training alike.
    """
    hash_now = cache(partial(hash_number, root))
    old: dict[str, str] = {}
    seeds: dict[str, int] = {}  # shared name -> the most seeds of a record that is not old
    followed: set[tuple[str, str]] = set()  # the weights of a training, and the hash of the code that begins it alike
    shared = {name: find_shared_name(name, record["metrics"]) for name, record in records.items()}
    for name, record in records.items():
        identity, metrics = record["identity"], record["metrics"]
        if "code_hash" not in identity:  # that of the machine itself
            entries = metrics.get(FIRST_EPOCHS, {}) if isinstance(metrics, Mapping) else {}
            found = entries.values()
            followed |= {(entry["weights_hash"], entry["number_hash"]) for entry in found if entry["follows"]}
            continue
        modules = tuple(identity.get("code_modules") or ())
        if not modules or "number_hash" not in identity:
            old[name] = OLDER_VERSION
            continue
        if identity["number_hash"] == hash_now(modules, str(identity.get("device"))):
            if (experiment := shared[name]) is not None:
                seeds[experiment] = max(seeds.get(experiment, 0), len(_list_seeds(metrics)))
        else:
            old[name] = OTHER_CODE

    def explain(name: str, why: str) -> str:
        runs, identity = _list_seeds(records[name]["metrics"]), records[name]["identity"]
        if seeds.get(shared[name], -1) >= len(runs):
            return RENEWED
        if not runs or why == OLDER_VERSION:
            return why
        code = hash_now(tuple(identity["code_modules"]), str(identity.get("device")))
        return FOLLOWED if any((run.get("weights_hash"), code) in followed for run in runs) else why

    return {name: explain(name, why) for name, why in old.items()}


def find_shared_name(path: str, metrics: Any) -> str | None:
    """What the record of a training or a search is called in the folders of all machines under results/measured; None
    for another record.

    Times belong to a machine and scores do not, so records of scores with one name are of one experiment.
    """
    parts = PurePosixPath(path).parts  # results, measured, the device, ...
    is_scored = isinstance(metrics, Mapping) and ("by_seed" in metrics or "trials" in metrics)
    return "/".join(parts[3:]) if parts[1:2] == ("measured",) and is_scored else None


def _list_seeds(metrics: Any) -> list[Mapping[str, Any]]:
    """What the record of a training has of each seed; empty for another record."""
    runs = metrics.get("by_seed") if isinstance(metrics, Mapping) else None
    return [run for run in runs or () if isinstance(run, Mapping)]
