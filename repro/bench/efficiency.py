"""Speed and memory: the fixed grid of the stage `efficiency`, and sweeps by the command line."""

import importlib.util
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch

from kernels import selected_backend

from ..core.errors import Interrupted, RunError, UserError, blame
from ..core.paths import Paths
from ..core.record import write_run
from ..core.runtime import Runtime, choose_device, device_label, device_slug, torch_dtype
from ..core.speeds import mark_host, pool_runs
from ..core.unfinished import Unfinished, read_clock
from .params import EfficiencyParams, SweepParams
from .rows import Sheet, measure_pairs, measure_rows, measure_shares
from .sweep import SIZES, family_rows, find_family, group_rows

# in titles, in names
_COMPILED = {False: ("", ""), True: (", compiled", "_compiled"), "graphs": (", through CUDA graphs", "_graphs")}


def run_grid(params: EfficiencyParams, paths: Paths, runtime: Runtime) -> None:
    """Measure the rows of the `efficiency:` section, one process for each, and write results/efficiency/rows.csv.

    Raises:
        UserError: a model, backend or device that does not exist here.
        RunError: a measuring process broke.
    """
    started = time.monotonic()
    device, label = _open_device(runtime)
    with blame("efficiency", ValueError):
        selected_backend(params.backend, device, dtype=torch_dtype(params.dtype))
    file = paths.results / "efficiency" / "rows.csv"
    file.unlink(missing_ok=True)  # rows of other params
    sheet = Sheet(file, paths.root, label, read_clock())
    measure_rows(params.specs(device.type, runtime.threads), sheet, keep_failures=False)
    write_run(file, time.monotonic() - started)


def run_sweep(params: SweepParams, paths: Paths, runtime: Runtime, *, began: str | None = None) -> bool:
    """Measure the rows of a sweep into results/speed/<device>.csv, and draw figures in artifacts/speed/<device>.

    An interrupted sweep, or one that left sizes out, is continued by the next call; a complete one is measured anew.

    Args:
        began: rows measured since (`core.unfinished.read_clock`) are not measured again; None: since the unfinished
            sweep of before began, if there is one.

    Returns:
        Whether no row was left out for want of time.

    Raises:
        UserError: a model or device that does not exist here, or a damaged file.
        Interrupted: Ctrl-C; the rows measured so far are kept.
        RunError: no row could be measured.
    """
    device, label = _open_device(runtime)
    params = params.with_defaults(device.type)
    if params.compile == "graphs" and (device.type != "cuda" or params.mode != "infer"):
        where = f"--mode {params.mode} on {device.type}"
        raise UserError(f"efficiency: --graphs is for inference on a GPU, and this is {where}")
    slug = device_slug(device)
    file, state, left_out = paths.speed / f"{slug}.csv", Unfinished(paths, slug), {}
    sheet = Sheet(file, paths.root, label, began or state.began)
    state.save()
    specs, runs = params.specs(device.type, runtime.threads), range(1, params.runs + 1)
    budget_s = math.inf if params.minutes is None else 60 * params.minutes / params.runs
    try:
        new = [spec for spec in specs if any(sheet.find(spec, run) is None for run in runs)]
        families = {family for spec in new if (family := find_family(vars(spec))[0])}
        shares = measure_shares(families, batch_size=params.batch_size, dtype=params.dtype, device=device.type)
        for run in runs:
            left_out = measure_rows(specs, sheet, run=run, budget_s=budget_s, shares=shares)
            measure_pairs(specs, sheet, run=run)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"{len(sheet.rows)} rows are kept in {file}") from None
    finally:
        if sheet.rows:
            if importlib.util.find_spec("matplotlib"):
                _draw_figures(sheet.rows, paths.root / "artifacts" / "speed" / slug, label)
            else:
                print("no figures: matplotlib is not installed")
    if not sheet.rows:
        raise RunError("efficiency: nothing was measured")
    print(f"{len(sheet.rows)} rows in {file.relative_to(paths.root)}")
    for side, seconds in sorted(left_out.items()):
        print(f"left out: {side}², expected to take {seconds:.0f} s; --minutes gives more time")
    if not left_out:
        state.finish()
    return not left_out


def _open_device(runtime: Runtime) -> tuple[torch.device, str]:
    """The device to measure on and its label, once PyTorch has the number of threads that the runtime asks for."""
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    return device, device_label(device)


def _draw_figures(rows: list[dict[str, Any]], folder: Path, label: str) -> None:
    """Draw Fig. 6 and the panels of Fig. 1 for each size, batch size, dtype, mode and compilation that was measured."""
    from ..core.figures import LABELS, against_resolution, at_largest

    for (batch_size, dtype, mode, compiled), group in group_rows(mark_host(pool_runs(rows))).items():
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
