"""`repro plan`: what the parameters would run, for which tables and figures of the paper, and what it costs. Starts nothing.

Hours of a training cell = epochs · training images / throughput of one GPU. Its evaluations are left out (under 1 % of ImageNet's
300 epochs), and N GPUs are taken to be N times as fast as one.
"""

import dataclasses
import difflib
import shutil
from typing import Annotated

import typer

from repro.core.config import load_section, load_yaml, section_keys
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.ui import print_table
from repro.papers import load_primary
from repro.report.demands import demands
from repro.report.results import Results
from repro.report.training import Rates, parse_rates

from . import Stage
from .ablate import AblateParams
from .complexity import ADAPTER, ComplexityParams, wanted
from .detect import DetectParams
from .efficiency import EfficiencyParams
from .prepare_data import PrepareData
from .pretrain import PretrainParams
from .profile import active, names
from .segment import SegmentParams

TRAINING = ("pretrain", "baselines")
DENSE = {"detect": DetectParams, "segment": SegmentParams}
KNOWN_GB = {"imagenet": 150, "coco": 20, "ade20k": 1}  # unpacked, once the archives are removed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A stage or cell: its command; hours of one GPU and the most disk that it occupies (1e9 bytes), None where unknown; what the
    hours follow from and where that is known from; the measurements that it `gives`, see repro.report.demands."""

    command: str
    gpu_hours: float | None
    disk_gb: float | None
    basis: str
    note: str = ""
    gives: frozenset = frozenset()


STAGE = Stage(purpose="check")


def command(
    profile: Annotated[str | None, typer.Option(help="Plan this profile instead of params.yaml.")] = None,
    img_per_s: Annotated[
        list[str] | None, typer.Option(metavar="MODEL=NUMBER", help="Training images per second on one GPU; may be repeated.")
    ] = None,
    tflops: Annotated[float, typer.Option(help="Peak of a GPU, for models of unknown speed (A100, bf16: 312 TFLOP/s).")] = 312.0,
    utilisation: Annotated[float, typer.Option(help="Share of that peak which training reaches.")] = 0.3,
    gpus: Annotated[int, typer.Option(help="GPUs that share the work.")] = 1,
) -> None:
    """Show what would run, for which table or figure, its GPU-hours and its disk, before anything is started."""
    if gpus < 1:
        raise UserError(f"plan: --gpus {gpus}: expected 1 or more")
    paths = find_root()
    rows = run(paths, Rates(given=parse_rates(img_per_s or []), tflops=tflops, utilisation=utilisation), profile=profile)
    if profile is not None and active(paths) != profile:
        print(f"first: repro profile use {profile}")
    wanted, table = demands(load_primary().ledger), []
    for row in rows:
        helps = {place: sum(bool(need & row.gives) for need in needs) for place, needs in wanted.items()}
        places = ", ".join(f"{place} ({n})" for place, n in helps.items() if n)
        numbers = [_number(value) for value in (row.gpu_hours, row.gpu_hours and row.gpu_hours / 24 / gpus, row.disk_gb)]
        table.append([row.command, places or "–", *numbers, row.basis])
    print_table(["command", "for (numbers that need it)", "GPU-hours", f"days on {gpus}", "disk GB", "because"], table)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        print(note)
    hours, disk = (sum(getattr(row, name) or 0 for row in rows) for name in ("gpu_hours", "disk_gb"))
    ideal = f" if {gpus} GPUs are {gpus} times as fast as one" if gpus > 1 else " on one GPU"
    print(f"total: {_number(hours)} GPU-hours, {_number(hours / 24 / gpus)} days{ideal}; disk {_number(disk)} GB")
    print(f"free disk here: {shutil.disk_usage(paths.root).free / 1e9:.0f} GB")
    if unknown := [row.command for row in rows if None in (row.gpu_hours, row.disk_gb)]:
        print(f"unknown and not in the total: {', '.join(unknown)}")
    gives = frozenset().union(*(row.gives for row in rows))
    counts = [f"{place} {sum(bool(n) and n <= gives for n in needs)} of {len(needs)}" for place, needs in wanted.items()]
    print(f"numbers of the paper that would then have one of ours: {', '.join(counts)}")


def run(paths: Paths, rates: Rates, *, profile: str | None = None) -> list[Row]:
    """The rows of params.yaml, or of a profile, in its order.

    Raises:
        UserError: an unknown profile, a rate of a model that no cell trains, a number out of range, wrong parameters.
    """
    if profile is not None and profile not in names(paths):
        raise UserError(f"plan: profile {profile!r}: not known; there are {', '.join(names(paths))}")
    file = paths.params if profile is None else paths.profiles / f"{profile}.yaml"
    sections = load_yaml(file) or {}
    results = Results(paths, [load_primary()], {})

    def cells(stage, cls):
        return {cell: load_section(cls, file, stage, cell) for cell in section_keys(file, stage)} if sections.get(stage) else {}

    data, trained = cells("prepare_data", PrepareData), {stage: cells(stage, PretrainParams) for stage in TRAINING}
    dense, variants = {stage: cells(stage, cls) for stage, cls in DENSE.items()}, cells("ablate", AblateParams)
    every = [params for of_stage in (*trained.values(), variants) for params in of_stage.values()]
    known = {key for p in every for key in (p.model, results.model_key(vars(p), p.model))}
    for name in sorted(rates.given.keys() - known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known)) or 'none'}"
        raise UserError(f"plan: --img-per-s {name}: no cell trains this model; {hint}")
    rows = []
    for stage in sections:
        if stage == "prepare_data":
            rows += [_data_row(paths, cell, params) for cell, params in data.items()]
        elif stage in TRAINING:
            rows += [_training_row(paths, results, rates, stage, cell, params, data) for cell, params in trained[stage].items()]
        elif stage in DENSE:
            rows += [_dense_row(paths, results, rates, stage, cell, params, data) for cell, params in dense[stage].items()]
        elif stage == "ablate":
            rows += [_variant_row(paths, results, rates, cell, params, data) for cell, params in variants.items()]
        elif stage == "complexity":
            rows.append(_complexity_row(load_section(ComplexityParams, file, stage), results))
        elif stage == "efficiency":
            rows.append(_efficiency_row(load_section(EfficiencyParams, file, stage)))
        elif stage not in ("runtime", "report"):  # neither costs anything
            rows.append(Row(command=f"dvc repro {stage}", gpu_hours=None, disk_gb=None, basis="no cost model for this stage"))
    return rows


def _manifest(paths: Paths, cell: str):
    from repro.data.manifest import read_manifest

    file = paths.cell("prepare_data", cell) / "manifest.json"
    return read_manifest(file) if file.is_file() else None


def _data_row(paths: Paths, cell: str, params: PrepareData) -> Row:
    manifest = _manifest(paths, cell)
    known = sum(split.bytes for split in manifest.splits.values()) / 1e9 if manifest else KNOWN_GB.get(params.kind)
    basis = "CPU only; size " + ("from its manifest" if manifest else "as published" if known else "unknown until it is written")
    return Row(command=f"dvc repro prepare_data@{cell}", gpu_hours=0.0, disk_gb=known, basis=basis)


def _training_row(paths: Paths, results: Results, rates: Rates, stage: str, cell: str, params: PretrainParams, data: dict) -> Row:
    """Disk: two checkpoints and one being written, of weights, AdamW's two moments and the average where there is one; the snapshots
    there and in the results; the weights; all fp32."""
    from repro.measure.flops import cost

    if params.data not in data:
        raise UserError(f"{stage}.{cell}.data: {params.data} is no cell of prepare_data")
    prepared = data[params.data]
    manifest = _manifest(paths, params.data)
    images = manifest.splits["train"].images if manifest else prepared.expected.train
    classes = len(manifest.classes) if manifest else prepared.expected.classes
    try:
        counted = cost(params.model, {**params.options, "num_classes": classes}, (params.transform.image_size,) * 2)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{stage}.{cell}: {error}") from None
    key = results.model_key(vars(params), params.model)
    speed = rates.speed(results, params.model, key, counted.macs)
    return Row(
        command=f"dvc repro {stage}@{cell}",
        gpu_hours=params.epochs * images / speed.img_per_s / 3600,
        disk_gb=counted.params * 4 * ((3 + bool(params.ema_decay)) * 3 + 2 * len(params.snapshot_epochs) + 1) / 1e9,
        basis=f"{params.epochs} epochs of {images:,} images at {speed.img_per_s:,.0f} img/s, {speed.how}",
        note=speed.note,
        gives=frozenset({("accuracy", prepared.kind, key)}),
    )


def _variant_row(paths: Paths, results: Results, rates: Rates, cell: str, params: AblateParams, data: dict) -> Row:
    """A training for each seed; the state of each is kept until all are done."""
    one, seeds = _training_row(paths, results, rates, "ablate", cell, params.with_seed(params.seeds[0]), data), len(params.seeds)
    basis = f"{seeds} seeds of {one.basis}" if seeds > 1 else one.basis
    return dataclasses.replace(one, gpu_hours=seeds * one.gpu_hours, disk_gb=seeds * one.disk_gb, basis=basis)


def _dense_row(
    paths: Paths, results: Results, rates: Rates, stage: str, cell: str, params: DetectParams | SegmentParams, data: dict
) -> Row:
    """As `_training_row`; the hours are at least those of the backbone with its adapter, at the size that is evaluated."""
    from repro.measure.adapted import adapted_cost

    if params.data not in data:
        raise UserError(f"{stage}.{cell}.data: {params.data} is no cell of prepare_data")
    prepared = data[params.data]
    manifest = _manifest(paths, params.data)
    passes = manifest.splits["train"].images if manifest else prepared.expected.train
    images = params.epochs * (params.steps_per_epoch * params.batch_size if params.steps_per_epoch else passes)
    if isinstance(params, SegmentParams):
        size = (params.transform.crop_size,) * 2
    else:
        size = (params.transform.min_size[-1], params.transform.max_size)
    try:
        counted = adapted_cost(params.model, tuple(-(-side // 32) * 32 for side in size), params.options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{stage}.{cell}: {error}") from None
    key = results.model_key(vars(params), params.model)
    speed = rates.speed(results, f"{stage} {params.model}", f"{stage} {key}", counted.macs)  # a speed of pretraining is none of this
    return Row(
        command=f"dvc repro {stage}@{cell}",
        gpu_hours=images / speed.img_per_s / 3600,
        disk_gb=None,
        basis=f"at least, without the heads: {images:,} images at {speed.img_per_s:,.0f} img/s, {speed.how}",
        note=speed.note,
        gives=frozenset({("accuracy", prepared.kind, key)}),
    )


def _complexity_row(params: ComplexityParams, results: Results) -> Row:
    from repro.measure.speed import row_id

    counted = frozenset(
        (kind, row_id(results.model_key({"model": model, "options": dict(options)}, model), {}, resolution), "")
        for model, options, resolution in wanted(params)
        for kind in ("params_m", "macs_g_paper_convention" if model == ADAPTER else "macs_g")
    )
    return Row(command="dvc repro complexity", gpu_hours=0.0, disk_gb=0.0, basis="CPU only, under a minute", gives=counted)


def _efficiency_row(params: EfficiencyParams) -> Row:
    """The baselines run twice, with unfused and with fused attention; a row that takes longer than its budget is stopped."""
    models = [model for pair in params.sizes.values() for model in (pair.vittt, pair.baseline, pair.baseline)] + [*params.others]
    rows = len(models) * len(params.resolutions)
    gives = frozenset((kind, model, "") for kind in ("fps", "memory_mib") for model in models)
    basis = f"at most: {rows} rows of {params.budget_s:g} s"
    return Row(command="dvc repro efficiency", gpu_hours=rows * params.budget_s / 3600, disk_gb=0.0, basis=basis, gives=gives)


def _number(value: float | None) -> str:
    if not value:
        return "unknown" if value is None else "0"
    return "<0.1" if value < 0.05 else f"{value:,.1f}"
