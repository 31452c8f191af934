"""Search of the learning rate and warm-up of a cell, scored on the split `tune` and never evaluated on `test`.

Each trial is a complete training with the recipe of the cell. If the best trial lies at an edge of the grid, the grid
is widened there, so that no cell is limited to a range that suits another. Finished trials stay in .runs until the
search is done, so a stopped call loses none.
"""

import dataclasses
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ..core.config import Each, bounded, list_cells, load_section, params_hash
from ..core.errors import Diverged, RunError, UserError
from ..core.hashing import hash_file
from ..core.paths import Paths, find_root
from ..core.record import make_identity, read_json, write_json, write_record
from ..core.runtime import Runtime, load_runtime
from ..core.ui import print_table
from ..data.cells import find_data_root as find_data
from ..data.kinds import KINDS, PrepareData
from ..tasks.spec import TaskSpec
from ..training.params import TrainParams
from .cells import find_place
from .job import Cell, build_job, hash_golden, run_job

_RULE = "highest score on tune; among equals the lower rate, then the shorter warm-up"
_WIDENINGS = 3  # the most times that a grid is widened
SECTION = "tune"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneParams:
    """A cell of `tune`.

    Args:
        cell: whose rate and warm-up are chosen: `pretrain.NAME`, or another section's.
        family, data: those of this cell, repeated because dvc.yaml cannot look them up in another section.
        lr, warmup_epochs: the values, each with each, see `OptimParams`; of two values or more, the search goes on
            beyond the best one if it is the first or the last. Without `warmup_epochs`, the cell's own holds.
        seed: of every trial; no seed whose results are reported.
    """

    cell: str
    family: str
    data: str
    lr: tuple[Annotated[float, Each(gt=0)], ...]
    warmup_epochs: tuple[Annotated[int, Each(ge=0)], ...] = ()
    seed: int = bounded(100, ge=0)

    def __post_init__(self) -> None:
        for name, least in (("lr", 1), ("warmup_epochs", 0)):
            values = getattr(self, name)
            if len(values) < least or len(set(values)) < len(values):
                raise ValueError(f"{name}: {list(values)}, expected one or more, each once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchParams:
    """The parameters that determine a search's outcome, for the hash in its record."""

    cell: TrainParams
    tune: TuneParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A search: its name, its parameters, and the cell whose rate it chooses."""

    name: str
    tune: TuneParams
    cell: Cell

    @property
    def score(self) -> str:
        """Return the key of the score by which trials are compared."""
        return next(iter(self.cell.spec.scores))

    def list_trials(self, grid: TuneParams) -> list[Cell]:
        """Make a cell for each trial, in the order of the grid; the record's hash is over the first one's parameters."""
        found, params = [], dataclasses.replace(self.cell.params, seeds=(self.tune.seed,), snapshot_epochs=())
        for lr, warmup_epochs in itertools.product(grid.lr, grid.warmup_epochs):
            optim = dataclasses.replace(params.optim, lr=lr, warmup_epochs=warmup_epochs)
            tried = {"params": dataclasses.replace(params, optim=optim), "stage": SECTION, "reported": False}
            found.append(dataclasses.replace(self.cell, name=f"{self.name}_lr{lr:g}_warmup{warmup_epochs}", **tried))
        return found


def read_searches(specs: Mapping[str, TaskSpec], name: str | None) -> list[Search]:
    """Read one search of the section `tune`, or all of them; `specs` maps a section to the task of its cells.

    Raises:
        UserError: no such search or cell, or a search that does not fit its cell.
    """
    paths = find_root()
    runtime, found = load_runtime(paths), []
    for each in [name] if name else list_cells(paths, SECTION):
        tune, where = load_section(TuneParams, paths.params, SECTION, each), f"{SECTION}.{each}"
        section, _, cell = tune.cell.partition(".")
        if section not in specs:
            raise UserError(f"{where}.cell: {tune.cell}: expected SECTION.CELL, one of {', '.join(specs)}")
        params = load_section(specs[section].params, paths.params, section, cell)
        if not (score := next(iter(specs[section].scores))).endswith("_percent"):
            raise UserError(
                f"{where}.cell: {tune.cell}: a search chooses the highest score, and {score} is better if lower"
            )
        for key in ("family", "data"):
            if getattr(tune, key) != getattr(params, key):
                raise UserError(f"{where}.{key}: {getattr(tune, key)}, and {tune.cell} has {getattr(params, key)}")
        tune = dataclasses.replace(tune, warmup_epochs=tune.warmup_epochs or (params.optim.warmup_epochs,))
        if tune.seed in params.seeds:
            raise UserError(f"{where}.seed: {tune.seed} is a seed of {tune.cell}, whose results are reported")
        if (longest := max(tune.warmup_epochs)) >= params.epochs:
            raise UserError(f"{where}.warmup_epochs: {longest}, and {tune.cell} trains {params.epochs} epochs")
        _require_tune(paths, runtime, tune.data, f"{where}.data")
        shared = {"paths": paths, "runtime": runtime, "record": paths.cell(SECTION, each) / "metrics.json"}
        of_search = Cell(stage=section, name=cell, params=params, spec=specs[section], **shared)
        found.append(Search(name=each, tune=tune, cell=of_search))
    return found


def _require_tune(paths: Paths, runtime: Runtime, data: str, where: str) -> None:
    """Raise a UserError for data without a split `tune`, because the search must not use the reported split."""
    params = load_section(PrepareData, paths.params, "prepare_data", data)
    row = KINDS[params.kind]
    if row.other_splits:
        row = row.at(find_data(paths, runtime, data, row.name))
    if "tune" not in row.splits and params.tune_split is None:
        advice = "give it a tune_split" if row.settings_key else "take embedded data"
        raise UserError(f"{where}: {data} is of kind {row.name}, which has no split tune to choose on; {advice}")


def run_search(search: Search) -> None:
    """Train the unfinished trials one after another, and write the record with every trial and the chosen one.

    Raises:
        RunError: every trial diverged. Otherwise as `run_job`.
    """
    started, grid, done = time.monotonic(), search.tune, {}
    for _ in range(1 + _WIDENINGS):
        for trial in search.list_trials(grid):
            if trial.name not in done:
                done[trial.name] = _run_trial(search, trial)
        best = choose_trial([found["trial"] for found in done.values()], search.score)
        if best is None or (wider := widen(grid, best, search.cell.params.epochs)) is None:
            break
        grid = wider
    trials = [found["trial"] for found in done.values()]
    if (chosen := choose_trial(trials, search.score)) is None:
        raise RunError(f"tune: every trial of {search.name} diverged; lower {SECTION}.{search.name}.lr")
    cell = search.cell
    metrics = {
        "cell": cell.where,
        "model": cell.params.model,
        "data": cell.params.data,
        "split": "tune",
        "seed": search.tune.seed,
        "score": search.score,
        "rule": _RULE,
        "trials": trials,
        "chosen": {name: chosen[name] for name in ("lr", "warmup_epochs")},
    }
    # the parameters of a trial, so that the hash stays the same when the chosen rate is written into the cell
    params = SearchParams(cell=search.list_trials(search.tune)[0].params, tune=search.tune)
    place = next(iter(done.values()))["place"]  # device, dtype and backend, taken to be those of all trials
    identity = make_identity(cell.paths.root, params, data_manifest=cell.inputs[0], **place)
    identity["golden_hash"] = hash_golden(cell.paths, cell.params)
    write_record(cell.record, metrics, identity, time.monotonic() - started)
    for trial in search.list_trials(grid):
        shutil.rmtree(trial.state_folder(search.tune.seed).parent, ignore_errors=True)
    _show(search, metrics)


def _run_trial(search: Search, trial: Cell) -> dict[str, Any]:
    """Run a trial, keep its outcome {origin, place, trial} for a later call, and return it.

    Divergence is an outcome and not an error.
    """
    hashes = {"params": params_hash(trial.params), "data": hash_file(trial.inputs[0])}
    hashes["golden"] = hash_golden(trial.paths, trial.params)
    if trial.params.init is not None:  # they may be those of a cell that was trained again
        hashes["init"] = hash_file(trial.init)
    # outside the state's folder, which is removed below
    file = trial.state_folder(search.tune.seed).parent / "trial.json"
    if file.is_file() and (kept := read_json(file))["origin"] == hashes:
        return kept
    optim, score = trial.params.optim, search.score
    found: dict[str, Any] = {"lr": optim.lr, "warmup_epochs": optim.warmup_epochs}
    job = build_job(trial, search.tune.seed)
    try:
        metrics = run_job(job).metrics
    except Diverged as error:
        found |= {"diverged": True, score: None, "train_loss": None}
        found["reason"] = f"step {error.step}: training not finite"
        print(f"{trial.name}: diverged", flush=True)
    else:
        found |= {"diverged": False, score: metrics[score], "train_loss": metrics["train_loss"]}
        if metrics["train_loss"] is None:
            found["train_loss_reason"] = metrics["train_loss_reason"]
        print(f"{trial.name}: {trial.spec.scores[score]} {metrics[score]:.2f} % on {metrics['split']}", flush=True)
    kept = {"origin": hashes, "place": find_place(job), "trial": found}
    write_json(file, kept)
    shutil.rmtree(trial.state_folder(search.tune.seed))  # the weights of a trial are not needed any more
    return kept


def choose_trial(trials: Sequence[Mapping[str, Any]], score: str) -> Mapping[str, Any] | None:
    """Return the trial that `_RULE` chooses; None if all diverged."""
    sound = [trial for trial in trials if not trial["diverged"]]
    return max(sound, key=lambda trial: (trial[score], -trial["lr"], -trial["warmup_epochs"]), default=None)


def widen(grid: TuneParams, best: Mapping[str, Any], epochs: int) -> TuneParams | None:
    """Return the grid with another value beyond each edge at which the best trial lies; None if it lies at no edge.

    A new rate continues the ratio of the two at the edge. A new warm-up is one epoch shorter or longer, if it is not
    negative and stays shorter than the training of `epochs`. A single value of either is fixed by the user, and has no
    edge.
    """
    wider: dict[str, tuple[Any, ...]] = {}
    rates, warmups = sorted(grid.lr), sorted(grid.warmup_epochs)
    if len(rates) > 1:
        beyond = {rates[0]: rates[0] * rates[0] / rates[1], rates[-1]: rates[-1] * rates[-1] / rates[-2]}
        if best["lr"] in beyond:
            wider["lr"] = (*grid.lr, beyond[best["lr"]])
    if len(warmups) > 1:
        beyond = {warmups[0]: warmups[0] - 1, warmups[-1]: warmups[-1] + 1}
        if 0 <= (further := beyond.get(best["warmup_epochs"], -1)) < epochs:
            wider["warmup_epochs"] = (*grid.warmup_epochs, further)
    return dataclasses.replace(grid, **wider) if wider else None


def _show(search: Search, metrics: Mapping[str, Any]) -> None:
    """Print the trials of a finished search as a table, and mark the chosen one; `metrics` are its record's."""
    score, chosen, rows = metrics["score"], metrics["chosen"], []
    for trial in metrics["trials"]:
        mark = "chosen" if all(trial[name] == value for name, value in chosen.items()) else ""
        shown = "diverged" if trial["diverged"] else f"{trial[score]:.2f} %"
        loss = "–" if trial["train_loss"] is None else f"{trial['train_loss']:.4f}"
        rows.append([f"{trial['lr']:g}", str(trial["warmup_epochs"]), shown, loss, mark])
    label = f"{search.cell.spec.scores[score]} on tune"
    print_table(["rate", "warm-up epochs", label, "training loss", ""], rows)
