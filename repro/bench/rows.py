"""Rows of speed in a CSV file, and the loop that measures them in order within a time limit."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..core.csvfile import read_typed_csv, write_csv
from ..core.errors import RunError, UserError, blame
from ..core.record import installed_version, label_commit
from ..core.runtime import explain_emulation
from .flops import cost
from .op_rate import RATED_OPERATORS, measure_share
from .pooling import EMULATED
from .speed import RowSpec, measure, unmeasured_row
from .sweep import BASIS, RowSchedule, find_family, row_key
from .unfinished import read_clock

Row = dict[str, Any]
FindShare = Callable[[str | None, int], float | None]  # (family, batch size) -> share, see `share_finder`


def _read_size(text: str) -> list[int]:
    """Read `HxW` as [H, W]."""
    height, width = map(int, text.split("x"))
    return [height, width]


# column -> function that parses it; the others are text
TYPES = {
    "options": json.loads,
    "image_size": _read_size,
    "compile": {"True": True, "False": False, "graphs": "graphs"}.__getitem__,
    **dict.fromkeys(("batch_size", "run", "threads", "num_params"), int),
    **dict.fromkeys(
        ("latency_ms", "throughput_img_per_s", "peak_memory_mib", "macs_g", "op_share_of_copy_percent"), float
    ),
}
COLUMNS = tuple(
    "row model options attention image_size batch_size dtype mode compile device threads backend attention_kernel run status "
    "reason latency_ms throughput_img_per_s peak_memory_mib peak_memory_method num_params macs_g op_share_of_copy_percent "
    "commit torch_version measured".split()
)
_NEEDED = tuple("model options image_size batch_size dtype mode compile device run status commit".split())


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a CSV file that `Sheet` wrote, with None for empty values; a missing file has no rows.

    Raises:
        UserError: a value or a column is missing or damaged.
    """
    rows = read_typed_csv(path, TYPES)
    for number, row in enumerate(rows, 2):
        if missing := [name for name in _NEEDED if row.get(name) is None]:
            raise UserError(f"{path}: line {number}: {missing[0]} is missing; measure again, or move the file away")
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows in the form that `read_rows` reads."""
    table = [
        {**each, "options": json.dumps(each["options"]), "image_size": "x".join(map(str, each["image_size"]))}
        for each in rows
    ]
    write_csv(path, table, COLUMNS)


class Sheet:
    """The rows of one CSV file, each identified by its `row_key` and its run; the file is written after each new row.

    Args:
        path: the file, which need not exist.
        root: the root of the work tree, whose commit is written in each new row.
        device: the label of the present device, see `core.runtime.device_label`.
        began: rows measured before this time (`unfinished.read_clock`) are old, and so are rows of another label, as of
            other threads. They do not count, and a new row with the same key replaces them, whatever their run.
    """

    def __init__(self, path: Path, root: Path, device: str, began: str):
        self.path, self.began = path, began
        commit = label_commit(root)
        self._here = {"device": device, "commit": commit, "torch_version": installed_version("torch")}
        self.rows = read_rows(path)

    def find(self, spec: RowSpec, run: int) -> Row | None:
        """Return the row of a spec and run that was measured on this device since `began`; None if there is none.

        A row whose process broke is none: a continued measurement repeats it.
        """
        what = (row_key(vars(spec)), run)
        counted = (row for row in self.rows if self._counts(row) and row["status"] != "failed")
        return next((row for row in counted if (row_key(row), row["run"]) == what), None)

    def add(self, spec: RowSpec, run: int, row: Mapping[str, Any]) -> Row:
        """Add a row, remove the old ones with the same key, write the file, and return the row as added."""
        added = {**row, "row": spec.row_id, "run": run, **self._here, "measured": read_clock()}
        key = row_key(vars(spec))
        kept = [each for each in self.rows if row_key(each) != key or (each["run"] != run and self._counts(each))]
        self.rows = sorted([*kept, added], key=_find_place)
        write_rows(self.path, self.rows)
        return added

    def _counts(self, row: Row) -> bool:
        """Tell whether a row is of this device and these threads, and was measured since `began`."""
        return row["device"] == self._here["device"] and (row["measured"] or "") >= self.began


def _find_place(row: Row) -> tuple:
    """Return the key by which the rows of a file are sorted."""
    return row["mode"], str(row["compile"]), row["dtype"], row["batch_size"], row["image_size"], row["row"], row["run"]


def make_schedule(specs: Sequence[RowSpec], budget_s: float = math.inf, started: float | None = None) -> RowSchedule:
    """Make the schedule of rows for a limit in wall-clock seconds.

    Args:
        specs: all rows that will be scheduled.
        budget_s: the limit in seconds.
        started: `time.monotonic()` at the start of the limit; None: now.

    Raises:
        UserError: a model cannot be built at its image size. This check comes before any measurement.
    """
    with blame("efficiency", ValueError):
        macs_g = {spec.row_id: cost(spec.model, spec.options, spec.image_size).macs_g for spec in specs}
    return RowSchedule(lambda spec: macs_g[spec.row_id], budget_s, started=started)


def measure_rows(
    specs: Sequence[RowSpec],
    sheet: Sheet,
    schedule: RowSchedule,
    *,
    run: int = 1,
    passes: int = 1,
    keep_failures: bool = True,
    find_share: FindShare = lambda family, batch_size: None,
) -> None:
    """Measure every row that the sheet lacks and that fits into the time, and print a line for each.

    Args:
        specs: the rows, those of one image size next to each other; the schedule must know all of them.
        run: the number of this repetition of the rows, from 1 on.
        passes: how many runs are to come, including this one; each gets an equal share of the time.
        keep_failures: whether to record a row as `failed` if its process breaks, instead of raising a RunError.
        find_share: see `share_finder`.

    Raises:
        RunError: a measuring process broke, and failures are not kept.
    """
    found = [(spec, sheet.find(spec, run)) for spec in specs]
    todo = [spec for spec, row in found if row is None]
    if len(todo) < len(specs):
        print(f"{len(specs) - len(todo)} of {len(specs)} rows are there from the call before", flush=True)
    for spec, row in found:
        if row is not None:
            schedule.note(spec, row)
    for number, (spec, remaining_s) in enumerate(schedule.walk(todo, passes), 1):
        progress = f"{number} of {len(todo)}{_format_remaining(remaining_s)}"
        _measure(spec, sheet, schedule, run, progress, find_share, keep_failures)


def measure_pairs(
    specs: Sequence[RowSpec], sheet: Sheet, schedule: RowSchedule, *, run: int = 1, find_share: FindShare
) -> None:
    """Compare each model that ran out of memory with `BASIS` at a smaller batch.

    The batch is halved until both models of a size fit into memory; their rows at each batch are kept.
    """
    placed = [(*find_family(vars(spec)), spec) for spec in specs]
    bases = {(size, spec.image_size): spec for family, size, spec in placed if family == BASIS}
    for family, size, spec in placed:
        row, basis = sheet.find(spec, run), bases.get((size, spec.image_size))
        if row is None or row["status"] != "oom" or family == BASIS or basis is None:
            continue
        batch_size = spec.batch_size // 2
        while batch_size:
            pair = [replace(each, batch_size=batch_size) for each in (spec, basis)]
            todo = [each for each in pair if sheet.find(each, run) is None]
            if not schedule.fits(todo):
                schedule.left_out += todo
                break
            for each in todo:
                _measure(each, sheet, schedule, run, f"pair at batch {batch_size}", find_share)
            if all((sheet.find(each, run) or {}).get("status") == "ok" for each in pair):
                break
            batch_size //= 2


def share_finder(*, dtype: str, device: str) -> FindShare:
    """Return a function that gives rows their `op_share_of_copy_percent`: `op_rate.measure_share` of their family.

    It is None for a family without such an operator. A share is measured and printed when it is asked for the first
    time, then cached; one that fails is None, too.
    """

    @cache
    def find_share(family: str | None, batch_size: int) -> float | None:
        if family not in RATED_OPERATORS:
            return None
        try:
            share = measure_share(family, batch_size=batch_size, dtype=dtype, device=device)
        except RuntimeError as error:  # out of memory, or no kernel
            said = next(iter(str(error).strip().splitlines()), "no message")
            print(f"the operator of {family} at batch {batch_size}: not measured: {said}", flush=True)
            return None
        print(f"the operator of {family} at batch {batch_size}: {share:.0f} % of the bandwidth of a copy", flush=True)
        return share

    return find_share


def _format_row(spec: RowSpec, row: Mapping[str, Any]) -> str:
    """Format a row of a sheet as a line."""
    if row["status"] != "ok":
        return f"{spec.row_id}: {row['status']} ({row['reason']})"
    memory = f", peak {row['peak_memory_mib']:.0f} MiB" if row["peak_memory_mib"] is not None else ""
    return f"{spec.row_id}: {row['latency_ms']:.1f} ms, {row['throughput_img_per_s']:.2f} img/s{memory}"


def _format_remaining(seconds: float | None) -> str:
    """Format the expected time as the end of a phrase; empty if it is unknown."""
    if seconds is None:
        return ""
    return f", at most {seconds / 60:.0f} min left" if seconds >= 60 else f", {seconds:.0f} s left"


def _measure(
    spec: RowSpec,
    sheet: Sheet,
    schedule: RowSchedule,
    run: int,
    progress: str,
    find_share: FindShare,
    keep_failures: bool = True,
) -> None:
    """Measure a row, add it to the sheet with its share, and print it, unless the time ends before it does.

    `progress` begins the printed line; the other arguments are those of `measure_rows`.
    """
    share = find_share(find_family(vars(spec))[0], spec.batch_size)
    began = time.monotonic()
    emulation = explain_emulation(spec.dtype) if spec.device == "cpu" else None
    try:
        # a product that is emulated says nothing of the models: it would be slower than in fp32 for any of them
        row = unmeasured_row(spec, EMULATED, emulation) if emulation else measure(schedule.limit(spec))
    except RuntimeError as error:
        if not keep_failures:
            raise RunError(f"efficiency: {error}") from None
        # one failed row must not end an hour of measuring
        row = unmeasured_row(spec, "failed", str(error).removeprefix(f"{spec.row_id}: "))
    if schedule.note(spec, row, time.monotonic() - began):
        print(
            f"[{progress}] {_format_row(spec, sheet.add(spec, run, {**row, 'op_share_of_copy_percent': share}))}",
            flush=True,
        )
