"""The first epoch of recorded trainings, trained again: whether the code here still computes what older code did.

After so few steps, computations that are equal but for rounding still have nearly one mean loss and one mean norm of
gradients. Later they part, since training amplifies what rounding changed, and only means over seeds can be compared.
How near is near enough is said by other trainings: those of the same variants, and of other seeds, must be farther.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..core.csvfile import read_csv
from ..core.errors import RunError, UserError
from ..core.freshness import FIRST_EPOCHS, hash_number
from ..core.hashing import hash_file
from ..core.paths import OWN_RATES, Paths
from ..core.record import describe_recipe, make_identity, read_json, read_record, write_record
from ..core.runtime import choose_device, device_slug, load_runtime
from ..runs.cells import describe_job, find_place, read_cells
from ..runs.job import Cell, Job, build_job
from ..tasks.classification.params import ClassifierParams
from ..tasks.spec import TaskSpec
from ..training.checkpoint import Checkpointer
from ..training.loop import fit
from ..training.watch import Watch
from . import describe_recipe as describe_classifier
from .grid import build_variant, use_own_rates
from .variants import VariantSet

Means = Mapping[str, float]
MEANS = ("train_loss", "train_grad_norm")  # as in curve.csv
# relative: of the mean loss, and what a curve's digits and sums in another order may change
TOLERANCE, ROUNDING = 1e-3, 1e-6
# a cell's folder under results/measured, as `read_cells` names it
_CELL = re.compile(r"(?P<cell>.+?)(?P<random>_random)?(?P<epochs>_\d+epochs)?(?:_\d+seeds)?")
_OF_CODE = ("code_hash", "code_modules", "number_hash")


class _Trained(Exception):
    """The first epoch is trained; its argument is the state of the run."""


class _UntilFirstEpoch(Checkpointer):
    """Keeps nothing, and ends a run after so many steps."""

    def __init__(self, steps: int):
        self.steps = steps

    def restore(self) -> None:
        return None

    def save(self, step: int, state: dict[str, Any]) -> None:
        if step == self.steps:  # a signal asks for it before
            raise _Trained(state["run"])


def follow_records(
    paths: Paths, names: Iterable[str], grids: Iterable[VariantSet], tasks: Mapping[str, TaskSpec]
) -> Iterator[str]:
    """Compare the first epoch of recorded trainings with that of the code here; yield a line for each.

    What is found goes to results/measured/<device>/first_epochs.json as it comes, by the hash of the weights that the
    record names; what is there of the present code is not trained again.

    Args:
        names: the records, relative to the checkout; those of no training are left out.
        grids: the variants.
        tasks: stage -> the task that it trains.
    """
    slug = device_slug(choose_device(load_runtime(paths).device))
    file, by_folder = paths.measured(slug) / f"{FIRST_EPOCHS}.json", {grid.folder: grid for grid in grids}
    found = read_json(file)["metrics"][FIRST_EPOCHS] if file.is_file() else {}
    for name in names:
        try:
            cell = _find_cell(paths, name, by_folder, tasks)
        except UserError as error:
            yield f"{name}: {error}"
            continue
        if cell is None:
            continue
        identity, metrics = (read_record(paths.root / name)[part] for part in ("identity", "metrics"))
        number_hash, seed = hash_number(paths.root, identity["code_modules"]), metrics["by_seed"][0]
        if found.get(seed["weights_hash"], {}).get("number_hash") != number_hash:
            try:
                job = build_job(cell, seed["seed"])
                with contextlib.closing(job):
                    entry, place = _follow(job, identity, seed["seed"]), find_place(job)
            except (UserError, RunError) as error:
                yield f"{name}: {error}"
                continue
            found[seed["weights_hash"]] = {"record": name, "number_hash": number_hash, **entry}
            about = make_identity(paths.root, identity["code_modules"], cell.params, **place)
            # no code makes it old: each entry names its own
            about = {key: value for key, value in about.items() if key not in _OF_CODE}
            write_record(file.parent, {FIRST_EPOCHS: found}, about, 0.0, name=FIRST_EPOCHS)
        entry = found[seed["weights_hash"]]
        means = (f"{mean} {entry[f'recorded_{mean}']:.6f} -> {entry[mean]:.6f}" for mean in MEANS)
        verdict = "" if entry["follows"] else ", which does not tell it from others"
        yield f"{name}: {', '.join(means)}{verdict}"


def train_first_epoch(job: Job) -> Means:
    """The means of the finite steps of a job's first epoch; nothing is written. Raises as `fit`."""
    cell, steps = job.cell, job.task.steps_per_epoch
    logs = cell.paths.logs(cell.stage, cell.name)
    watch = Watch(logs, device=job.task.device, jsonl=False, tensorboard=False, every=steps)
    cadence = {"accumulate": job.accumulate, "save_every_steps": steps, "snapshot": lambda epoch, model: None}
    try:
        fit(job.task, job.params, checkpointer=_UntilFirstEpoch(steps), watch=watch, **cadence)
    except _Trained as trained:
        run = trained.args[0]
        return {name: run["epoch_sums"][name.removeprefix("train_")] / run["epoch_steps"] for name in MEANS}
    raise RunError(f"{cell.where}: no epoch was trained")


