"""Variants that are trained by one recipe, over several seeds: what a paper ablates, or the readings of a paper."""

import dataclasses
import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bench.speed import RowSpec, measure
from ..core.config import build, load_section, section_keys
from ..core.errors import RunError, UserError, did_you_mean
from ..core.hashing import hash_file
from ..core.noise import find_noise
from ..core.paths import OWN_RATES, Paths, find_root
from ..core.record import make_identity, read_json, read_record, write_record
from ..core.runtime import choose_device, device_label, device_slug, load_runtime
from ..core.ui import print_table
from ..data.cells import manifest_path, require_data
from ..data.kinds import PrepareData
from ..data.manifest import read_manifest
from ..runs.cells import find_finished_seeds, remove_states, train_cells
from ..runs.job import Cell
from ..runs.pool import Work, run_all
from ..runs.tune import Search, load_tune
from ..tasks.classification.params import ClassifierParams
from ..tasks.spec import TaskSpec
from ..training.params import InitParams
from . import describe_recipe, find_rooms
from .variants import VariantSet, load_variants

BATCHES = (64, 32, 16, 8, 4, 2, 1)  # the first is that of Fig. 6 of Vision-TTT
DTYPE = {"cpu": "fp32", "cuda": "fp16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltVariant:
    """A variant with its cell, what it changes for people, and the arguments of the command that trains it alone."""

    cell: Cell
    changes: str
    arguments: tuple[str, ...]

    @property
    def missing(self) -> list[int]:
        """The seeds that are still to be trained."""
        finished = find_finished_seeds(self.cell)
        return [seed for seed in self.cell.params.seeds if seed not in finished]


def choose_variants(paper: str, teacher: str | None = None) -> VariantSet:
    """The variants of a paper's room, or the same for students of another softmax model, in a folder of their own.

    Raises:
        UserError: an unknown paper or one without variants; a teacher that is no softmax ViT, or that is not inherited.
    """
    rooms = find_rooms()
    if paper not in rooms:
        raise UserError(f"ablate: --paper {paper}: not known{did_you_mean(paper, rooms)}")
    found = load_variants(paper)
    if found is None:
        raise UserError(f"ablate: --paper {paper}: its room declares no variants")
    if teacher is None:
        return found
    if not found.inherits:
        raise UserError(f"ablate: --teacher {teacher}: the variants of {paper} begin with random weights; leave it out")
    from ..models.checkpoints import open_weights
    from ..models.linearize import choose_student, read_shell

    path = Path(teacher)
    if not path.is_file():
        raise UserError(f"ablate: --teacher {teacher}: no such file")
    model, options = choose_student(read_shell(open_weights(path).require_classifier().build(), teacher))
    init = InitParams(weights=teacher, sha256=hash_file(path, digits=64))
    of = path.parent.name if path.stem == "weights" else path.stem
    changes = {"model": model, "options": options, "init": init}
    flags = (*found.flags, "--teacher", teacher)
    return dataclasses.replace(found, changes=changes, folder=f"{found.folder}_{of}", flags=flags)


def find_variant_searches(grid: VariantSet, data: str, variant: str | None) -> list[Search]:
    """The searches for the rate of one variant or of all, from the rate of their recipe, half of it and twice as much.

    Raises:
        UserError: see `build_variant` and `load_tune`.
    """
    paths = find_root()
    tune, shared = load_tune(paths, data)
    found = []
    for name in list(grid.variants) if variant is None else [variant]:
        cell = build_variant(grid, name, paths, data=data, seeds=1, epochs=None).cell
        optim = cell.params.optim
        rates = (optim.lr / 2, optim.lr, 2 * optim.lr)
        own = dataclasses.replace(tune, lr=rates, warmup_epochs=(optim.warmup_epochs,))
        cell = dataclasses.replace(cell, folder=shared["folder"] / "variants")
        found.append(Search(cell=cell, tune=own, arguments=(*grid.flags, "--cell", name)))
    return found


def use_own_rates(grid: VariantSet, data: str, variant: str | None) -> VariantSet:
    """One variant or all, each at the rate that a search chose for it, on this machine or another; the widest counts.

    Raises:
        UserError: a variant was not searched.
    """
    variants = {}
    for search in find_variant_searches(grid, data, variant):
        name = search.arguments[-1]
        files = sorted(search.cell.paths.root.glob(f"results/measured/*/tune/variants/{search.file.name}"))
        records = [read_json(file)["metrics"] for file in files]
        if not records:
            raise UserError(
                f"ablate: --own-rates: no search of {name} on {data}; run `repro tune --data {data} {' '.join(grid.flags)}`"
            )
        rate = max(records, key=lambda metrics: len(metrics["trials"]))["chosen"]["lr"]
        given = grid.variants[name]
        own, elsewhere = (
            {**changes, "optim": {**changes.get("optim", {}), "lr": rate}}
            for changes in (given.changes, given.elsewhere or given.changes)
        )
        variants[name] = dataclasses.replace(given, changes=own, elsewhere=elsewhere)
    return dataclasses.replace(
        grid, variants=variants, folder=f"{grid.folder}/{OWN_RATES}", flags=(*grid.flags, "--own-rates")
    )


def run_variants(
    grid: VariantSet, variant: str | None, *, data: str | None, seeds: int, epochs: int | None, jobs: int, speed: bool
) -> None:
    """Train variants into results/measured/<device>/<folder>/<data>/<variant>/.

    Args:
        variant: the one to train in this process; None shows the plan, and trains what is missing of all.
        data: a cell of prepare_data; None takes that of the shared recipe.
        seeds, epochs: trainings of each variant and their length; None takes that of the recipe.
        jobs: how many processes train all.
        speed: whether to measure the throughputs then, one after the other.

    Raises:
        UserError: an unknown variant or data set, or a folder holds a record of other parameters; before anything is
            trained.
        Interrupted: a signal came; what is finished is kept. RunError: variants failed; the others are done.
    """
    for name, value in {"seeds": seeds, "epochs": epochs, "jobs": jobs}.items():
        if value is not None and value < 1:
            raise UserError(f"{grid.stage}: --{name} {value}: expected 1 or more")
    paths = find_root()
    names = list(grid.variants) if variant is None else [variant]
    variants = {name: build_variant(grid, name, paths, data=data, seeds=seeds, epochs=epochs) for name in names}
    read_manifest(manifest_path(paths, variants[names[0]].cell.params.data))
    waiting = {name: each for name, each in variants.items() if each.missing}
    failed: dict[str, str] = {}
    if variant is None:
        _show_plan(variants)
        for name in variants.keys() - waiting.keys():
            remove_states(variants[name].cell, variants[name].cell.params.seeds)
        works = {}
        for name, each in waiting.items():
            log = paths.logs(grid.stage, each.cell.name) / "output.txt"
            works[name] = Work(arguments=(grid.stage, *each.arguments), log=log)
        failed = run_all(works, jobs, load_runtime(paths), paths.root)
    elif waiting:
        train_cells([variants[variant].cell])
    for name, each in variants.items():
        if speed and name not in failed and not _has_throughput(each.cell):
            rate = measure_throughput(each.cell)
            print(f"{name}: {'no throughput' if rate is None else f'{rate:.0f} images/s'}", flush=True)
    if failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise RunError(f"{grid.stage}: {len(failed)} of {len(variants)} failed, the others are done: {reasons}")


def build_variant(
    grid: VariantSet, name: str, paths: Paths, *, data: str | None, seeds: int, epochs: int | None
) -> BuiltVariant:
    """A variant with its cell; see `run_variants` and `vary_recipe`."""
    params = vary_recipe(grid, name, paths, data=data, seeds=tuple(range(seeds)), epochs=epochs)
    runtime = load_runtime(paths)
    folder = paths.measured(device_slug(choose_device(runtime.device))) / grid.folder / params.data / name
    shared = {"paths": paths, "runtime": runtime, "folder": folder, "recipe": describe_recipe}
    places = [*grid.folder.split("/")[1:], params.data, name]  # two rooms may have variants of one name
    cell = Cell(stage=grid.stage, name="_".join(places), params=params, spec=_find_task(grid), **shared)
    changes = ", ".join(f"{key} {value}" for key, value in grid.options[name].items()) or f"{grid.model} itself"
    options = {"--variant": name, "--data": params.data, "--seeds": seeds, "--epochs": params.epochs}
    arguments = (*grid.flags, *(str(part) for pair in options.items() for part in pair), "--no-speed")
    return BuiltVariant(cell=cell, changes=changes, arguments=arguments)


def vary_recipe(
    grid: VariantSet, name: str, paths: Paths, *, data: str | None, seeds: tuple[int, ...], epochs: int | None
) -> ClassifierParams:
    """The parameters of a variant, trained as `pretrain` trains its first model of the family on this data.

    Where there is none, the recipe of its first one holds, or the grid's own, without the changes of the image that
    labels may not survive. A UserError for an unknown variant or data set, or no recipe.
    """
    if name not in grid.variants:
        raise UserError(f"{grid.stage}: --variant {name}: not known{did_you_mean(name, grid.variants)}")
    cells = section_keys(paths.params, grid.section) if grid.family else []
    kind = _find_task(grid).params
    every = [load_section(kind, paths.params, grid.section, cell) for cell in cells]
    ours = [params for params in every if params.model.startswith(f"{grid.family}_")]
    if not ours and grid.recipe:
        ours = [build(kind, grid.recipe, f"the recipe of {grid.folder}")]
    if not ours:
        where = f"{paths.params}: {grid.section}"
        raise UserError(f"{where}: has no cell with a {grid.model}, whose recipe the variants need; add one")
    data = data or ours[0].data
    require_data(paths, grid.stage, data)
    recipe = next((params for params in ours if params.data == data), None)
    if recipe is None:
        unchanged = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0, "color_jitter": None, "auto_augment": None}
        unchanged |= {"re_prob": 0.0, "crop_pct": 1.0}
        if written := load_section(PrepareData, paths.params, "prepare_data", data).curves:
            unchanged["image_size"] = written.image_size
        recipe = _override(ours[0], {"transform": unchanged, "mix": {"mixup": 0.0, "cutmix": 0.0}})
    recipe = dataclasses.replace(recipe, data=data)
    variant = grid.variants[name]
    elsewhere = variant.elsewhere is not None and data != ours[0].data
    for changes in (grid.changes, variant.elsewhere if elsewhere else variant.changes):
        recipe = _override(recipe, changes)
    options, length = {**recipe.options, **variant.options}, epochs or recipe.epochs
    return dataclasses.replace(recipe, options=options, seeds=seeds, epochs=length, snapshot_epochs=())


