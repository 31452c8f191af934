"""Golden losses: the values of ten training steps of a small model of every family, kept in results/golden.

Each is a complete training through `repro.training.loop.fit`, on pictures that are committed with the values. The
recipe of golden.yaml makes every setting affect the values. So an edit of code that moves no value changes no training:
in dvc.yaml, trainings depend on these files and not on code.
"""

import contextlib
import dataclasses
import io
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.config import build, load_yaml
from ..core.errors import RunError
from ..core.hashing import hash_file
from ..core.paths import Paths, find_root
from ..core.record import read_json, write_text
from ..core.runtime import Runtime
from ..data.manifest import write_manifest
from ..data.prepare import scan_manifest
from ..tasks import load_tasks
from ..tasks.classification.params import ClassifierParams
from ..training.checkpoint import Checkpointer
from ..training.loop import fit
from ..training.watch import Watch
from .job import Cell, build_job, find_golden

_PICTURE_KINDS = {"classes": "folder", "scenes": "scenes"}  # folder of results/golden/pictures -> kind of the data set
# relative; results of two instruction sets, and of one and two threads, agree to 4e-7
TOLERANCE = 2e-6
PARTS = ("loss", "grad_norm", "scores")
Line = dict[str, Any]


class _NoCheckpoints(Checkpointer):
    """A checkpointer that keeps nothing, because a training of ten steps simply starts again."""

    def save(self, *_: Any) -> None:
        return

    def restore(self) -> None:
        return None


def read_cases() -> dict[str, Any]:
    """Read golden.yaml: `base`, a recipe for each task, and `families`."""
    return load_yaml(Path(__file__).with_name("golden.yaml"))


