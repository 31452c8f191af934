"""Training of cells with each of their seeds, in this process or under torchrun, and their records."""

import contextlib
import csv
import dataclasses
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.config import list_cells, list_values, load_section, params_hash
from ..core.csvfile import format_csv
from ..core.errors import Interrupted, UserError, blame
from ..core.hashing import hash_file
from ..core.paths import find_root
from ..core.ranks import Ranks, in_torchrun, joined, launch_ranks
from ..core.record import (
    CURVE_SCORES,
    atomic,
    find_difference,
    find_run,
    make_identity,
    name_machine,
    read_json,
    read_record,
    sweep,
    write_record,
    write_text,
)
from ..core.runtime import choose_device, device_label, device_slug, load_runtime, torch_dtype
from ..core.statistics import describe_sample
from ..tasks.spec import TaskSpec, name_statistic
from .job import (
    Cell,
    Job,
    Outcome,
    Recipe,
    build_job,
    describe_init,
    hash_golden,
    require_resumable,
    run_job,
    split_batch,
    verify_init,
)

_FOLDERS = ("snapshots", "examples")  # folders that a cell has from its first seed
# fields of a transform that hold the size of an input. `repro plan` compares these with earlier records of speed: after a
# further entry, the earlier records may no longer match
_SIZES = ("shape", "image_size", "min_size", "max_size", "crop_size")
# parameters that change what a GPU keeps besides the weights
_KEEPS = ("ema_decay", "mesa", "freeze", "freeze_backbone", "recompute_blocks")


def read_cells(
    stage: str,
    spec: TaskSpec,
    cell: str | None,
    *,
    recipe: Recipe | None = None,
    init: str | None = None,
    random: bool = False,
    epochs: int | None = None,
    seeds: int | None = None,
) -> list[Cell]:
    """Read one cell of a section of params.yaml, or all of them.

    Args:
        stage: the section.
        spec: the task of its cells.
        cell: the name of one cell; None reads all of the section.
        recipe: see `Cell`.
        init: a file of weights to start from, in place of the cell's.
        random: whether to start from random weights instead.
        epochs: the number of epochs, in place of the cell's.
        seeds: train the seeds 0, 1, ... of this number, in place of the cell's. With any of these four changes, the
            results go to results/replications.

    Raises:
        UserError: no such cell, wrong parameters, or no such file.
    """
    paths = find_root()
    runtime = load_runtime(paths)
    if init is not None and not Path(init).is_file():
        raise UserError(f"{stage}: --from {init}: no such file")
    changes = {
        "_inherited": init is not None,
        "_random": random,
        f"_{epochs}epochs": epochs is not None,
        f"_{seeds}seeds": seeds is not None,
    }
    suffix = "".join(change for change, is_made in changes.items() if is_made)  # names the results of a changed cell
    cells = []
    for name in [cell] if cell else list_cells(paths, stage):
        params = load_section(spec.params, paths.params, stage, name)
        if random or init is not None:
            params = dataclasses.replace(params, init=None if random else describe_init(paths, Path(init)))
        if epochs:
            params = params.with_epochs(epochs)
        if seeds:
            params = dataclasses.replace(params, seeds=tuple(range(seeds)))
        record = paths.cell(stage, name) / "metrics.json"
        if suffix:
            record = paths.replications(device_slug(choose_device(runtime.device))) / stage / f"{name}{suffix}.json"
        shared = {"paths": paths, "runtime": runtime, "record": record, "recipe": recipe}
        cells.append(Cell(stage=stage, name=f"{name}{suffix}", params=params, spec=spec, **shared))
    return cells


