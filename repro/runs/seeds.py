"""Trainings that are registered before they run: one file for each seed of a cell, and for each trial of its search.

`results/seeds/<data>/<cell>/<seed>.json` says what one training came to, in a form that never changes: the score, which
images of the reported split were right, and what explains the number. `results/seeds/<data>/<cell>/rate_<lr>.json` is a
trial of the search, by its score on `tune`. A file whose hashes are those of the cell is never made again.
"""

import base64
import contextlib
import dataclasses
import datetime
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.config import list_values, load_section, params_hash, section_keys
from ..core.errors import UserError
from ..core.hashing import hash_file
from ..core.paths import Paths
from ..core.record import make_identity, read_json, write_json
from ..core.runtime import Runtime
from ..data.cells import DataCell
from ..tasks.classification.params import ClassifierParams
from ..tasks.classification.spec import SPEC
from .job import Cell, build_job, run_job

SECTION = "pretrain_seeds"
RATES = (2.5e-4, 5.0e-4, 1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3)  # tried for every cell; widened once, by the first and the last
SEARCH_SEED = 100  # never reported
SEARCH_EPOCHS = 2
# seconds for an image of a training that was never run here, and by which a known one may be exceeded
UNKNOWN_S, MARGIN = 0.02, 1.3
MODULES = ["repro.runs.seeds", "repro.tasks.classification.spec"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One training: a seed of a cell, or a trial of its search where `rate` is given."""

    cell: Cell
    rate: float | None = None

    @property
    def file(self) -> Path:
        """Where its result lies."""
        params = self.cell.params
        name = f"{params.seeds[0]}.json" if self.rate is None else f"rate_{self.rate:g}.json"
        return self.cell.paths.results / "seeds" / params.data / self.cell.name.removesuffix(f"_{params.data}") / name

    @property
    def is_done(self) -> bool:
        """Whether its file is there and was made of these parameters and data; raises UserError on one of others."""
        if not self.file.is_file():
            return False
        recorded = read_json(self.file)
        now = {"params_hash": params_hash(self.cell.params), "data_hash": hash_file(self.cell.inputs[0])}
        for name, value in now.items():
            if recorded.get(name) != value:
                raise UserError(f"{self.file}: has another {name}; discard the files of all seeds, never of some")
        return True


def list_trainings(paths: Paths, runtime: Runtime) -> Iterator[Training]:
    """Yield what the section registers, in its order: all searches, seed 0 of every cell, seed 1 of every cell, …

    Raises:
        UserError: no such section, or wrong parameters.
    """
    cells = []
    for name in section_keys(paths.params, SECTION):
        params = load_section(ClassifierParams, paths.params, SECTION, name)
        if SEARCH_SEED in params.seeds:
            raise UserError(f"{SECTION}.{name}.seeds: {SEARCH_SEED} is the seed of the search; take another")
        folder = paths.root / ".runs" / SECTION / name / "out"
        shared = {"stage": SECTION, "spec": SPEC, "paths": paths, "runtime": runtime, "folder": folder}
        cells.append(Cell(name=name, params=params, **shared))
    for rate in RATES:
        for each in cells:
            optim = dataclasses.replace(each.params.optim, lr=rate)
            params = dataclasses.replace(each.params, optim=optim, seeds=(SEARCH_SEED,)).with_epochs(SEARCH_EPOCHS)
            yield Training(cell=dataclasses.replace(each, params=params, reported=False), rate=rate)
    for place in range(max(len(each.params.seeds) for each in cells)):
        for each in cells:
            if place < len(each.params.seeds):
                yield Training(cell=dataclasses.replace(each, params=each.params.with_seed(each.params.seeds[place])))


def train_all(
    chosen: Sequence[Training], trainings: Sequence[Training], until: datetime.datetime | None = None
) -> None:
    """Train what of the chosen trainings has no file yet; start nothing that would not end by `until`.

    A seed is trained once every search of all `trainings` is done and its cell has the best rate of its own: the rates
    are committed between the two.
    """
    require_own_code(trainings[0].cell.paths)
    for training in chosen:
        if training.is_done:
            continue
        if training.rate is None:
            require_best_rate(training, trainings)
        seconds = expect_seconds(training, trainings)
        if until is not None and datetime.datetime.now() + datetime.timedelta(seconds=seconds) > until:
            print(f"{training.file.relative_to(training.cell.paths.root)}: would end after {until:%H:%M}", flush=True)
            return
        train(training)


def train(training: Training) -> None:
    """Train one seed or trial, and write its file."""
    cell, seed, started = training.cell, training.cell.params.seeds[0], time.process_time()
    job = build_job(cell, seed)
    images = len(job.task.train.dataset)
    outcome = run_job(job)
    score = next(iter(SPEC.scores))
    found: dict[str, Any] = {"cell": cell.name, "seed": seed, "rate": cell.params.optim.lr}
    if training.rate is None:
        hits = find_hits(outcome.folder / "weights.safetensors", job.data, job.task.reported_split, cell.params)
        if abs((seen := 100 * sum(hits) / len(hits)) - outcome.metrics[score]) > 1e-9:
            raise RuntimeError(f"{cell.name}: the saved weights have {seen} %, the training {outcome.metrics[score]} %")
        found |= {"hits": pack_hits(hits), "images": len(hits)}
    weights = cell.paths.root / ".runs" / SECTION / "weights" / f"{cell.name}-{training.file.stem}.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(outcome.folder / "weights.safetensors", weights)
    identity = make_identity(
        cell.paths.root,
        MODULES,
        cell.params,
        data_manifest=cell.inputs[0],
        device=str(job.task.device),
        dtype=job.precision,
        backend="",
    )
    found |= {
        "split": outcome.metrics["split"],
        score: outcome.metrics[score],
        "held_out_loss": outcome.metrics["held_out_loss"],
        "train_loss": outcome.metrics["train_loss"],
        "num_params": outcome.metrics["num_params"],
        "skipped_steps": outcome.metrics["skipped_steps"],
        "epochs": cell.params.epochs,
        "train_images": images,
        "params": list_values(cell.params),
        "params_hash": params_hash(cell.params),
        "data_hash": hash_file(cell.inputs[0]),
        "weights_hash": outcome.metrics["weights_hash"],
        "commit": identity["parent_commit"],
        "device": identity["machine"],
        "versions": identity["versions"],
        "core_hours": (time.process_time() - started) / 3600,
    }
    write_json(training.file, found)
    shutil.rmtree(outcome.state)
    print(f"{cell.name}, {training.file.stem}: {found[score]:.2f} % on {found['split']}", flush=True)


def find_hits(weights: Path, data: DataCell, split: str, params: ClassifierParams) -> list[bool]:
    """Whether each image of a split is classified rightly by saved weights, in the order of its classes and files."""
    import torch

    from ..data.classification import ImageFolder, ToInput, eval_transform
    from ..data.loader import EvalLoader
    from ..models.checkpoints import open_weights

    cpu = torch.device("cpu")
    model, to_input = open_weights(weights).require_classifier().build().eval(), ToInput(params.transform, cpu)
    images = ImageFolder(data.open_tree(), split, eval_transform(params.transform))
    loader = EvalLoader(images, batch_size=params.batch_size, workers=0, device=cpu)
    with torch.inference_mode(), contextlib.closing(loader):
        return [hit for x, y in loader for hit in (model(to_input(x)).argmax(1) == y).tolist()]


def pack_hits(hits: Sequence[bool]) -> str:
    """Base64 of a bit an image, the first one in the highest bit of the first byte; a rest of the last byte is 0."""
    import numpy as np

    return base64.b64encode(np.packbits(np.array(hits, dtype=bool)).tobytes()).decode()


def unpack_hits(packed: str, images: int) -> list[bool]:
    """The inverse of `pack_hits`."""
    import numpy as np

    return np.unpackbits(np.frombuffer(base64.b64decode(packed), dtype=np.uint8), count=images).astype(bool).tolist()


def require_own_code(paths: Paths) -> None:
    """Raise UserError where the code that runs is not that of the checkout whose commit the files will name."""
    import kernels
    import repro

    for file in (repro.__file__, kernels.__file__):
        if not Path(file).resolve().is_relative_to(paths.root.resolve()):
            raise UserError(
                f"{file}: this code runs, and results would go to {paths.root}; use that checkout's own .venv"
            )


def require_best_rate(training: Training, trainings: Sequence[Training]) -> None:
    """Raise UserError unless all searches are done and the cell's rate is the best of its own."""
    trials = [each for each in trainings if each.rate is not None]
    if missing := [each for each in trials if not each.is_done]:
        raise UserError(f"{missing[0].file}: is missing; a seed is trained after all searches")
    name, rate = training.cell.name, training.cell.params.optim.lr
    if rate != (best := choose_rate([read_json(each.file) for each in trials if each.cell.name == name])):
        raise UserError(f"{SECTION}.{name}.optim.lr: {rate:g}, and its search chose {best:g}; write that")


def choose_rate(trials: Sequence[dict[str, Any]]) -> float:
    """The rate with the highest score on tune; the lower one of equals."""
    score = next(iter(SPEC.scores))
    return max(sorted(trials, key=lambda trial: trial["rate"]), key=lambda trial: trial[score])["rate"]


def expect_seconds(training: Training, trainings: Sequence[Training]) -> float:
    """How long a training will take, by those of the same cell that are done."""
    images = training.cell.params.epochs * 50_000
    done = [read_json(each.file) for each in trainings if each.cell.name == training.cell.name and each.file.is_file()]
    known = [3600 * each["core_hours"] / (each["epochs"] * each["train_images"]) for each in done]
    return images * (MARGIN * max(known) if known else UNKNOWN_S)


def print_rates(trainings: Sequence[Training]) -> None:
    """Print each cell's scores on tune by rate, and the best rate."""
    score = next(iter(SPEC.scores))
    for name in dict.fromkeys(each.cell.name for each in trainings):
        trials = [read_json(each.file) for each in trainings if each.cell.name == name and each.rate and each.is_done]
        if trials:
            found = ", ".join(f"{trial['rate']:g}: {trial[score]:.2f}" for trial in trials)
            print(f"{name}: {choose_rate(trials):g} ({found}; {len(trials)} of {len(RATES)} rates)")