def list_lines(cases: Mapping[str, Any], family: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return line -> (task, section of its cell as a mapping).

    A line is one training of the family: the recipe of its task in `base`, with the changes that golden.yaml names for
    the family and for the line.
    """
    said = cases["families"][family]
    lines = {}
    for name, line in said["lines"].items():
        task = line.get("task", said["task"])
        section = _merge(cases["base"][task], said.get("changes", {}), line.get("changes", {}))
        # the options that make the family's model small do not exist for a line with another family's model
        small = said.get("options", {}) if line.get("small", True) else {}
        options = small | line.get("options", {})
        lines[name] = task, section | {"model": line.get("model", said["model"]), "options": options}
    return lines


def train_line(
    root: Path, name: str, task: str, section: Mapping[str, Any], prepare: Callable[[Any], None] | None = None
) -> Line:
    """Train one line in the scratch checkout `root`, and return what it computed.

    Args:
        prepare: is called with the job before it runs, for instance to choose another backend.

    Returns:
        `loss` and `grad_norm` of each step, and the final `scores` on the held-out split.
    """
    spec, paths = load_tasks()[task], Paths(root)
    params = build(spec.params, section, f"golden.{name}")
    if params.init is not None:
        init = dataclasses.replace(params.init, sha256=hash_file(root / params.init.weights, digits=64))
        params = dataclasses.replace(params, init=init)
    roots = {data: str(root / "pictures" / data) for data in _PICTURE_KINDS}
    runtime = Runtime(device="cpu", threads=1, data_roots=roots)
    record = paths.results / "golden" / "line.json"
    cell = Cell(stage="golden", name="line", params=params, spec=spec, paths=paths, runtime=runtime, record=record)
    with contextlib.redirect_stdout(io.StringIO()):
        job = build_job(cell, params.seeds[0])
        if prepare is not None:
            prepare(job)
        log = root / "log"
        watch = Watch(log, device=job.task.device, jsonl=True, tensorboard=False, every=10)
        with contextlib.closing(job):
            done, _ = fit(
                job.task,
                params,
                save_every_steps=sys.maxsize,  # only at the end of each epoch, and then nothing is kept
                checkpointer=_NoCheckpoints(log),
                snapshot=lambda epoch, model: None,
                watch=watch,
            )
    steps = [json.loads(row) for row in (log / "train.jsonl").read_text().splitlines()]
    shutil.rmtree(log)
    # a number that is not finite is null in the log
    if bad := next((each for each in steps if None in (each["loss"], each["grad_norm"])), None):
        raise RunError(f"golden: {name}: the loss or gradients of step {bad['step']} are not finite")
    last = done.curve[-1]
    scores = {
        key: last[key] for key in sorted(last) if key not in ("epoch", "step", "lr") and not key.startswith("train_")
    }
    # nine digits, of which `TOLERANCE` compares about six
    rounded = {key: [float(f"{step[key]:.9g}") for step in steps] for key in ("loss", "grad_norm")}
    return rounded | {"scores": {key: float(f"{score:.9g}") for key, score in scores.items()}}


@contextlib.contextmanager
def scratch_checkout(paths: Paths) -> Iterator[Path]:
    """Make a temporary work tree to train lines in: the committed pictures, their manifests, and initial weights."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "pictures").symlink_to(paths.results / "golden" / "pictures")
        for data, kind in _PICTURE_KINDS.items():
            write_manifest(
                Paths(root).cell("prepare_data", data) / "manifest.json", scan_manifest(root / "pictures" / data, kind)
            )
        _save_starts(root)
        yield root


def _save_starts(root: Path) -> None:
    """Write the weights that lines start from, under the names that golden.yaml has as their `init`.

    Students inherit from a softmax ViT. Pooling by maximum starts from a Vittt whose last norm has unequal scales:
    after a norm with equal scales all tokens are equally long, and rounding would decide which one is the maximum.
    """
    import torch

    from ..models.registry import build_model
    from ..models.weights import save_weights

    classes = sorted(folder.name for folder in (root / "pictures" / "classes" / "train").iterdir())
    for file, family, line in (("teacher", "t5", "inner=softmax"), ("scaled", "vittt", "pool=max")):
        _, section = list_lines(read_cases(), family)[line]
        transform = build(ClassifierParams, section, "golden").transform
        options = section["options"] | {"num_classes": len(classes), "img_size": transform.image_size}
        torch.manual_seed(0)
        model = build_model(section["model"], **options)
        if file == "scaled":
            torch.nn.init.uniform_(model.norm.weight, 0.5, 1.5)
        described = {"preprocessing": transform.preprocessing(), "classes": classes}
        save_weights(root / f"{file}.safetensors", model, name=section["model"], options=options, **described)


def run_families(
    paths: Paths, families: Sequence[str], prepare: Callable[[Any], None] | None = None
) -> Iterator[tuple[str, dict[str, Line]]]:
    """Yield each family and its lines, trained one after another."""
    cases = read_cases()
    with scratch_checkout(paths) as root:
        for family in families:
            lines = list_lines(cases, family)
            yield (family, {name: train_line(root, f"{family}.{name}", *line, prepare) for name, line in lines.items()})


def compare_lines(family: str, found: Mapping[str, Line], kept: Mapping[str, Line]) -> dict[str, list[str]]:
    """Return line -> what is wrong with it, for lines that are new, gone, or different by more than rounding."""
    problems = {name: ["has no stored values"] for name in found if name not in kept}
    problems |= {name: ["is stored and no longer trained"] for name in kept if name not in found}
    for name in (name for name in found if name in kept):
        allowed, differences = find_tolerances(family, name), measure_differences(found[name], kept[name])
        if beyond := [part for part in PARTS if differences[part] > allowed[part]]:
            problems[name] = [
                f"{part} differs by {differences[part]:.1e}; {allowed[part]:.0e} is rounding" for part in beyond
            ]
    return problems


def find_tolerances(family: str, line: str) -> dict[str, float]:
    """Return part -> largest relative difference by rounding: `TOLERANCE`, or five times the stated noise."""
    said = read_cases()["families"][family]
    noise = said.get("noise", {}) | said["lines"][line].get("noise", {})
    return {part: max(TOLERANCE, 5 * float(noise.get(part, 0))) for part in PARTS}


def measure_differences(a: Line, b: Line) -> dict[str, float]:
    """Return part -> largest relative difference of two lines; infinite if they do not have the same keys."""
    found = {}
    for part in PARTS:
        x, y = (dict(enumerate(line[part])) if isinstance(line[part], list) else line[part] for line in (a, b))
        pairs = [(x[key], y[key]) for key in x] if x.keys() == y.keys() else [(math.inf, 1.0)]
        relative = [abs(one - other) / max(abs(one), abs(other), 1e-12) for one, other in pairs]
        # `max` could overlook a NaN
        found[part] = math.inf if any(map(math.isnan, relative)) else max(relative)
    return found


def update_families(families: Sequence[str], *, check: bool = False) -> list[str]:
    """Train families anew and write the values that differ, unless `check`; return a sentence for each of them.

    A line whose values agree within the tolerance is not rewritten.
    """
    paths, problems = find_root(), []
    for family, found in run_families(paths, families):
        file = find_golden(paths, family)
        kept = read_json(file) if file.is_file() else {}
        different = compare_lines(family, found, kept)
        print(f"{family}: {len(found)} lines, {'differs' if different else 'holds'}", flush=True)
        if different and not check:
            _write_lines(file, {name: line if name in different else kept[name] for name, line in found.items()})
        problems += [f"{family}: {name}: {problem}" for name, of_line in different.items() for problem in of_line]
    return problems


def _write_lines(file: Path, lines: Mapping[str, Line]) -> None:
    """Write a family's values, a row of the file for each line.

    Records and dvc.lock hold the hash of the file: another format would make every training of the family out of date.
    """
    rows = [f"  {json.dumps(name)}: {json.dumps(line, allow_nan=False)}" for name, line in lines.items()]
    write_text(file, "{\n" + ",\n".join(rows) + "\n}\n")


def _merge(*sections: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; a later one wins."""
    merged: dict[str, Any] = {}
    for section in sections:
        for key, value in section.items():
            inner = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = _merge(merged[key], value) if inner else value
    return merged