def train_cells(cells: Sequence[Cell], gpus: int | None = None) -> None:
    """Train cells with each of their seeds, and write their results.

    A cell's folder gets weights.safetensors, snapshots/, load_report.txt and, for some tasks, examples/ of the first
    seed, and curve.csv of all seeds. The record also has the curves, the recipe, and the means over the seeds. The
    results of a seed stay in .runs until all seeds are done, so that a stopped call loses nothing. Seeds in a record
    outside the graph with the same parameters, data and code are not trained again.

    Args:
        cells: cells to train.
        gpus: number of processes on this machine, in which torchrun runs the command of this process again; None trains
            in this process.

    Raises:
        UserError: as `build_job`, with `gpus` before any process starts; or a folder holds the record of another run.
    """
    if gpus is not None and not in_torchrun():  # in each process that torchrun starts, the same command trains
        for cell in cells:
            check_before_launch(cell, gpus)
        launch_ranks(gpus, sys.argv[1:])
        return
    with joined(choose_device(cells[0].runtime.device).type) as ranks:  # all cells have the same runtime
        for cell in (dataclasses.replace(each, ranks=ranks) for each in cells):
            started, finished = time.monotonic(), find_finished_seeds(cell)
            waiting = [seed for seed in cell.params.seeds if seed not in finished]
            if ranks.first:  # a call that was killed at its end left these
                sweep(cell.folder, *(cell.folder / part for part in _FOLDERS))
                remove_states(cell, finished)
            outcomes: dict[int, Outcome] = {}
            for seed in waiting:
                job = build_job(cell, seed)
                if ranks.first:
                    _announce(job, seed, first=seed == waiting[0])
                try:
                    outcome = run_job(job)
                except Interrupted as error:
                    # the cells before it are then trained again only if they are of the graph
                    if not cell.is_of_graph or cell.name == cells[0].name:
                        raise
                    signum, where = error.args
                    advice = f"--cell {cell.name} continues this training alone, else the cells before it train again"
                    raise Interrupted(signum, f"{where}; {advice}") from None
                if outcome is not None:  # None on all ranks but the first
                    outcomes[seed] = outcome
            if outcomes:  # `job` is then that of the last seed
                record_cell(job, outcomes, finished, started)
            elif not waiting and ranks.first:
                record = cell.record.relative_to(cell.paths.root)
                print(f"{cell.name}: every seed is trained; its record is {record}", flush=True)


def check_before_launch(cell: Cell, processes: int) -> None:
    """Raise a UserError if so many processes cannot train a cell."""
    from ..data.manifest import read_manifest

    split_batch(cell.params, cell.runtime, Ranks(world_size=processes), cell.where)
    images = read_manifest(cell.inputs[0]).splits["train"].images
    if images < cell.params.batch_size:
        raise UserError(
            f"{cell.where}.batch_size: {cell.params.batch_size}, and there are only {images} training images; make it smaller"
        )
    verify_init(cell)
    for seed in cell.params.seeds:
        require_resumable(cell, seed, processes)


def record_cell(
    job: Job, outcomes: Mapping[int, Outcome], finished: Mapping[int, dict[str, Any]], started: float
) -> None:
    """Write the results of a cell whose seeds are all trained, and remove their states.

    Args:
        job: any of the jobs that gave the outcomes.
        outcomes: seed -> result of the present call.
        finished: seed -> record from an earlier call.
        started: the start of the call by `time.monotonic`; the recorded seconds have those of earlier calls too.
    """
    cell = job.cell
    curve = _collect_files(cell, outcomes, finished)
    by_seed = finished | {seed: outcome.metrics for seed, outcome in outcomes.items()}
    metrics = summarise_cell(cell, by_seed, kind=job.data.kind, classes=len(job.described["classes"]))
    if (baseline := cell.spec.score_without_learning(job.task, job.data)) is not None:
        metrics["without_learning"] = baseline
    place = find_place(job)
    if cell.ranks.world_size > 1:
        place["device"] += f", {cell.ranks.world_size} processes"
    identity = make_identity(cell.paths.root, cell.params, data_manifest=cell.inputs[0], **place)
    golden = {"golden_hash": hash_golden(cell.paths, cell.params)}
    recipe, _ = describe_job(job, cell.params.seeds[0])
    seconds = time.monotonic() - started + sum(outcome.earlier[0] for outcome in outcomes.values())
    if finished and (run := find_run(cell.record)).is_file():  # the file beside the record, with the seconds so far
        seconds += read_json(run)["seconds"]
    # DVC shows and compares metrics.json of the graph's cells, so it has the scores alone; other records are one file
    scores = cell.spec.scores if cell.is_of_graph else ()
    write_record(cell.record, metrics, identity | golden | recipe, seconds, scores=scores, curve=curve)
    if job.task.device.type == "cuda":
        speeds = [outcome.speed for outcome in outcomes.values()]
        record_speed(cell, speeds, device_slug(job.task.device), identity, seconds)
    remove_states(cell, outcomes)
    print_scores(cell, metrics)