def _find_task(grid: VariantSet) -> TaskSpec:
    return importlib.import_module(f"repro.tasks.{grid.task}.spec").SPEC


def _override(params: Any, changes: Mapping[str, Any]) -> Any:
    """Parameters with some values changed; those of a nested section are given as a mapping."""
    sections = {key: value for key, value in changes.items() if dataclasses.is_dataclass(getattr(params, key))}
    given = {key: value for key, value in sections.items() if isinstance(value, Mapping)}
    nested = {key: _override(getattr(params, key), value) for key, value in given.items()}
    return dataclasses.replace(params, **{**changes, **nested})


def measure_throughput(cell: Cell) -> float | None:
    """Write speed.json of a trained classifier into its folder; images per second, or None with the reason there.

    The batch is 64, or the largest power of two below that fits; fp32 on a CPU and fp16 on a GPU. A RunError where the
    measuring process broke.
    """

    started, params, threads = time.monotonic(), cell.params, cell.runtime.threads
    device, side = choose_device(cell.runtime.device), params.transform.image_size
    of = {"model": params.model, "options": params.options, "image_size": (side, side)}
    on = {"dtype": DTYPE[device.type], "device": device.type, "threads": threads}
    for batch_size in BATCHES:
        try:
            row = measure(RowSpec(**of, **on, batch_size=batch_size))
        except RuntimeError as error:
            raise RunError(f"{cell.where}: {error}") from None
        if row["status"] != "oom":
            break
    shown = {"device": device_label(device, threads), "dtype": on["dtype"]}  # the training may have had fewer threads
    metrics = {name: row[name] for name in ("throughput_img_per_s", "latency_ms", "macs_g", "backend")}
    hashed = _hash_weights(cell, "metrics.json")
    metrics |= {"batch_size": batch_size, "noisy": find_noise(row), "weights_hash": hashed, **shown}
    if row["status"] != "ok":
        metrics |= {f"{name}_reason": row["reason"] for name in ("throughput_img_per_s", "latency_ms")}
    identity = make_identity(cell.paths.root, params, backend=str(row["backend"]), **shown)
    write_record(cell.folder, metrics, identity, time.monotonic() - started, name="speed")
    return row["throughput_img_per_s"]


