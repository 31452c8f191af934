"""The records of speed and memory: the fixed grid of the stage `efficiency`, and sweeps by the command line."""

import importlib.util
import math
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernels import selected_backend

from ..core.errors import Interrupted, RunError, UserError, blame
from ..core.host import mark_host
from ..core.noise import mark_noise, pool_runs
from ..core.paths import Paths
from ..core.record import make_identity, read_json, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug, torch_dtype
from .conclude import compare_at, conclude
from .op_rate import OP_SIZES, kept_for_backward, op_rate
from .params import EfficiencyParams, SweepParams
from .rows import (
    COLUMNS,
    ROW_KEYS,
    RowStore,
    find_row,
    measure_gates,
    measure_pairs,
    measure_rows,
    open_model_rows,
    write_rows,
)
from .sweep import SIZES, family_rows, group_rows

COMPARED_AT = 1280  # the image size at which the paper states speed-up and memory saved (Fig. 1)
# by which a sweep finds a row again; the grid's identity says the same
_SWEEP_KEYS = ("run", "commit", "torch_version")
# in titles, in names
_COMPILED = {False: ("", ""), True: (", compiled", "_compiled"), "graphs": (", through CUDA graphs", "_graphs")}
_ORDER = ("run", "mode", "compile", "dtype", "batch_size", "image_size", "row")  # by which a sweep sorts its rows
GRID_COLUMNS = tuple(
    name for name in COLUMNS if name not in ("mode", "compile", "attention_kernel", "num_params", "run")
)


def run_grid(params: EfficiencyParams, paths: Paths, runtime: Runtime) -> None:
    """Measure the rows of the `efficiency:` section and write results/efficiency/{metrics.json, rows.csv}.

    metrics: `rows`, see `repro.bench.speed.measure`, each with `row`, its name; `speedup_at_1280` and
    `memory_saved_at_1280_percent` {size: {vs_deit_unfused, vs_deit_fused}}, from median latencies and from peaks; `op`,
    see `repro.bench.op_rate`.

    Raises:
        UserError: a model, backend or device that does not exist here.
        RunError: a measuring process broke.
    """
    started = time.monotonic()
    device, label = _open_device(runtime)
    with blame("efficiency", ValueError):
        backend = selected_backend(params.backend, device, dtype=torch_dtype(params.dtype))
    store = open_model_rows(paths.root, label)
    measure_rows(params.specs(device.type, runtime.threads), store, keep_failures=False)
    sizes = {name: getattr(params.op, name) for name in OP_SIZES}
    how = {"device": device.type, "backend": params.backend}
    op = op_rate(sizes, repeats=params.op.repeats, dtype=params.dtype, **how) | kept_for_backward(sizes, **how)
    share_percent = 100 * op["share_of_matmul_rate"]
    print(f"ttt_linear_bidir: {op['op_gflop_per_s']:.1f} GFLOP/s, {share_percent:.1f} % of the matrix-product rate")
    rows = [{name: value for name, value in row.items() if name not in _SWEEP_KEYS} for row in store.rows]
    pairs = {size: (pair.model, pair.baseline) for size, pair in params.sizes.items()}

    folder = paths.results / "efficiency"
    write_rows(folder / "rows.csv", rows, GRID_COLUMNS)
    metrics = {"rows": rows, **compare_at(COMPARED_AT, pairs, rows), "op": {**op, "device": label}}
    identity = make_identity(paths.root, params, device=label, dtype=params.dtype, backend=backend)
    write_record(folder / "metrics.json", metrics, identity, time.monotonic() - started)


