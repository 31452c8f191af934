"""`repro efficiency`: throughput, latency and peak memory over resolution (Fig. 1 and 6), on whatever device this is."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import typer

from repro.core.config import bounded, load_section
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, write_record, write_text
from repro.core.runtime import Runtime, choose_device, device_label, load_runtime, torch_dtype

from . import Stage, efficiency_sweep

COMPARED_AT = 1280  # the side at which the paper states speed-up and memory saved (Fig. 1)
COLUMNS = (
    "row",
    "model",
    "attention",
    "side",
    "batch",
    "dtype",
    "device",
    "backend",
    "status",
    "throughput_img_per_s",
    "latency_ms",
    "latency_ms_low",
    "latency_ms_high",
    "peak_memory_mib",
    "macs_g",
)


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


STAGE = Stage(params=EfficiencyParams)


def command(
    res: Annotated[str | None, typer.Option(help="Sides in pixels: 224..1280 (every 128 or so), 224..1280:64, 224,512.")] = None,
    families: Annotated[str | None, typer.Option(help="Of vittt,deit,deit_fused,vim,vrwkv,vit3; all of them without it.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Of T,S,B; on a CPU T, on a GPU all of them without it.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per step; 1 on a CPU, 64 on a GPU without it.")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Of weights and inputs; fp32 on a CPU, bf16 on a GPU without it.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Measure on this device.")] = None,
    mode: Annotated[Literal["infer", "train"] | None, typer.Option(help="Forward, or forward, backward and AdamW.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="With torch.compile.")] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="For all rows; what does not fit is left out. 10 on a CPU, no limit on a GPU.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, max=2, help="2: every row twice, and how well they agree.")] = None,
) -> None:
    """Measure speed and peak memory, one fresh process per row.

    Without an option: the `efficiency:` section of params.yaml. With one: a sweep into results/measured/<device>/efficiency.json,
    with figures; a second call continues.
    """
    paths = find_root()
    runtime = load_runtime(paths)
    if not any((res, families, sizes, batch, dtype, device, mode, compile, minutes, runs)):
        run(load_section(EfficiencyParams, paths.params, "efficiency"), paths, runtime)
        return
    from repro.measure.sweep import FAMILIES, GRID, SIZES, parse_names, parse_resolutions

    try:
        asked = efficiency_sweep.Sweep(
            resolutions=parse_resolutions(res) if res else GRID,
            families=parse_names(families, FAMILIES, "family") if families else tuple(FAMILIES),
            sizes=parse_names(sizes, SIZES, "size") if sizes else None,
            batch=batch,
            dtype=dtype,
            mode=mode or "infer",
            compile=compile,
            minutes=minutes,
            runs=runs or 1,
        )
    except ValueError as error:
        raise UserError(f"efficiency: {error}") from None
    efficiency_sweep.run(asked, paths, dataclasses.replace(runtime, device=device or runtime.device))


def run(params: EfficiencyParams, paths: Paths, runtime: Runtime) -> None:
    """Write results/efficiency/{metrics.json, rows.csv}.

    metrics: `rows`, see repro.measure.speed.measure; `speedup_at_1280` and `memory_saved_at_1280_percent` {size:
    {vs_deit_unfused, vs_deit_fused}}, from median latencies and from peaks; `op`, see repro.measure.op_rate.

    Raises:
        UserError: a model or device that is not there.
        RunError: a measuring process broke.
    """
    import torch

    from kernels import selected_backend
    from repro.measure.flops import cost
    from repro.measure.op_rate import kept_for_backward, op_rate
    from repro.measure.speed import RowSpec, measure

    started = time.monotonic()
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    label = device_label(device)
    shared = {
        "batch": params.batch,
        "dtype": params.dtype,
        "device": device.type,
        "backend": params.backend,
        "steps": params.steps,
        "warmup": params.warmup,
        "budget_s": params.budget_s,
        "threads": runtime.threads,
    }
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
        print(efficiency_sweep.line(rows[-1], spec.row_id), flush=True)
    op_sizes = dataclasses.asdict(params.op)
    op = {**op_rate(**op_sizes, device=device.type, dtype=params.dtype, backend=params.backend), "device": label}
    kept_sizes = {name: op_sizes[name] for name in ("tokens", "heads", "head_dim", "chunk_size")}
    op |= kept_for_backward(batch=1, **kept_sizes, device=device.type, backend=params.backend)
    share_percent = 100 * op["share_of_matmul_rate"]
    print(f"ttt_linear_bidir: {op['op_gflop_per_s']:.1f} GFLOP/s, {share_percent:.1f} % of the matrix-product rate")

    metrics = {
        "rows": rows,
        f"speedup_at_{COMPARED_AT}": _compare(params, rows, "latency_ms", lambda ours, theirs: theirs / ours),
        f"memory_saved_at_{COMPARED_AT}_percent": _compare(params, rows, "peak_memory_mib", lambda ours, theirs: 100 * (1 - ours / theirs)),
        "op": op,
    }
    folder = paths.results / "efficiency"
    write_text(folder / "rows.csv", efficiency_sweep.rows_csv(rows, COLUMNS))
    identity = make_identity(paths.root, ["stages.efficiency"], params, device=label, dtype=params.dtype, backend=backend)
    write_record(folder, metrics, identity, time.monotonic() - started)


def _models(params: EfficiencyParams) -> list[tuple[str, str | None]]:
    compared = [row for pair in params.sizes.values() for row in ((pair.vittt, None), (pair.baseline, "unfused"), (pair.baseline, "fused"))]
    return compared + [(model, None) for model in params.others]


def _compare(params: EfficiencyParams, rows: list[dict], key: str, ratio: Callable[[float, float], float]) -> dict[str, dict[str, Any]]:
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


def _progress(specs: list) -> Iterator:
    """The specs, with a bar on a terminal; a log has the line of each row."""
    if not sys.stderr.isatty():
        yield from specs
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(specs, "measuring", console=Console(stderr=True))
