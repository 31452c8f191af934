"""Trainings that are registered before they run: one file for each seed of a cell, and for each trial of its search.

`results/seeds/<data>/<cell>/<seed>.json` has the result of one training in a fixed form: the score, the correctly
classified images of the reported split, and the provenance. `results/seeds/<data>/<cell>/rate_<lr>.json` is a trial of
the search, with its score on `tune`. A file whose hashes agree with the cell is never made again. The record of a cell,
results/pretrain_seeds/<cell>, is made from the files of its seeds; no training reads it.
"""

import contextlib
import dataclasses
import datetime
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.config import list_cells, list_values, load_section, params_hash
from ..core.errors import RunError, UserError
from ..core.hashing import hash_file
from ..core.paths import Paths
from ..core.record import make_identity, pack_hits, read_json, unpack_hits, write_json, write_record
from ..core.runtime import Runtime
from ..data.findings import count
from ..data.manifest import read_manifest
from ..tasks.classification.params import ClassifierParams
from ..tasks.classification.spec import SPEC
from .cells import print_scores, remove_states, summarise_cell
from .job import Cell, Job, build_job, place_model, run_job, split_batch

SECTION = "pretrain_seeds"
RATES = (2.5e-4, 5.0e-4, 1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3)  # tried for every cell; widened once, at both ends
SEARCH_SEED = 100  # never reported
SEARCH_EPOCHS = 2
# seconds of an epoch without a measured time, and the safety factor on a measured one
UNKNOWN_S, MARGIN = 1000.0, 1.3
SCORE = next(iter(SPEC.scores))
# keys of a seed's file by type; `EXPLAINS` are those of provenance, which do not describe the training. `read_seed`
# demands each key: with a further one, it would refuse every file that exists
FORM = {
    **dict.fromkeys(("seed", "images", "num_params", "skipped_steps", "epochs", "train_images"), int),
    **dict.fromkeys(("rate", SCORE, "core_hours"), float | int),
    **dict.fromkeys(("held_out_loss", "train_loss"), float | int | None),
    **dict.fromkeys(("cell", "hits", "split", "params_hash", "data_hash", "weights_hash"), str),
    **dict.fromkeys(("params", "device", "versions"), dict),
    "commit": str | None,
}
EXPLAINS = ("cell", "hits", "images", "params_hash", "data_hash", "params", "device", "versions", "commit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One training: a seed of a cell, or a trial of its search where `rate` is given."""

    cell: Cell
    rate: float | None = None

    @property
    def file(self) -> Path:
        """The path of its result, which `papers.vision_ttt.photographs` reads by the cell's name without its data."""
        params = self.cell.params
        name = f"{params.seeds[0]}.json" if self.rate is None else f"rate_{self.rate:g}.json"
        return self.cell.paths.results / "seeds" / params.data / self.cell.name.removesuffix(f"_{params.data}") / name

    @property
    def is_done(self) -> bool:
        """True if its file exists; raises UserError if that was made with other parameters or data."""
        if not self.file.is_file():
            return False
        recorded = read_json(self.file)
        now = {"params_hash": params_hash(self.cell.params), "data_hash": hash_file(self.cell.inputs[0])}
        for name, value in now.items():
            if not isinstance(recorded, dict) or recorded.get(name) != value:
                raise UserError(f"{self.file}: has another {name}; discard the files of all seeds, never of some")
        return True


def list_trainings(paths: Paths, runtime: Runtime) -> Iterator[Training]:
    """Yield the registered trainings in order: all searches, seed 0 of every cell, seed 1 of every cell, …

    A seed is trained at the rate in params.yaml, which `train_all` compares with the one that the search chose. Any
    change of a trial's or a seed's params here makes `is_done` refuse every file that exists.

    Raises:
        UserError: no such section, or wrong parameters.
    """
    cells = []
    for name in list_cells(paths, SECTION):
        params = load_section(ClassifierParams, paths.params, SECTION, name)
        if SEARCH_SEED in params.seeds:
            raise UserError(f"{SECTION}.{name}.seeds: {SEARCH_SEED} is the seed of the search; take another")
        record = paths.cell(SECTION, name) / "metrics.json"
        shared = {"stage": SECTION, "spec": SPEC, "paths": paths, "runtime": runtime, "record": record}
        cells.append(Cell(name=name, params=params, **shared))
    for rate in RATES:
        for each in cells:
            optim = dataclasses.replace(each.params.optim, lr=rate)
            params = dataclasses.replace(each.params, optim=optim, seeds=(SEARCH_SEED,)).with_epochs(SEARCH_EPOCHS)
            yield Training(cell=dataclasses.replace(each, params=params, reported=False), rate=rate)
    # a cell with fewer seeds than others is left out of the last rounds
    for place in range(max(len(each.params.seeds) for each in cells)):
        for each in cells:
            if place < len(each.params.seeds):
                yield Training(cell=dataclasses.replace(each, params=each.params.with_seed(each.params.seeds[place])))


def train_all(
    chosen: Sequence[Training], trainings: Sequence[Training], until: datetime.datetime | None = None
) -> bool:
    """Train the chosen trainings that have no file yet; start none that would not end by `until`: False if one is left.

    A seed is trained only after all searches among `trainings` are done and its cell has the best rate of its search,
    so that the rates are committed before any seed runs.
    """
    for training in chosen:
        if training.is_done:
            remove_states(training.cell, training.cell.params.seeds)  # what a call that was killed at its end left
            continue
        if training.rate is None:
            require_best_rate(training, trainings)
        seconds = expect_seconds(training, trainings)
        if until is not None and datetime.datetime.now() + datetime.timedelta(seconds=seconds) > until:
            print(f"{training.file.relative_to(training.cell.paths.root)}: would end after {until:%H:%M}", flush=True)
            return False
        train(training)
    return True


def train(training: Training) -> None:
    """Train one seed or trial, and write its file; its weights stay in .runs, where no code reads them.

    The report refuses seeds of another commit than that of cifar10.yaml, so they must be trained in a checkout of it.

    Raises:
        RunError: the saved weights do not have the score of the training. Otherwise as `run_job`.
    """
    from ..training.checkpoint import read_clocks

    cell, seed, started = training.cell, training.cell.params.seeds[0], read_clocks()[1]
    job = build_job(cell, seed)
    images = len(job.task.train.dataset)
    outcome = run_job(job)
    found: dict[str, Any] = {"cell": cell.name, "seed": seed, "rate": cell.params.optim.lr}
    if training.rate is None:
        hits = find_hits(outcome.folder / "weights.safetensors", job)
        if abs((seen := 100 * sum(hits) / len(hits)) - outcome.metrics[SCORE]) > 1e-9:
            problem = f"its saved weights have {seen} %, and its training had {outcome.metrics[SCORE]} %"
            raise RunError(f"{outcome.state}: {problem}; remove the folder to train again")
        found |= {"hits": pack_hits(hits), "images": len(hits)}
    weights = cell.paths.root / ".runs" / SECTION / "weights" / f"{cell.name}-{training.file.stem}.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(outcome.folder / "weights.safetensors", weights)
    identity = make_identity(
        cell.paths.root,
        cell.params,
        data_manifest=cell.inputs[0],
        device=str(job.task.device),
        dtype=job.precision,
        backend="",
    )
    found |= {
        "split": outcome.metrics["split"],
        SCORE: outcome.metrics[SCORE],
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
        "core_hours": (outcome.earlier[1] + read_clocks()[1] - started) / 3600,
    }
    write_json(training.file, found)
    remove_states(cell, (seed,))
    print(f"{cell.name}, {training.file.stem}: {found[SCORE]:.2f} % on {found['split']}", flush=True)


def collect(cell: str, trainings: Sequence[Training]) -> None:
    """Write the record of a cell from the files of its seeds, which are not changed.

    It is made from these files alone and replaces any earlier record, so its bytes are always the same. If the seeds
    differ in commit, machine or versions, the identity has None for it, and `<name>_by_seed`.

    Raises:
        UserError: the file of a seed is missing, damaged, or of other parameters or data.
    """
    own = [each for each in trainings if each.cell.name == cell and each.rate is None]
    if missing := [each for each in own if not each.is_done]:
        raise UserError(
            f"{missing[0].file}: is missing; {len(own) - len(missing)} of {len(own)} seeds of {cell} are there, and its "
            f"record needs all; train the rest with `repro seeds --cell {cell}`"
        )
    files = [read_seed(each.file) for each in own]
    params = dataclasses.replace(own[0].cell.params, seeds=tuple(found["seed"] for found in files))
    whole = dataclasses.replace(own[0].cell, params=params)
    by_seed: dict[int, dict[str, Any]] = {}
    for found in files:
        run = {name: value for name, value in found.items() if name not in EXPLAINS}
        run |= {f"{name}_reason": "not finite" for name, value in run.items() if value is None}
        by_seed[found["seed"]] = run | {"held_out_images": found["images"]}
    manifest = read_manifest(whole.inputs[0])
    metrics = summarise_cell(whole, by_seed, kind=manifest.kind, classes=len(manifest.classes))
    identity: dict[str, Any] = {
        "command": f"repro seeds --cell {cell}",
        "params_hash": params_hash(params),
        "data_manifest_hash": hash_file(whole.inputs[0]),
        "device": " and ".join(dict.fromkeys(_name_device(found["device"]) for found in files)),
        "dtype": " and ".join(dict.fromkeys(_name_dtype(params, found["device"]) for found in files)),
        "recipe": list_values(params),
    }
    for name, named in (("commit", "parent_commit"), ("device", "machine"), ("versions", "versions")):
        values = [found[name] for found in files]
        identity[named] = values[0]
        if any(value != values[0] for value in values):
            identity |= {named: None, f"{named}_reason": "differs", f"{named}_by_seed": values}
    whole.record.unlink(missing_ok=True)  # `write_record` keeps a record with equal numbers, even if the rest differs
    seconds = 3600 * sum(found["core_hours"] for found in files)
    write_record(whole.record, metrics, identity, seconds, scores=SPEC.scores)
    print_scores(whole, metrics)


def read_seed(file: Path) -> dict[str, Any]:
    """Read the file of a seed; raise a UserError for another form, or hits that do not give its score."""
    found, advice = read_json(file), "restore the file as the training wrote it"
    for name, kind in FORM.items():
        value = found.get(name)
        if name not in found or not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            raise UserError(f"{file}: {name}: is missing, or not what a training writes; {advice}")
    if not {"cpu", "threads"} <= found["device"].keys():
        raise UserError(f"{file}: device: names no processor and threads; {advice}")
    try:
        seen = 100 * sum(unpack_hits(found["hits"], found["images"])) / found["images"]
    except (ValueError, ZeroDivisionError):
        raise UserError(f"{file}: hits: not those of {found['images']} images; {advice}") from None
    if abs(seen - found[SCORE]) > 1e-9:
        raise UserError(f"{file}: {SCORE}: {found[SCORE]}, and its hits are {seen} %; {advice}")
    return found


def _name_device(machine: dict[str, Any]) -> str:
    """Rebuild the label of `device_label` from the description by `describe_place`."""
    if "cuda" in machine:
        return f"cuda: {(machine['gpus'] or ['unknown'])[0]}"
    return f"cpu: {machine['cpu']}, {count(machine['threads'], 'thread')}"


def _name_dtype(params: ClassifierParams, machine: dict[str, Any]) -> str:
    """Return the precision in which this cell trains on a machine, as described by `describe_place`."""
    import torch

    return params.resolve_precision(torch.device("cuda" if "cuda" in machine else "cpu"))


def find_hits(weights: Path, job: Job) -> list[bool]:
    """Classify the reported split by saved weights: True for each right image, in the order of classes and files.

    On the device and in the batches of the training's evaluation, since others round differently.
    """
    import torch

    from ..data.loader import EvalLoader
    from ..models.checkpoints import open_weights

    cell, task = job.cell, job.task
    model = open_weights(weights).require_classifier().build().eval()
    model = place_model(model, cell.runtime, cell.ranks, task.device)
    at_once = split_batch(cell.params, cell.runtime, cell.ranks, cell.where)[1]
    images = task.held_out[task.reported_split].dataset
    loader = EvalLoader(images, batch_size=at_once, workers=0, device=task.device)
    with torch.inference_mode(), contextlib.closing(loader):
        return [hit for x, y in loader for hit in (model(task.eval_input(x)).argmax(1).cpu() == y.cpu()).tolist()]


def require_best_rate(training: Training, trainings: Sequence[Training]) -> None:
    """Raise UserError unless all searches are done and the cell's rate is the best of its own."""
    trials = [each for each in trainings if each.rate is not None]
    if missing := [each for each in trials if not each.is_done]:
        raise UserError(f"{missing[0].file}: is missing; a seed is trained after all searches")
    name, rate = training.cell.name, training.cell.params.optim.lr
    if rate != (best := choose_rate([read_json(each.file) for each in trials if each.cell.name == name])):
        raise UserError(f"{SECTION}.{name}.optim.lr: {rate:g}, and its search chose {best:g}; write that")


def choose_rate(trials: Sequence[dict[str, Any]]) -> float:
    """Return the rate with the highest score on tune; among equals the lower one."""
    return max(sorted(trials, key=lambda trial: trial["rate"]), key=lambda trial: trial[SCORE])["rate"]


def expect_seconds(training: Training, trainings: Sequence[Training]) -> float:
    """Estimate a training's seconds from the slowest of the finished ones of its cell, with a margin.

    It takes the seconds of all cores for those of a clock, which are fewer where a training has several threads.
    """
    done = [read_json(each.file) for each in trainings if each.cell.name == training.cell.name and each.file.is_file()]
    known = [3600 * each["core_hours"] / each["epochs"] for each in done]
    return training.cell.params.epochs * (MARGIN * max(known) if known else UNKNOWN_S)


def print_rates(trainings: Sequence[Training]) -> None:
    """Print each cell's scores on tune by rate, and the best rate."""
    for name in dict.fromkeys(each.cell.name for each in trainings):
        trials = [read_json(each.file) for each in trainings if each.cell.name == name and each.rate and each.is_done]
        if trials:
            found = ", ".join(f"{trial['rate']:g}: {trial[SCORE]:.2f}" for trial in trials)
            print(f"{name}: {choose_rate(trials):g} ({found}; {len(trials)} of {len(RATES)} rates)")
