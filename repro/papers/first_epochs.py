"""The first epochs of recorded trainings, trained again: whether the code here begins them as older code did.

After so few steps, computations that are equal but for rounding still have nearly one mean loss and one mean norm of
gradients. Later they part, since training amplifies what rounding changed, and only means over seeds can be compared.
How near is near enough is said by other trainings: those of the same variants, and of other seeds, must be farther.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..core.csvfile import read_csv
from ..core.errors import Interrupted, RunError, UserError
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
# a cell's folder under results/measured, as `read_cells` names it
_CELL = re.compile(r"(?P<cell>.+?)(?P<random>_random)?(?P<epochs>_\d+epochs)?(?:_\d+seeds)?")
_OF_CODE = ("code_hash", "code_modules", "number_hash")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """When the beginnings of two trainings are alike; its hash is in the record's identity.

    Args:
        epochs: by which a training is judged.
        tolerance: of the mean loss, relative.
        rounding: what a curve's digits and sums in another order may change, relative.
    """

    epochs: int = 6
    tolerance: float = 1e-3
    rounding: float = 1e-6


RULE = Rule()


class _Judged(Exception):
    """A training is judged; its arguments are the number of epochs, their last means and the verdict."""


class _UntilJudged(Checkpointer):
    """Keeps nothing, and ends a run at the end of an epoch by which it can be judged.

    Args:
        steps: of an epoch.
        judge: gives an epoch's verdict by its number, from 1 on, and its means; None goes on.
    """

    def __init__(self, steps: int, judge: Callable[[int, Means], bool | None]):
        self.steps, self.judge = steps, judge

    def restore(self) -> None:
        return None

    def save(self, step: int, state: dict[str, Any]) -> None:
        (epoch, rest), run = divmod(step, self.steps), state["run"]
        if rest:  # a signal asks for it
            return
        means = {name: run["epoch_sums"][name.removeprefix("train_")] / run["epoch_steps"] for name in MEANS}
        if (verdict := self.judge(epoch, means)) is not None:
            raise _Judged(epoch, means, verdict)


def follow_records(
    paths: Paths, names: Iterable[str], grids: Iterable[VariantSet], tasks: Mapping[str, TaskSpec]
) -> Iterator[str]:
    """Compare the first epochs of recorded trainings with those of the code here; yield a line for each.

    What is found goes to results/measured/<device>/first_epochs.json as it comes, by the record's name; what is there of
    its weights and the present code is not trained again.

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
        first = metrics["by_seed"][0]
        now = {
            "number_hash": hash_number(paths.root, identity["code_modules"], identity["device"]),
            "weights_hash": first["weights_hash"],
        }
        if not now.items() <= found.get(name, {}).items():
            try:
                job = build_job(cell, first["seed"])
                with contextlib.closing(job):
                    entry, place = _follow(job, identity, first["seed"]), find_place(job)
            except (UserError, RunError) as error:
                yield f"{name}: {error}"
                continue
            found[name] = now | entry
            about = make_identity(paths.root, identity["code_modules"], RULE, **place)
            # no code makes it old: each entry names its own
            about = {key: value for key, value in about.items() if key not in _OF_CODE}
            write_record(file.parent, {FIRST_EPOCHS: found}, about, 0.0, name=FIRST_EPOCHS)
        entry = found[name]
        means = (f"{mean} {entry[f'recorded_{mean}']:.6f} -> {entry[mean]:.6f}" for mean in MEANS)
        verdict = "" if entry["follows"] else ", which does not tell it from others"
        yield f"{name}: epoch {entry['epoch']}, {', '.join(means)}{verdict}"


def judge(now: Means, recorded: Means, others: Iterable[Means]) -> bool | None:
    """Whether the means of an epoch are those of a record: False where the loss is another; True where they are three
    times nearer than to any other training, by loss or by the gradients' norm; None where that is open.
    """

    def is_nearer(name: str, other: Means) -> bool:
        here = max(abs(now[name] - recorded[name]), RULE.rounding * abs(recorded[name]))
        return abs(now[name] - other[name]) >= 3 * here

    if abs(now["train_loss"] - recorded["train_loss"]) > RULE.tolerance * abs(recorded["train_loss"]):
        return False
    return all(any(is_nearer(name, other) for name in MEANS) for other in others) or None


def _follow(job: Job, identity: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The entry of a training whose record has this identity, by its first epochs; nothing else is written.

    Raises:
        UserError: it was another training. Otherwise as `fit`.
    """
    made, _ = describe_job(job, seed)
    is_same = describe_recipe(made) == describe_recipe(identity)
    if not is_same or hash_file(job.cell.inputs[0]) != identity["data_manifest_hash"]:
        raise UserError("its recipe or its data are others now; train it again")
    cell, steps = job.cell, job.task.steps_per_epoch
    curve = cell.folder / "curve.csv"
    every = {file: _read_epochs(file) for file in sorted(curve.parent.parent.glob("*/curve.csv"))}
    recorded = every.get(curve, {})
    if (seed, 1) not in recorded:
        raise UserError("its curve does not say how its first epoch went; train it again")

    def judge_epoch(epoch: int, now: Means) -> bool | None:
        # of the record's other seeds, and of the same seed of its neighbours
        others = [
            means
            for file, epochs in every.items()
            for (number, of), means in epochs.items()
            if of == epoch and (file == curve) != (number == seed)
        ]
        verdict = judge(now, recorded[seed, epoch], others)
        is_last = epoch == RULE.epochs or (seed, epoch + 1) not in recorded
        return False if verdict is None and is_last else verdict

    watch = Watch(
        cell.paths.logs(cell.stage, cell.name), device=job.task.device, jsonl=False, tensorboard=False, every=steps
    )
    cadence = {"accumulate": job.accumulate, "save_every_steps": steps, "snapshot": lambda epoch, model: None}
    try:
        fit(job.task, job.params, checkpointer=_UntilJudged(steps, judge_epoch), watch=watch, **cadence)
    except _Judged as judged:
        epoch, now, follows = judged.args
    except Interrupted as stopped:
        raise Interrupted(stopped.exit_code - 128, "what was judged before is kept") from None
    else:
        raise RunError(f"{cell.where}: no epoch was judged")
    given = {f"recorded_{name}": value for name, value in recorded[seed, epoch].items()}
    return {"seed": seed, "epoch": epoch, **given, **now, "follows": follows}


def _read_epochs(curve: Path) -> dict[tuple[int, int], Means]:
    """(seed, epoch) -> its means, as far as a curve has them."""
    rows = [row for row in read_csv(curve) if all(name in row for name in MEANS)]
    return {(row["seed"], row["epoch"]): {name: row[name] for name in MEANS} for row in rows}


def _find_cell(paths: Paths, name: str, grids: Mapping[str, VariantSet], tasks: Mapping[str, TaskSpec]) -> Cell | None:
    """The cell of the first seed of a record, with the record's folder; None for what is neither a variant nor a cell of
    params.yaml.
    """
    parts = PurePosixPath(name).parts[3:-1]  # behind results, measured and the device
    if not (parts and name.startswith("results/measured/") and name.endswith("/metrics.json")):
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