def remove_states(cell: Cell, seeds: Iterable[int]) -> None:
    """Remove the folders of finished seeds from .runs."""
    for seed in seeds:
        # states first: if this is interrupted, a later run must not continue a state whose snapshots are gone
        for state in cell.state_folder(seed).glob("step_*.pt"):
            state.unlink()
        shutil.rmtree(cell.state_folder(seed), ignore_errors=True)


def record_speed(
    cell: Cell, speeds: Sequence[Mapping[str, Any]], slug: str, identity: dict[str, Any], seconds: float
) -> None:
    """Write a cell's speed and peak memory to results/replications/<slug>/speed/<section>/<cell>.json for `repro plan`.

    The record also has the settings that they depend on, see `describe_speed`. The speed is that of the last seed with
    one, whose kernels are already tuned; a seed that an earlier call trained has none. Speed differs from run to run,
    so the record is not an output of the graph.
    """
    speed = next((speed for speed in reversed(speeds) if speed["throughput_img_per_s"] is not None), speeds[0])
    of = describe_speed(cell.params, split_batch(cell.params, cell.runtime, cell.ranks, cell.where)[1])
    file = cell.paths.replications(slug) / "speed" / cell.stage / f"{cell.name}.json"
    write_record(file, of | {"processes": cell.ranks.world_size} | dict(speed), identity, seconds)


def describe_speed(params: Any, micro_batch: int) -> dict[str, Any]:
    """Return the settings that, besides the device, determine a training's speed and peak memory.

    These are the model, the size of its input, the images of a forward pass, and what the GPU keeps besides the
    weights. `repro plan` compares them with those of records of speed, which it knows by their `transform`.
    """
    sizes = {name: getattr(params.transform, name, None) for name in _SIZES}
    return {
        "model": params.model,
        "options": params.options,
        "micro_batch": micro_batch,
        "transform": {name: size for name, size in sizes.items() if size is not None},
        "keeps": {name: bool(getattr(params, name, None)) for name in _KEEPS},
    }


def find_finished_seeds(cell: Cell) -> dict[int, dict[str, Any]]:
    """Return seed -> record of the seeds that an earlier call finished in the cell's folder.

    Raises:
        UserError: the folder holds a run of other parameters or data; or new seeds would have another code or device.
    """
    file = cell.record
    if not file.is_file() or cell.is_of_graph:
        return {}  # a cell of the graph is trained again, as DVC does
    record = read_record(file)
    finished = {entry["seed"]: entry for entry in record["metrics"]["by_seed"]}
    # in the order of the cell, since a hash of params knows the order
    seeds = (*cell.params.seeds, *finished)
    params = dataclasses.replace(cell.params, seeds=tuple(seed for seed in dict.fromkeys(seeds) if seed in finished))
    now = {"params_hash": params_hash(params), "data_manifest_hash": hash_file(cell.inputs[0])}
    held = record["identity"]  # what the record says, to be compared with what holds `now`
    if set(cell.params.seeds) - set(finished):  # new seeds must run as the old ones: a record names one code and device
        device = choose_device(cell.runtime.device)
        held = held | {"device": name_machine(held)}
        now |= {"golden_hash": hash_golden(cell.paths, cell.params), "dtype": cell.params.resolve_precision(device)}
        now["device"] = name_machine({"device": device_label(device)})
    if cell.init is not None:  # another cell may have trained them again
        held = held | {"initial_weights_hash": record["metrics"]["init"]["weights_hash"]}
        now["initial_weights_hash"] = hash_file(cell.init)
    if different := find_difference(held, now):
        made_by = f"{record['metrics']['epochs']} epochs, seeds {', '.join(map(str, finished))}"
        raise UserError(
            f"{file}: holds a run with other {different} ({made_by}); use the same, or move the folder away"
        )
    return finished


