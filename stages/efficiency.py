"""`repro efficiency`: throughput, latency and peak memory over resolution (Fig. 1 and 6), on whatever device this is."""

import csv
import dataclasses
import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import bounded, load_section
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, write_record, write_text
from repro.core.runtime import Runtime, choose_device, device_label, device_slug, load_runtime, torch_dtype

COMPARED_AT = 1280  # the side at which the paper states speed-up and memory saved (Fig. 1)
COLUMNS = (
    "row", "model", "attention", "side", "batch", "dtype", "device", "backend", "status", "throughput_img_per_s", "latency_ms",
    "latency_ms_low", "latency_ms_high", "peak_memory_mib", "macs_g",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizePair:
    """A size of Vittt and the softmax-attention baseline that it is compared with; that runs with unfused and fused attention."""

    vittt: str
    baseline: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpParams:
    """Sizes of `ttt_linear_bidir` and of the square matrix product that its rate is compared with.

    Args:
        batch, tokens, heads, head_dim, chunk_size: the op's.
        matmul_side: n of the n x n x n product.
        repeats: timed turns; 6 are the fewest that give an interval.
    """

    batch: int = bounded(1, ge=1)
    tokens: int = bounded(ge=1)
    heads: int = bounded(ge=1)
    head_dim: int = bounded(64, ge=1)
    chunk_size: int = bounded(16, ge=1)
    matmul_side: int = bounded(ge=1)
    repeats: int = bounded(ge=6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EfficiencyParams:
    """The `efficiency:` section.

    Args:
        sizes: letter of a size (T, S, B) -> the models that are compared.
        others: further models, measured beside them.
        resolutions: sides of the square image in pixels.
        batch: images per step.
        dtype: weights and inputs are cast to it.
        backend: implementation of TTT-Linear.
        steps: timed steps per row; three where a step takes more than 2 s.
        warmup: steps before them.
        budget_s: wall-clock limit of a row; over it, the row is recorded as `timeout`.
        op: the row of the op alone.
    """

    sizes: dict[str, SizePair]
    others: tuple[str, ...] = ()
    resolutions: tuple[int, ...] = bounded(ge=1)
    batch: int = bounded(1, ge=1)
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    backend: Literal["auto", "torch", "triton", "reference"] = "auto"
    steps: int = bounded(10, ge=10)
    warmup: int = bounded(2, ge=1)
    budget_s: float = bounded(120.0, gt=0)
    op: OpParams


def command(
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Measure on this device.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step.")] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Number format of weights and inputs.")] = None,
) -> None:
    """Measure speed and peak memory, one fresh process per row; with an option, results go to results/measured/<device>."""
    paths = find_root()
    params, runtime = load_section(EfficiencyParams, paths.params, "efficiency"), load_runtime(paths)
    folder = None
    if device or batch or dtype:
        runtime = dataclasses.replace(runtime, device=device or runtime.device)
        params = dataclasses.replace(params, batch=batch or params.batch, dtype=dtype or params.dtype)
        folder = paths.measured(device_slug(choose_device(runtime.device))) / "efficiency" / f"batch{params.batch}_{params.dtype}"
    run(params, paths, runtime, folder=folder)


