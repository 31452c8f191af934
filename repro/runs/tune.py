"""Choosing learning rate and warm-up: the same small search for every cell, scored on the split `tune`, and never
evaluated on `test`.

Each trial is a whole training by the recipe of its cell, in a process of its own. Where the best one lies at an edge of
the grid, the grid is widened there, so that no cell is held to a range that suits another. Finished trials stay in
.runs until the search of their cell is done, so that a stopped call loses none.
"""

import dataclasses
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.config import BY_HAND, bounded, find_cell, load_section, load_yaml, params_hash
from ..core.errors import Diverged, RunError, UserError, did_you_mean
from ..core.hashing import hash_file
from ..core.paths import Paths, find_root
from ..core.record import find_difference, make_identity, read_json, write_json, write_record
from ..core.runtime import choose_device, device_slug, load_runtime
from ..core.ui import print_table
from ..data.cells import find_root as find_data
from ..data.kinds import KINDS, PrepareData
from ..tasks.spec import TaskSpec
from ..training.params import TrainParams
from .cells import find_place
from .job import Cell, build_job, hash_golden, run_job
from .pool import Work, run_all

STAGE = "pretrain"
RULE = "highest score on tune; among equals the lower rate, then the shorter warm-up"
WIDENINGS = 3  # how often a grid is widened at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneParams:
    """The `tune:` section, the same for every cell.

    Args:
        lr, warmup_epochs: what is tried, each with each, see `OptimParams`; of two values or more, the search goes on
            beyond the best one if it is the first or the last.
        seed: of every trial; no seed whose results are reported.
    """

    lr: tuple[float, ...] = bounded((5.0e-4, 1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3), gt=0)
    warmup_epochs: tuple[int, ...] = bounded((1, 2), ge=0)
    seed: int = bounded(100, ge=0)

    def __post_init__(self) -> None:
        for name in ("lr", "warmup_epochs"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: {list(values)}, expected one or more, each once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchParams:
    """What determines the outcome of a search, for the hash in its record: the cell without what is searched, and the
    search.
    """

    cell: TrainParams
    tune: TuneParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """The search of one cell.

    Args:
        cell: what is trained; its folder is that of the record.
        tune: the search.
        arguments: of `repro tune`, besides --data, that choose this search.
    """

    cell: Cell
    tune: TuneParams
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        where, params = self.cell.where, self.cell.params
        if self.tune.seed in params.seeds:
            raise UserError(
                f"tune.seed: {self.tune.seed} is a seed of {where}, whose results are reported; take another"
            )
        if (longest := max(self.tune.warmup_epochs)) >= params.epochs:
            raise UserError(
                f"tune.warmup_epochs: {longest}, and {where} trains {params.epochs} epochs; make it shorter"
            )

    @property
    def file(self) -> Path:
        """The record."""
        return self.cell.folder / f"{self.cell.name}.json"

    @property
    def score(self) -> str:
        """What is compared."""
        return next(iter(self.cell.spec.scores))

    @property
    def trials(self) -> list[Cell]:
        """A cell for each trial, in the order of the grid; then those by which it was widened, as far as those before
        are finished.
        """
        grid, trials = self.tune, self._list_trials(self.tune)
        for _ in range(WIDENINGS):
            finished = self.find_finished(trials)
            best = choose([content["trial"] for content in finished.values()], self.score)
            if len(finished) < len(trials) or best is None:
                break
            if (grid := widen(grid, best, self.cell.params.epochs)) is None:
                break
            known = {trial.name for trial in trials}
            trials += [trial for trial in self._list_trials(grid) if trial.name not in known]
        return trials

    def _list_trials(self, grid: TuneParams) -> list[Cell]:
        found, params = [], dataclasses.replace(self.cell.params, seeds=(self.tune.seed,), snapshot_epochs=())
        for lr, warmup_epochs in itertools.product(grid.lr, grid.warmup_epochs):
            optim = dataclasses.replace(params.optim, lr=lr, warmup_epochs=warmup_epochs)
            name = f"{self.cell.name}_lr{lr:g}_warmup{warmup_epochs}"
            tried = {"stage": "tune", "name": name, "params": dataclasses.replace(params, optim=optim)}
            found.append(dataclasses.replace(self.cell, **tried, reported=False))
        return found

    @property
    def search_params(self) -> SearchParams:
        """What the record's hash of parameters covers: the first trial, which the grid names, and the search."""
        return SearchParams(cell=self._list_trials(self.tune)[0].params, tune=self.tune)

    def find_origin(self, trial: Cell | None = None) -> dict[str, str]:
        """What has to be the same for the record to count still; or for a trial, which the other trials do not concern."""
        params = self.search_params if trial is None else trial.params
        hashes = {"params_hash": params_hash(params), "data_manifest_hash": hash_file(self.cell.inputs[0])}
        return hashes | {"golden_hash": hash_golden(self.cell.paths, self.cell.params)}

    def find_finished(self, trials: Sequence[Cell] | None = None) -> dict[int, dict[str, Any]]:
        """Number of a trial, from 1 -> its file; those of other code, data or parameters do not count."""
        found = {}
        for number, trial in enumerate(self.trials if trials is None else trials, 1):
            file = _trial_file(trial)
            if file.is_file() and (content := read_json(file))["origin"] == self.find_origin(trial):
                found[number] = content
        return found

    def is_recorded(self) -> bool:
        """Whether the record is there; raises UserError where it is of another search."""
        if not self.file.is_file():
            return False
        if different := find_difference(read_json(self.file)["identity"], self.find_origin()):
            raise UserError(f"{self.file}: holds a search with other {different}; move the file away to search again")
        return True


def find_searches(spec: TaskSpec, data: str, cell: str | None) -> list[Search]:
    """The searches of all cells of `STAGE` on a data set, or of one, also of one that no stage of the graph trains.

    Raises:
        UserError: no such cell, data without a split `tune`, or a search that does not fit a cell.
    """
    paths = find_root()
    tune, shared = load_tune(paths, data)
    content = load_yaml(paths.params)
    outside = (content.get(BY_HAND) or {}).get(STAGE) or ()
    cells = {}
    for name in [*(content.get(STAGE) or ()), *(name for name in outside if name == cell)]:
        params = load_section(spec.params, paths.params, *find_cell(paths.params, STAGE, name))
        if params.data == data:
            cells[name] = params
    if cell is not None and cell not in cells:
        raise UserError(f"tune: --cell {cell}: no cell of {STAGE} on {data}{did_you_mean(cell, [*cells, *outside])}")
    found = {name: Cell(stage=STAGE, name=name, params=params, spec=spec, **shared) for name, params in cells.items()}
    chosen = found if cell is None else [cell]
    return [Search(cell=found[name], tune=tune, arguments=("--cell", name)) for name in chosen]


def load_tune(paths: Paths, data: str) -> tuple[TuneParams, dict[str, Any]]:
    """The `tune:` section, and what all searches on a data set share: paths, runtime and the folder of the records.

    Raises:
        UserError: data without a split `tune`.
    """
    runtime = load_runtime(paths)
    tune = load_section(TuneParams, paths.params, "tune") if "tune" in load_yaml(paths.params) else TuneParams()
    params = load_section(PrepareData, paths.params, "prepare_data", data)
    row = KINDS[params.kind]
    if row.other_splits:
        row = row.at(find_data(paths, runtime, data, row.name))
    if "tune" not in row.splits and params.tune_split is None:
        advice = "give it a tune_split" if row.settings_key else "take embedded data"
        raise UserError(f"tune: --data {data}: is of kind {row.name}, which has no split tune to choose on; {advice}")
    folder = paths.measured(device_slug(choose_device(runtime.device))) / "tune"
    return tune, {"paths": paths, "runtime": runtime, "folder": folder}


def run_searches(searches: list[Search], *, jobs: int) -> None:
    """Run the trials that are still to be done, `jobs` at once, and write the record of each cell, with every trial and
    the chosen one.

    Raises:
        UserError: a record of another search is in the way; before anything is trained.
        Interrupted: a signal came; what is finished is kept. RunError: trials failed, or all trials of a cell diverged.
    """
    open_searches = [search for search in searches if not search.is_recorded()]
    while True:
        waiting: dict[str, Work] = {}
        for search in open_searches:
            waiting |= _list_open(search)
        trials = sum(len(search.trials) for search in open_searches)
        print(f"{len(open_searches)} open cells, {trials} trials: {len(waiting)} trainings to do", flush=True)
        if not waiting:
            break
        failed = run_all(waiting, jobs, searches[0].cell.runtime, searches[0].cell.paths.root)
        if failed:
            reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise RunError(f"tune: {len(failed)} of {len(waiting)} failed, the others are done: {reasons}")
    for search in open_searches:
        record_search(search)
    for search in searches:
        _show(search)


def _list_open(search: Search) -> dict[str, Work]:
    """The name of each trial that is not finished -> how it is run."""
    finished, works = search.find_finished(), {}
    for number, trial in enumerate(search.trials, 1):
        if number not in finished:
            arguments = ("tune", "--data", search.cell.params.data, *search.arguments, "--trial", str(number))
            works[trial.name] = Work(arguments=arguments, log=trial.paths.logs("tune", trial.name) / "output.txt")
    return works


def run_trial(search: Search, number: int) -> None:
    """Train one trial in this process, and keep what came of it; `number` counts from 1.

    Raises:
        UserError: no such trial. Otherwise as `run_job`, but that a trial that diverges is an outcome and no error.
    """
    trials = search.trials
    if not 1 <= number <= len(trials):
        raise UserError(f"tune: --trial {number}: {search.cell.name} has the trials 1 to {len(trials)}")
    trial = trials[number - 1]
    started, origin, optim = time.monotonic(), search.find_origin(trial), trial.params.optim
    found: dict[str, Any] = {"lr": optim.lr, "warmup_epochs": optim.warmup_epochs}
    score, label = search.score, search.cell.spec.scores[search.score]
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
        print(f"{trial.name}: {label} {metrics[score]:.2f} % on {metrics['split']}", flush=True)
    found["seconds"] = round(time.monotonic() - started, 1)
    write_json(_trial_file(trial), {"origin": origin, "place": find_place(job), "trial": found})
    shutil.rmtree(trial.state_folder(search.tune.seed))  # the weights of a trial serve nothing more


def record_search(search: Search) -> None:
    """Write the record of a search whose trials are all finished, and remove what they left in .runs.

    Raises:
        RunError: every trial diverged.
    """
    finished, cell = list(search.find_finished().values()), search.cell
    trials = [content["trial"] for content in finished]
    seconds = sum(trial.pop("seconds") for trial in trials)
    chosen = choose(trials, search.score)
    if chosen is None:
        raise RunError(f"tune: every trial of {cell.name} diverged; lower tune.lr")
    metrics = {
        "cell": cell.where,
        "model": cell.params.model,
        "data": cell.params.data,
        "split": "tune",
        "seed": search.tune.seed,
        "score": search.score,
        "rule": RULE,
        "trials": trials,
        "chosen": {name: chosen[name] for name in ("lr", "warmup_epochs")},
    }
    made = {"data_manifest": cell.inputs[0], **finished[0]["place"]}
    identity = make_identity(cell.paths.root, search.search_params, **made)
    identity["golden_hash"] = hash_golden(cell.paths, cell.params)
    write_record(cell.folder, metrics, identity, seconds, name=cell.name)
    for trial in search.trials:
        shutil.rmtree(_trial_file(trial).parent, ignore_errors=True)


def choose(trials: list[dict[str, Any]], score: str) -> Mapping[str, Any] | None:
    """The trial that `RULE` chooses; None where all diverged."""
    sound = [trial for trial in trials if not trial["diverged"]]
    return max(sound, key=lambda trial: (trial[score], -trial["lr"], -trial["warmup_epochs"]), default=None)


def widen(grid: TuneParams, best: Mapping[str, Any], epochs: int) -> TuneParams | None:
    """The grid with another value beyond each edge at which the best trial lies; None where it lies at none.

    A rate is as many times larger or smaller as the last two are; a warm-up is an epoch longer, if it stays shorter
    than the training of `epochs`, or shorter.
    """
    wider: dict[str, tuple[Any, ...]] = {}
    rates, warmups = sorted(grid.lr), sorted(grid.warmup_epochs)
    if len(rates) > 1 and best["lr"] == rates[-1]:
        wider["lr"] = (*grid.lr, rates[-1] * rates[-1] / rates[-2])
    elif len(rates) > 1 and best["lr"] == rates[0]:
        wider["lr"] = (*grid.lr, rates[0] * rates[0] / rates[1])
    if len(warmups) > 1 and best["warmup_epochs"] == warmups[-1] and warmups[-1] + 1 < epochs:
        wider["warmup_epochs"] = (*grid.warmup_epochs, warmups[-1] + 1)
    elif len(warmups) > 1 and best["warmup_epochs"] == warmups[0] > 0:
        wider["warmup_epochs"] = (*grid.warmup_epochs, warmups[0] - 1)
    return dataclasses.replace(grid, **wider) if wider else None


def _trial_file(trial: Cell) -> Path:
    return trial.state_folder(trial.params.seeds[0]).parent / "trial.json"


def _show(search: Search) -> None:
    metrics = read_json(search.file)["metrics"]
    score, chosen = metrics["score"], metrics["chosen"]
    rows = []
    for trial in metrics["trials"]:
        mark = "chosen" if all(trial[name] == value for name, value in chosen.items()) else ""
        shown = "diverged" if trial["diverged"] else f"{trial[score]:.2f} %"
        loss = "–" if trial["train_loss"] is None else f"{trial['train_loss']:.4f}"
        rows.append([search.cell.name, f"{trial['lr']:g}", str(trial["warmup_epochs"]), shown, loss, mark])
    print_table(
        ["cell", "rate", "warm-up epochs", f"{search.cell.spec.scores[score]} on tune", "training loss", ""], rows
    )