def _has_throughput(cell: Cell) -> bool:
    """Whether the cell's folder has a speed.json of the weights that lie there."""
    has_speed = (cell.folder / "speed.json").is_file()
    return has_speed and _hash_weights(cell, "speed.json") == _hash_weights(cell, "metrics.json")


def _hash_weights(cell: Cell, record: str) -> str:
    return read_record(cell.folder / record)["metrics"]["weights_hash"]


def _show_plan(variants: Mapping[str, BuiltVariant]) -> None:
    rows, waiting = [], 0
    for name, variant in variants.items():
        missing = variant.missing
        waiting += len(missing)
        done = "done" if missing or _has_throughput(variant.cell) else "measure its speed"
        rows.append([name, variant.changes, f"train seeds {', '.join(map(str, missing))}" if missing else done])
    print_table(["variant", "what it changes", "to do"], rows)
    every = [variant.cell.params for variant in variants.values()]
    one, models = every[0], ", ".join(dict.fromkeys(params.model for params in every))
    lengths = " or ".join(str(count) for count in dict.fromkeys(params.epochs for params in every))
    shared = f"{len(variants)} variants of {models} on {one.data}, {lengths} epochs, {len(one.seeds)} seed(s)"
    print(f"{shared}: {waiting} trainings to do", flush=True)