def run(params: EfficiencyParams, paths: Paths, runtime: Runtime, *, folder: Path | None = None) -> None:
    """Write {metrics.json, rows.csv} into `folder`, results/efficiency by default.

    metrics: `rows`, see repro.measure.speed.measure; `speedup_at_1280` and `memory_saved_at_1280_percent` {size:
    {vs_deit_unfused, vs_deit_fused}}, from median latencies and from peaks; `op`, see repro.measure.op_rate.

    Raises:
        UserError: a model or device that is not there.
        RunError: a measuring process broke.
    """
    import torch

    from kernels import selected_backend
    from repro.measure.flops import cost
    from repro.measure.op_rate import op_rate
    from repro.measure.speed import RowSpec, measure

    started = time.monotonic()
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    label = device_label(device)
    shared = {
        "batch": params.batch, "dtype": params.dtype, "device": device.type, "backend": params.backend, "steps": params.steps,
        "warmup": params.warmup, "budget_s": params.budget_s, "threads": runtime.threads,
    }  # fmt: skip
    specs = [
        RowSpec(model=model, attention=attention, resolution=(side, side), **shared)
        # resolution outside, models inside: what is compared runs close in time, so a drifting machine meets it alike
        for side in params.resolutions
        for model, attention in _models(params)
    ]
    try:
        backend = selected_backend(params.backend, device, dtype=torch_dtype(params.dtype))
        for spec in specs:  # a row that cannot run is the parameters' mistake, and is found before any other is measured
            cost(spec.model, spec.options, spec.resolution)
    except ValueError as error:
        raise UserError(f"efficiency: {error}") from None
    rows: list[dict[str, Any]] = []
    for spec in _progress(specs):
        try:
            rows.append({"row": spec.row_id, **measure(spec), "device": label})
        except RuntimeError as error:
            raise RunError(f"efficiency: {error}") from None
        print(_line(rows[-1]), flush=True)
    op_sizes = dataclasses.asdict(params.op)
    op = {**op_rate(**op_sizes, device=device.type, dtype=params.dtype, backend=params.backend), "device": label}
    share_percent = 100 * op["share_of_matmul_rate"]
    print(f"ttt_linear_bidir: {op['op_gflop_per_s']:.1f} GFLOP/s, {share_percent:.1f} % of the matrix-product rate")

    metrics = {
        "rows": rows,
        f"speedup_at_{COMPARED_AT}": _compare(params, rows, "latency_ms", lambda ours, theirs: theirs / ours),
        f"memory_saved_at_{COMPARED_AT}_percent": _compare(
            params, rows, "peak_memory_mib", lambda ours, theirs: 100 * (1 - ours / theirs)
        ),
        "op": op,
    }
    folder = folder or paths.results / "efficiency"
    write_text(folder / "rows.csv", _csv(rows))
    identity = make_identity(
        paths.root,
        ["stages.efficiency"],
        params,
        device=label,
        dtype=params.dtype,
        backend=backend,
    )
    write_record(folder, metrics, identity, time.monotonic() - started)


def _models(params: EfficiencyParams) -> list[tuple[str, str | None]]:
    compared = [
        row
        for pair in params.sizes.values()
        for row in ((pair.vittt, None), (pair.baseline, "unfused"), (pair.baseline, "fused"))
    ]
    return compared + [(model, None) for model in params.others]


def _compare(
    params: EfficiencyParams, rows: list[dict], key: str, ratio: Callable[[float, float], float]
) -> dict[str, dict[str, Any]]:
    by_place = {(row["model"], row["attention"], row["resolution"][0]): row for row in rows}
    compared: dict[str, dict[str, Any]] = {}
    for size, pair in params.sizes.items():
        ours = by_place.get((pair.vittt, None, COMPARED_AT))
        values = compared[size] = {}
        for attention in ("unfused", "fused"):
            theirs = by_place.get((pair.baseline, attention, COMPARED_AT))
            name = f"vs_deit_{attention}"
            if ours and theirs and ours[key] and theirs[key]:
                values[name] = ratio(ours[key], theirs[key])
            else:
                how = [row["status"] if row else "not in params" for row in (ours, theirs)]
                values[name] = None
                values[f"{name}_reason"] = f"at {COMPARED_AT}: {pair.vittt} {how[0]}, {pair.baseline} {how[1]}"
    return compared


def _line(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['row']}: {row['status']} ({row['reason']})"
    memory = f", peak {row['peak_memory_mib']:.0f} MiB" if row["peak_memory_mib"] is not None else ""
    return f"{row['row']}: {row['latency_ms']:.1f} ms, {row['throughput_img_per_s']:.2f} img/s{memory}"


def _progress(specs: list) -> Iterator:
    """The specs, with a bar on a terminal; a log has the line of each row."""
    if not sys.stderr.isatty():
        yield from specs
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(specs, "measuring", console=Console(stderr=True))


def _csv(rows: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        low, high = row["latency_ms_ci95"] or (None, None)
        writer.writerow({**row, "side": row["resolution"][0], "latency_ms_low": low, "latency_ms_high": high})
    return stream.getvalue()
