"""Measurement of speed and memory: the fixed grid of the stage `efficiency`, and sweeps from the command line."""

import dataclasses
import importlib.util
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernels import selected_backend

from ..core.errors import Interrupted, RunError, UserError, blame
from ..core.paths import Paths
from ..core.record import write_run
from ..core.runtime import Runtime, choose_device, device_label, device_slug, prepare_process, torch_dtype
from .params import EfficiencyParams, SweepParams
from .pooling import mark_host, pool_runs
from .rows import Sheet, make_schedule, measure_pairs, measure_rows, share_finder
from .speed import RowSpec
from .sweep import FAMILIES, SIZES, family_rows, find_family, group_rows
from .unfinished import Unfinished, read_clock

# value of `compile` -> its words in titles of figures, and in names of files
_COMPILED = {False: ("", ""), True: (", compiled", "_compiled"), "graphs": (", through CUDA graphs", "_graphs")}


def run_grid(params: EfficiencyParams, paths: Paths, runtime: Runtime) -> None:
    """Measure the rows of the `efficiency:` section, each in its own process, and write results/efficiency/rows.csv.

    Raises:
        UserError: a model, backend or device that does not exist here.
        RunError: a measuring process failed.
    """
    started = time.monotonic()
    device, label = _open_device(runtime)
    with blame("efficiency", ValueError):
        selected_backend(params.backend, device, dtype=torch_dtype(params.dtype))
    file = paths.results / "efficiency" / "rows.csv"
    file.unlink(missing_ok=True)  # it may hold rows of other params
    sheet = Sheet(file, paths.root, label, read_clock())
    specs = params.specs(device.type, runtime.threads)
    measure_rows(specs, sheet, make_schedule(specs), keep_failures=False)
    write_run(file, time.monotonic() - started)


def run_sweep(
    params: SweepParams, paths: Paths, runtime: Runtime, *, began: str | None = None, started: float | None = None
) -> bool:
    """Measure the rows of a sweep into results/speed/<device>.csv, and draw figures in artifacts/speed/<device>.

    The next call continues an interrupted sweep, or one that left image sizes out; it repeats a complete one.

    Args:
        began: rows measured since this time (`unfinished.read_clock`) are not measured again; None: the start of
            the unfinished sweep, if there is one.
        started: `time.monotonic()` at the start of the time limit; None: now.

    Returns:
        Whether every row was measured within the time limit.

    Raises:
        UserError: a model or device that does not exist here, CUDA graphs without a GPU or in training, or a damaged
            file.
        Interrupted: Ctrl-C; the rows measured so far are kept.
        RunError: the process of every row broke.
    """
    device, label = _open_device(runtime)
    params = params.with_defaults(device.type)
    if params.compile == "graphs" and (device.type != "cuda" or params.mode != "infer"):
        where = f"--mode {params.mode} on {device.type}"
        raise UserError(f"efficiency: --graphs is for inference on a GPU, and this is {where}")
    slug = device_slug(device)
    file, state = paths.speed / f"{slug}.csv", Unfinished(paths, slug)
    sheet = Sheet(file, paths.root, label, began or state.began)
    state.save()
    blocks = params.plan(device.type, runtime.threads)
    specs = [spec for block in blocks for spec in block]
    schedule = make_schedule(specs, 60 * (params.minutes or math.inf), started)
    find_share = share_finder(dtype=params.dtype, device=device.type)
    try:
        for block in blocks:
            for run in range(1, params.runs + 1):
                passes = params.runs - run + 1
                measure_rows(block, sheet, schedule, run=run, passes=passes, find_share=find_share)
                measure_pairs(specs, sheet, schedule, run=run, find_share=find_share)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"{len(sheet.rows)} rows are kept in {file}") from None
    finally:
        if sheet.rows:
            if importlib.util.find_spec("matplotlib"):
                _draw_figures(sheet.rows, paths.root / "artifacts" / "speed" / slug, label)
            else:
                print("no figures: matplotlib is not installed")
    # `find` passes over rows of broken processes
    if not (schedule.left_out or any(sheet.find(spec, run + 1) for spec in specs for run in range(params.runs))):
        raise RunError(f"efficiency: every row failed; {file.relative_to(paths.root)} has the reasons")
    print(f"{len(sheet.rows)} rows in {file.relative_to(paths.root)}")
    if not schedule.left_out:
        state.finish()
        return True
    print(describe_left_out(schedule.left_out, sum(map(schedule.expect, schedule.left_out)), params, device.type))
    return False


def describe_left_out(left_out: Sequence[RowSpec], seconds: float, params: SweepParams, device_type: str) -> str:
    """Describe the image sizes that were left out, by families, with a command whose time limit suffices for them.

    `seconds` is the time that all these rows are expected to take.
    """
    families: dict[int, set[str | None]] = {}
    for spec in left_out:
        families.setdefault(spec.image_size[0], set()).add(find_family(vars(spec))[0])
    sides: dict[tuple[str, ...], list[int]] = {}
    for side in sorted(families):
        sides.setdefault(tuple(name for name in FAMILIES if name in families[side]), []).append(side)
    said = [
        f"{', '.join(f'{side}²' for side in own)} of {'all' if len(names) == len(FAMILIES) else ', '.join(names)}"
        for names, own in sides.items()
    ]
    every = tuple(name for name in FAMILIES if any(name in names for names in sides))
    minutes = math.ceil(seconds / 60 * 1.25 + 1)  # a quarter more than expected, and a minute for the start
    again = dataclasses.replace(
        params,
        image_sizes=tuple(sorted(families)),
        families=params.families if len(every) == len(FAMILIES) else every,
        minutes=float(minutes),
    )
    return f"left out: {'; '.join(said)}; `{again.command(device_type)}` measures them"


def _open_device(runtime: Runtime) -> tuple[torch.device, str]:
    """Set PyTorch's number of threads to the runtime's, and return the device and its label."""
    device = choose_device(runtime.device)
    prepare_process(runtime)
    return device, device_label(device)


def _draw_figures(rows: list[dict[str, Any]], folder: Path, label: str) -> None:
    """Draw Fig. 6 and the panels of Fig. 1 for each size, batch size, dtype, mode and compilation that was measured.

    Rows of another label, as of other threads, are left out.
    """
    from .figures import LABELS, against_resolution, at_largest

    rows = [row for row in rows if row["device"] == label]
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