def run_sweep(params: SweepParams, paths: Paths, runtime: Runtime) -> bool:
    """Measure the rows of a sweep that are not measured yet, and write efficiency.{json,csv} in
    results/replications/<device>, and figures in artifacts/.

    Returns whether no row was left out for want of time. metrics: `rows`, see
    `repro.bench.speed.measure` and `measure_rows`; `left_out`, a list of {image_size, expected_s}; `gates`, see
    `repro.bench.op_rate.measure_gate`; `compared`, `growth` and `repeated`, see `repro.bench.conclude.conclude`.

    Raises:
        UserError: a model or device that does not exist here, or a record of another version.
        Interrupted: Ctrl-C; the rows measured so far are kept.
        RunError: no row could be measured.
    """
    started = time.monotonic()
    device, label = _open_device(runtime)
    params = params.with_defaults(device.type)
    if params.compile == "graphs" and (device.type != "cuda" or params.mode != "infer"):
        where = f"--mode {params.mode} on {device.type}"
        raise UserError(f"efficiency: --graphs is for inference on a GPU, and this is {where}")
    folder = paths.replications(device_slug(device))
    record = folder / "efficiency.json"
    before = _read_sweep(record)
    gates, left_out = before["gates"], {}

    def save(store: RowStore) -> None:
        rows = sorted(
            store.rows, key=lambda row: [str(row[name]) if name == "compile" else row[name] for name in _ORDER]
        )
        missing = [{"image_size": side, "expected_s": seconds} for side, seconds in left_out.items()]
        metrics = {"rows": rows, "left_out": missing, "gates": gates, **conclude(rows, gates)}
        backends = ", ".join(sorted({row["backend"] for row in rows if row["status"] == "ok"})) or "none"
        identity = make_identity(paths.root, params, device=label, dtype=params.dtype, backend=backends)
        write_rows(folder / "efficiency.csv", rows)
        write_record(record, metrics, identity, time.monotonic() - started)

    store = open_model_rows(paths.root, label, before["rows"], save)
    specs, runs = params.specs(device.type, runtime.threads), range(1, params.runs + 1)
    budget_s = math.inf if params.minutes is None else 60 * params.minutes / params.runs
    try:
        new = [spec for spec in specs if any(find_row(store, spec, run) is None for run in runs)]
        families = {spec.model.split("_")[0] for spec in new}
        gates += measure_gates(families, batch_size=params.batch_size, dtype=params.dtype, device=device.type)
        gates = list({(gate["family"], gate["batch_size"], gate["dtype"]): gate for gate in gates}.values())
        for run in runs:
            left_out = measure_rows(specs, store, run=run, budget_s=budget_s)
            measure_pairs(specs, store, run=run)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"{len(store.rows)} rows are kept in {record}") from None
    finally:
        if store.rows:
            save(store)
            if importlib.util.find_spec("matplotlib"):
                _draw_figures(store.rows, paths.artifacts(record), label)
            else:
                print("no figures: matplotlib is not installed")
    if not store.rows:
        raise RunError("efficiency: nothing was measured")
    print(f"{len(store.rows)} rows in {record.relative_to(paths.root)}")
    for side, seconds in sorted(left_out.items()):
        print(f"left out: {side}², expected to take {seconds:.0f} s; --minutes gives more time")
    return not left_out


def _open_device(runtime: Runtime) -> tuple[torch.device, str]:
    """The device to measure on and its label, once PyTorch has the number of threads that the runtime asks for."""
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    return device, device_label(device)


def _read_sweep(record: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows and gates of an earlier sweep on this device; none where there was no sweep."""
    if not record.is_file():
        return {"rows": [], "gates": []}
    content = read_json(record)
    metrics = content.get("metrics") if isinstance(content, Mapping) else None
    if not isinstance(metrics, Mapping) or not all(isinstance(metrics.get(name), list) for name in ("rows", "gates")):
        raise UserError(f"{record}: not the record of a sweep; move it away")
    needed = {"rows": ROW_KEYS, "gates": ("family", "batch_size", "dtype")}
    for name, keys in needed.items():
        for number, item in enumerate(metrics[name]):
            missing = [key for key in keys if not isinstance(item, Mapping) or key not in item]
            if missing:
                where = f"{record}: {name}[{number}].{missing[0]}"
                raise UserError(f"{where}: missing; another version wrote this file, move it away")
    return {name: metrics[name] for name in needed}


def _draw_figures(rows: list[dict[str, Any]], folder: Path, label: str) -> None:
    """Draw Fig. 6 and the panels of Fig. 1 for each size, batch size, dtype, mode and compilation that was measured."""
    from ..core.figures import LABELS, against_resolution, at_largest

    pooled = mark_host(mark_noise(pool_runs(rows)))
    for (batch_size, dtype, mode, compiled), group in group_rows(pooled).items():
        for size in SIZES:
            series = family_rows(group, size)
            sides = {row["image_size"][0] for own in series.values() for row in own}
            if len(sides) < 2:
                continue
            largest = max(sides)
            about = f"{label}, batch {batch_size}, {dtype}, {mode}{_COMPILED[compiled][0]}"
            name = f"{size}_batch{batch_size}_{dtype}_{mode}{_COMPILED[compiled][1]}"
            against_resolution(folder / f"fig6_{name}.png", series, f"size {size}: {about}")
            at_size = {family: row for family, own in series.items() for row in own if row["image_size"][0] == largest}
            bars = {
                key: {family: row[key] for family, row in at_size.items() if row[key] is not None} for key in LABELS
            }
            bars = {key: values for key, values in bars.items() if values}
            at_largest(folder / f"fig1_{name}.png", bars, f"size {size} at {largest}²: {about}")