def _announce(job: Job, seed: int, *, first: bool) -> None:
    """Print which seed begins; before the first one, also the recipe and the report on loaded weights."""
    if len(seeds := job.cell.params.seeds) > 1:
        print(f"{job.cell.name}: seed {seed}, {seeds.index(seed) + 1} of {len(seeds)}", flush=True)
    if not first:
        return
    for line in describe_job(job, seed)[1]:
        print(line, flush=True)
    optim, epochs = job.params.optim, job.params.epochs
    if optim.schedule == "cosine" and epochs <= optim.warmup_epochs:
        print(f"{job.cell.name}: {epochs} epochs are all warm-up (warmup_epochs: {optim.warmup_epochs})", flush=True)
    # by the fate of the weights, how many keys of each part of the model have it
    parts: dict[str, Counter] = {}
    for key, fate in job.load_report.items():
        parts.setdefault(fate, Counter())[key.split(".")[0]] += 1
    for fate, counts in parts.items():
        print(f"{fate}: {', '.join(f'{part} ({count})' for part, count in counts.items())}", flush=True)


def describe_job(job: Job, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe of a training with one seed for the record, and its printed lines; see `Cell.recipe`.

    Without a `Cell.recipe`, the record has the parameters and the facts about the run, and no line is printed.
    """
    world_size = job.cell.ranks.world_size
    params = job.params.with_seed(seed)
    facts = {
        "world_size": world_size,
        "micro_batch": job.params.batch_size // world_size // job.accumulate,
        "accumulate": job.accumulate,
        "train_images": len(job.task.train.dataset),
        **find_place(job),
    }
    if job.cell.recipe is None:
        return {"recipe": list_values(params) | facts}, []
    return job.cell.recipe(params, facts)


def find_place(job: Job) -> dict[str, str]:
    """Return the device, the dtype and the kernels' backend of a training's steps."""
    from ..models.registry import kernel_backend

    network = getattr(job.task.model, "backbone", job.task.model)  # a dense model's head has no kernels of ours
    backend = kernel_backend(network, torch_dtype(job.precision))
    return {"device": device_label(job.task.device), "dtype": job.precision, "backend": backend}


def _collect_files(cell: Cell, outcomes: Mapping[int, Outcome], finished: Mapping[int, Any]) -> list[str]:
    """Copy the first seed's files into the cell's folder, write the curves of all seeds, and return the record's lines.

    On a full disk, no file is copied. The record keeps the loss and the first scores of the curves. Call it before the
    record is written: without curve.csv, the rows of finished seeds are read from the earlier record.
    """
    rows, curves = [], cell.folder / "curve.csv"
    if finished:
        lines = curves.read_text() if curves.is_file() else "\n".join(read_record(cell.record).get("curve", ()))
        with blame(f"{cell.record}: curve", LookupError, TypeError, ValueError):
            # as text, which keeps every digit and `nan`
            rows = [row for row in csv.DictReader(lines.splitlines()) if int(row["seed"]) in finished]
    for seed, outcome in outcomes.items():
        rows += [{"seed": seed, **{name: _round(value) for name, value in row.items()}} for row in outcome.curve]
    if (first := outcomes.get(cell.params.seeds[0])) is not None:
        made = [file for file in first.folder.rglob("*") if file.is_file()]
        files = {cell.folder / file.relative_to(first.folder): file for file in made}
        with contextlib.ExitStack() as renamed_at_the_end:
            for target, file in files.items():
                shutil.copyfile(file, renamed_at_the_end.enter_context(atomic(target)))
        # those of an earlier run that this one does not have
        old = {file for part in _FOLDERS for file in (cell.folder / part).rglob("*") if file.is_file()}
        for file in old - files.keys():
            file.unlink()
        (cell.folder / "snapshots").mkdir(exist_ok=True)  # an output of the graph, also where it is empty
    write_text(curves, format_csv(rows))
    kept = ("seed", "epoch", "train_loss", *list(cell.spec.scores)[:CURVE_SCORES])
    return format_csv(rows, [name for name in kept if any(name in row for row in rows)]).splitlines()


def _round(value: float) -> float | str:
    """Round to eight significant digits, which hide differences of the last bit.

    Integers stay integers. NaN becomes the text `nan`, because an empty cell would mean a missing value.
    """
    return value if isinstance(value, int) else float(f"{value:.8g}") if math.isfinite(value) else str(value)


def summarise_cell(cell: Cell, by_seed: Mapping[int, dict[str, Any]], *, kind: str, classes: int) -> dict[str, Any]:
    """Return the metrics of a cell: its description, and each score over its seeds.

    Args:
        by_seed: seed -> its record. `seeds.collect` makes it from files of the form `seeds.FORM`, which lack other
            keys.
        kind: the kind of the data set.
        classes: its number of classes.
    """
    params, spec = cell.params, cell.spec
    records = [by_seed[seed] for seed in sorted(by_seed)]
    first = by_seed[params.seeds[0]]
    metrics: dict[str, Any] = {
        "model": params.model,
        "options": params.options,
        "init": {"weights": params.init.weights, "weights_hash": hash_file(cell.inputs[1])} if params.init else None,
        "data": params.data,
        "kind": kind,
        "classes": classes,
        "seeds": list(by_seed),
        "batch_size": params.batch_size,
        # equal for cells that differ in options and seeds alone: by it the page of readings compares variants
        "recipe_hash": params_hash(dataclasses.replace(params, options={}, seeds=(0,))),
        **{name: first[name] for name in ("num_params", "epochs", "split", "held_out_images", "weights_hash")},
        "skipped_steps": sum(record["skipped_steps"] for record in records),
        "by_seed": records,
    }
    if params.init is None:
        metrics["init_reason"] = "random weights"
    if "steps" in first:  # files of `repro seeds` lack it
        metrics["steps"] = first["steps"]
    if "unreadable_images" in first:
        metrics["unreadable_images"] = max(record["unreadable_images"] for record in records)
    if (size := getattr(params.transform, "image_size", None)) is not None:
        metrics["image_size"] = size
    # `mesa` and `freeze` are recorded only if used: older records lack the keys
    if (mesa := getattr(params, "mesa", None)) is not None:
        metrics["mesa"] = dataclasses.asdict(mesa)
    if getattr(params, "freeze", False):
        metrics["freeze"] = True
    for name in first:
        # also percentages that are no scores, such as the skip rate; not the score of the last evaluation but one
        scored = name in spec.scores or (name.endswith("_percent") and "_previous_" not in name)
        if scored and all(isinstance(record.get(name), int | float) for record in records):
            metrics[name] = describe_sample([record[name] for record in records]).mean
    for name in (name for name in spec.scores if name in first):
        sample = describe_sample([record[name] for record in records], is_share=name.endswith("_percent"))
        std, ci95 = (name_statistic(name, what) for what in ("std", "ci95"))
        metrics |= {std: sample.std, ci95: sample.ci95 and list(sample.ci95)}
        if sample.std is None:
            metrics |= {f"{key}_reason": "one seed has no spread" for key in (std, ci95)}
    return metrics


def print_scores(cell: Cell, metrics: Mapping[str, Any]) -> None:
    """Print a line of a cell's scores; for the metrics, see `summarise_cell`."""
    scores = ", ".join(_format_score(metrics, key, label) for key, label in cell.spec.scores.items() if key in metrics)
    images = f"{metrics['held_out_images']} {metrics['split']} images"
    print(f"{cell.name}: {scores} on the {images} of {cell.params.data}", flush=True)


def _format_score(metrics: Mapping[str, Any], key: str, label: str) -> str:
    """Write a score, and its standard deviation over the seeds where there are several: `top-1 91.20 ± 0.35 %`."""
    std, (places, unit) = metrics.get(name_statistic(key, "std")), (2, " %") if key.endswith("_percent") else (4, "")
    return f"{label} {metrics[key]:.{places}f}{'' if std is None else f' ± {std:.{places}f}'}{unit}"