def judge(now: Means, recorded: Means, others: Iterable[Means]) -> bool:
    """Whether means are those of a record, and three times nearer to them than to those of any other training, by their
    loss or by their gradients' norm.
    """

    def is_nearer(name: str, other: Means) -> bool:
        here = max(abs(now[name] - recorded[name]), ROUNDING * abs(recorded[name]))
        return abs(now[name] - other[name]) >= 3 * here

    is_near = abs(now["train_loss"] - recorded["train_loss"]) <= TOLERANCE * abs(recorded["train_loss"])
    return is_near and all(any(is_nearer(name, other) for name in MEANS) for other in others)


def _follow(job: Job, identity: Mapping[str, Any], seed: int) -> dict[str, Any]:
    made, _ = describe_job(job, seed)
    if (
        describe_recipe(made) != describe_recipe(identity)
        or hash_file(job.cell.inputs[0]) != identity["data_manifest_hash"]
    ):
        raise UserError("its recipe or its data are others now; train it again")
    curve = job.cell.folder / "curve.csv"
    recorded = _read_first_epochs(curve)
    others = [means for number, means in recorded.items() if number != seed]  # the record's other seeds
    for file in sorted(curve.parent.parent.glob("*/curve.csv")):
        if file != curve and (means := _read_first_epochs(file).get(seed)):
            others.append(means)
    now = train_first_epoch(job)
    given = {f"recorded_{name}": value for name, value in recorded[seed].items()}
    return {"seed": seed, **given, **now, "others": len(others), "follows": judge(now, recorded[seed], others)}


def _read_first_epochs(curve: Path) -> dict[int, Means]:
    """Seed -> the means of its first epoch."""
    rows = [row for row in read_csv(curve) if row["epoch"] == 1 and all(name in row for name in MEANS)]
    return {row["seed"]: {name: row[name] for name in MEANS} for row in rows}


def _find_cell(paths: Paths, name: str, grids: Mapping[str, VariantSet], tasks: Mapping[str, TaskSpec]) -> Cell | None:
    """The cell of the first seed of a record, with the record's folder; None for what is neither a variant nor a cell of
    params.yaml.
    """
    _, _, _, *parts, file = PurePosixPath(name).parts  # results, measured, device, and what follows
    if file != "metrics.json":
        return None
    epochs = read_record(paths.root / name)["metrics"].get("epochs")
    if len(parts) > 2:
        *folders, data, variant = parts
        has_own_rate = folders[-1] == OWN_RATES
        grid = grids.get("/".join(folders[:-1] if has_own_rate else folders))
        if grid is None or variant not in grid.variants:
            return None
        if has_own_rate:
            grid = use_own_rates(grid, data, variant)
        cell = build_variant(grid, variant, paths, data=data, seeds=1, epochs=epochs).cell
    else:
        named = _CELL.fullmatch(parts[-1])
        if parts[0] not in tasks:
            return None
        spec = tasks[parts[0]]
        recipe = describe_classifier if issubclass(spec.params, ClassifierParams) else None
        options = {
            "by_hand": True,
            "random": bool(named["random"]),
            "epochs": named["epochs"] and epochs,
            "recipe": recipe,
        }
        (cell,) = read_cells(parts[0], spec, named["cell"], seeds=1, **options)
    return dataclasses.replace(cell, folder=(paths.root / name).parent)
