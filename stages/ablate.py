"""`repro ablate`: variants of Vittt trained alike, over several seeds (Tables 3 and 4, Fig. 7; five of them on digits in the mini profile)."""

import csv
import dataclasses
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from repro.core.config import bounded, params_hash
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.ranks import Ranks
from repro.core.record import read_json, write_json, write_record
from repro.core.runtime import Runtime, choose_device, device_label, load_runtime

from . import Stage
from .pretrain import ClassifierParams, PretrainParams, Trained, check_before_launch, train_one
from .training import CellOption, GpusOption, state_folder, train_cells

STAGE = "ablate"
SPEED_BATCH = 64  # Fig. 6's
SPEED_DTYPE = {"cpu": "fp32", "cuda": "fp16"}
SPEED_OPEN = "not measured yet"
# of what a seed's training says of itself, what its entry keeps
KEPT = ("top1_percent", "top5_percent", "val_loss", "val_loss_reason", "train_loss", "train_loss_reason", "skipped_steps", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateParams(ClassifierParams):
    """A cell of the `ablate:` section: one variant.

    Args:
        seeds: of initialisation, order and augmentation; a training each.
    """

    seeds: tuple[int, ...] = bounded(ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)}, expected one or more, each once")

    def with_seed(self, seed: int) -> PretrainParams:
        """The training of one seed."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(ClassifierParams)}
        return PretrainParams(**shared, seed=seed)


STAGE = Stage(
    params=AblateParams,
    cells=True,
    task="classify",
    scores={"top1_percent": "top1", "top5_percent": "top5"},
    cost="repro.planning.costs:charge_classification",
)


def command(
    cell: CellOption = None,
    gpus: GpusOption = None,
    grid: Annotated[bool, typer.Option("--all", help="All 17 variants, into results/measured/<device>/ablate/<data>/.")] = False,
    variant: Annotated[str | None, typer.Option(help="One of the 17 alone, in this process.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Of --all: the cell of prepare_data; without it, that of pretrain's first Vittt.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Of --all: trainings of each variant, with seeds 0, 1, ...")] = 3,
    epochs: Annotated[int | None, typer.Option(help="Of --all: so many epochs; without it, as many as in pretrain.")] = None,
    jobs: Annotated[int, typer.Option(help="Of --all: variants at once, spread over the GPUs; on a CPU they share the threads.")] = 1,
    speed: Annotated[bool, typer.Option(help="Of --all: measure the throughput when all are trained.")] = True,
) -> None:
    """Train variants of Vittt alike, over several seeds; a stopped run continues where it was."""
    if not grid and variant is None:
        train_cells(STAGE, AblateParams, cell, gpus, run, _check_before_launch)
        return
    from . import ablate_grid

    if cell is not None or gpus is not None:
        raise UserError("ablate: --cell and --gpus are of params.yaml's cells; leave them out with --all and --variant")
    for name, value in {"seeds": seeds, "epochs": epochs, "jobs": jobs}.items():
        if value is not None and value < 1:
            raise UserError(f"ablate: --{name} {value}: expected 1 or more")
    paths = find_root()
    asked = ablate_grid.Asked(data=data, seeds=tuple(range(seeds)), epochs=epochs, jobs=jobs, variant=variant, speed=speed)
    ablate_grid.run(asked, paths, load_runtime(paths))


def run(params: AblateParams, paths: Paths, runtime: Runtime, cell: str, ranks: Ranks = Ranks()) -> None:
    """Train one cell and write results/ablate/<cell>/{weights.safetensors, recipe.json, curve.csv, metrics.json, run.json}.

    Raises:
        UserError: see `pretrain.run`.
    """
    folder = paths.cell(STAGE, cell)
    train_variant(params, paths, runtime, cell, folder, ranks)
    if ranks.first:
        add_speed(params, runtime, folder)


def train_variant(
    params: AblateParams,
    paths: Paths,
    runtime: Runtime,
    cell: str,
    folder: Path,
    ranks: Ranks = Ranks(),
    known: Mapping[int, Mapping] | None = None,
) -> None:
    """Train a variant with each of its seeds, and write weights.safetensors (the first seed's), recipe.json, curve.csv and metrics.json.

    What a seed leaves stays in .runs until all are done, so that a stopped call loses none. The metrics are those of `pretrain.train_one`
    for the first seed, but `top1_percent` is the mean over the seeds. Beside them stand `top1_spread_percent` (the seeds' sample standard
    deviation), `seeds` (an entry each: `KEPT`, and `top1_previous_percent` of the evaluation before the last), `classes`, `data_cell`,
    `recipe` (a hash that variants share which were trained alike), `macs_g`, and `throughput_img_per_s`, which is `add_speed`'s.

    Args:
        cell: names the runs.
        known: seed -> its entry in the record of the same parameters that `folder` holds; these are not trained again.
    """
    from repro.engine.loop import write_curve
    from repro.measure.flops import cost

    started, known = time.monotonic(), known or {}
    rows = [row for row in _rows(folder / "curve.csv") if int(row["seed"]) in known] if known else []
    entries, trained = {**known}, {}
    for place, seed in enumerate(params.seeds, 1):
        if seed in known:
            continue
        if ranks.first:
            print(f"{cell}: seed {seed}, {place} of {len(params.seeds)}", flush=True)
        one, name = params.with_seed(seed), run_name(cell, seed)
        result = state_folder(one, paths, STAGE, name) / "result"
        done = train_one(one, paths, runtime, STAGE, name, ranks, folder=result, show=seed == params.seeds[0])
        if done is not None:
            trained[seed], entries[seed] = done, _entry(seed, done)
            rows += [{"seed": seed, **row} for row in done.outcome.state.curve]
    if not ranks.first:
        return
    first = next(iter(trained.values()))
    top1 = [entry["top1_percent"] for entry in entries.values()]
    counted = cost(params.model, {**params.options, "num_classes": len(first.job.described["classes"])}, (params.transform.image_size,) * 2)
    metrics = {
        **{name: value for name, value in first.metrics.items() if name not in KEPT},
        "data_cell": params.data,
        "classes": len(first.job.described["classes"]),
        "recipe": params_hash(dataclasses.replace(params, options={}, seeds=(0,))),
        "image_size": params.transform.image_size,
        "macs_g": counted.macs_g,
        "weights": entries[params.seeds[0]]["weights"],
        "top1_percent": statistics.mean(top1),
        "top1_spread_percent": statistics.stdev(top1) if len(top1) > 1 else None,
        "seeds": list(entries.values()),
        "throughput_img_per_s": None,
        "throughput_img_per_s_reason": SPEED_OPEN,
    }
    if len(top1) == 1:
        metrics["top1_spread_percent_reason"] = "one seed has no spread"
    folder.mkdir(parents=True, exist_ok=True)
    if params.seeds[0] in trained:
        shutil.copyfile(trained[params.seeds[0]].job.folder / "weights.safetensors", folder / "weights.safetensors")
    write_json(folder / "recipe.json", first.recipe)
    write_curve(folder / "curve.csv", rows)
    asked = dataclasses.replace(params, seeds=tuple(entries))
    write_record(folder, metrics, first.identity(paths, STAGE, asked, ranks), time.monotonic() - started)
    for done in trained.values():
        done.outcome.forget()
    spread = f" ± {metrics['top1_spread_percent']:.2f}" if len(top1) > 1 else ""
    print(f"{cell}: top-1 {metrics['top1_percent']:.2f}{spread} % over {len(top1)} seed(s) on {metrics['val_images']} held-out images")


def add_speed(params: AblateParams, runtime: Runtime, folder: Path) -> None:
    """Measure the inference throughput of a trained variant and put it into the folder's record.

    The batch is 64, or the largest power of two below it that memory holds; weights and inputs are fp32 on a CPU and fp16 on a GPU.
    """
    from repro.measure.speed import RowSpec, measure

    started, record, run_json = time.monotonic(), read_json(folder / "metrics.json"), read_json(folder / "run.json")
    device, batch, side = choose_device(runtime.device).type, SPEED_BATCH, params.transform.image_size
    while True:
        spec = RowSpec(
            model=params.model,
            options=params.options,
            image_size=(side, side),
            batch_size=batch,
            dtype=SPEED_DTYPE[device],
            device=device,
            threads=runtime.threads,
        )
        row = measure(spec)
        if row["status"] != "oom" or batch == 1:
            break
        batch //= 2
    metrics = {name: value for name, value in record["metrics"].items() if name != "throughput_img_per_s_reason"}
    metrics |= {name: row[name] for name in ("throughput_img_per_s", "latency_ms")}
    metrics |= {"throughput_batch": batch, "throughput_dtype": spec.dtype, "throughput_backend": row["backend"]}
    metrics["throughput_device"] = device_label(choose_device(runtime.device), runtime.threads)  # the training's may have had fewer threads
    if row["status"] != "ok":
        metrics |= {"throughput_img_per_s_reason": row["reason"], "latency_ms_reason": row["reason"]}
    write_record(folder, metrics, record["identity"], run_json["seconds"] + time.monotonic() - started)


def run_name(cell: str, seed: int) -> str:
    """Under which the state and the log of one seed's training lie in .runs."""
    return f"{cell}_seed{seed}"


def _entry(seed: int, done: Trained) -> dict[str, Any]:
    evaluated = [row["top1_percent"] for row in done.outcome.state.curve if "top1_percent" in row]
    entry = {"seed": seed, **{name: done.metrics[name] for name in KEPT if name in done.metrics}}
    if len(evaluated) > 1:
        return entry | {"top1_previous_percent": evaluated[-2]}
    return entry | {"top1_previous_percent": None, "top1_previous_percent_reason": "evaluated once"}


def _rows(curve: Path) -> list[dict[str, float]]:
    with open(curve, encoding="utf-8") as stream:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(stream)]


def _check_before_launch(params: AblateParams, paths: Paths, cell: str, processes: int) -> None:
    for seed in params.seeds:
        check_before_launch(params.with_seed(seed), paths, run_name(cell, seed), processes, stage=STAGE)
