"""The one loop that measures rows: in order, within a time limit, reusing the rows that a store holds; and their table."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.csvfile import write_csv
from ..core.errors import RunError, UserError, blame
from ..core.freshness import hash_row
from ..core.noise import describe_noise, find_spread, mark_noise
from ..core.record import installed_version
from .flops import cost
from .op_rate import OPERATORS, measure_gate
from .speed import RowSpec, measure, unmeasured_row
from .sweep import GROUP_KEYS, RowSchedule, row_key

COLUMNS = tuple(
    "row model attention image_size batch_size dtype mode compile device backend attention_kernel status noisy throughput_img_per_s "
    "latency_ms latency_ms_low latency_ms_high peak_memory_mib num_params macs_g run".split()
)
MOST_ATTEMPTS = 3  # so often a noisy row is measured, the first time included

# the keys of a stored row by which it is found and sorted
ROW_KEYS = (
    "row",
    "model",
    "options",
    "attention",
    "image_size",
    *GROUP_KEYS,
    "device",
    "run",
    "code_hash",
    "torch_version",
)


class RowStore:
    """The measured rows of the device of a label, with their noise; the sources in the checkout at `root` determine
    which are still valid.

    Args:
        rows: those of earlier calls, as `add` completes them.
        save: called with the store after every change.
    """

    def __init__(
        self,
        root: Path,
        device: str,
        rows: Sequence[Mapping[str, Any]] = (),
        save: Callable[["RowStore"], None] = lambda store: None,
    ):
        self.rows, self._root, self._device, self._save = mark_noise(rows), root, device, save
        self._torch_version = installed_version("torch")
        self._code_hashes: dict[str, str] = {}

    def find_reusable_row(self, spec: RowSpec, run: int) -> dict[str, Any] | None:
        """The row that measured the same in the same run, on this device, with the same code and the same PyTorch; None
        without one.
        """
        key = row_key(vars(spec))
        same = (row for row in self.rows if row_key(row) == key and (row["run"], row["device"]) == (run, self._device))
        valid = (
            row
            for row in same
            if (row["code_hash"], row["torch_version"]) == (self._hash_code(spec.model), self._torch_version)
        )
        return next(valid, None)

    def add(self, spec: RowSpec, row: Mapping[str, Any], run: int, attempts: int = 1) -> dict[str, Any]:
        """Put a row of `measure` in place of an older one that measured the same in the same run, save, and return it.

        The row gets `row`, its name; `device`, the label; `attempts`, how often it was measured; `noisy`, see
        `core.noise.mark_noise`; and `run`, `code_hash` and `torch_version`, by which it is found again.
        """
        provenance = {"run": run, "code_hash": self._hash_code(spec.model), "torch_version": self._torch_version}
        new = {"row": spec.row_id, **row, "device": self._device, "attempts": attempts, **provenance}
        same = (place for place, old in enumerate(self.rows) if (row_key(old), old["run"]) == (row_key(new), run))
        place = next(same, len(self.rows))
        self.rows = mark_noise([*self.rows[:place], new, *self.rows[place + 1 :]])
        self._save(self)
        return self.rows[place]

    def _hash_code(self, model: str) -> str:
        """The hash of the sources on which a row of this model depends."""
        if model not in self._code_hashes:
            self._code_hashes[model] = hash_row(self._root, model)
        return self._code_hashes[model]


def require_keys(items: Iterable[Any], keys: Iterable[str], where: str) -> None:
    """Refuse items that another version wrote: raise a UserError that names the first key that an item lacks."""
    for number, item in enumerate(items):
        for key in keys:
            if not isinstance(item, Mapping) or key not in item:
                raise UserError(f"{where}[{number}].{key}: missing; another version wrote this file, move it away")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = COLUMNS) -> None:
    """Write rows as CSV, one line each; `image_size` is the height there, and `noisy` its reasons in one text."""
    table = []
    for row in rows:
        low, high = row["latency_ms_ci95"] or (None, None)
        noisy = " ".join(row["noisy"]) or None
        table.append(
            {**row, "image_size": row["image_size"][0], "noisy": noisy, "latency_ms_low": low, "latency_ms_high": high}
        )
    write_csv(path, table, columns)


def measure_rows(
    specs: Sequence[RowSpec], store: RowStore, *, run: int = 1, budget_s: float = math.inf, keep_failures: bool = True
) -> dict[int, float]:
    """Measure every row that the store does not hold, then the noisy rows again, and print a line for each.

    Args:
        specs: the rows, those of one image size next to each other.
        store: gets each row as soon as it is measured.
        run: the number of this measurement of the rows, from 1 on.
        budget_s: wall-clock seconds; image sizes that do not fit are left out. Noisy rows are measured again in what is
            left of them, and of the row's own budget.
        keep_failures: record a row whose process broke as `failed`, instead of ending with a RunError.

    Returns:
        Side in pixels of each image size that was left out -> seconds that its rows were expected to take.

    Raises:
        UserError: a model cannot be built at its image size; this is found before anything is measured.
        RunError: a measuring process broke, and failures are not kept.
    """
    with blame("efficiency", ValueError):
        macs_g = {spec.row_id: cost(spec.model, spec.options, spec.image_size).macs_g for spec in specs}
    found = [(spec, store.find_reusable_row(spec, run)) for spec in specs]
    todo = [spec for spec, row in found if row is None]
    if len(todo) < len(specs):
        print(f"{len(specs) - len(todo)} of {len(specs)} rows are there from an earlier call", flush=True)
    end = time.monotonic() + budget_s
    schedule = RowSchedule(todo, lambda spec: macs_g[spec.row_id], budget_s)
    for spec, row in found:
        if row is not None:
            schedule.note(spec, row)
    seconds: dict[str, float] = {}  # that each row has taken
    for number, (spec, remaining_s) in enumerate(schedule, 1):
        began = time.monotonic()
        row = _measure(spec, keep_failures)
        seconds[spec.row_id] = time.monotonic() - began
        schedule.note(spec, row, seconds[spec.row_id])
        row = store.add(spec, row, run)
        print(f"[{number} of {len(todo)}{format_remaining(remaining_s)}] {format_row(spec, row)}", flush=True)
    for attempt, spec in itertools.product(range(2, MOST_ATTEMPTS + 1), specs):
        left_s = min(spec.budget_s - seconds.get(spec.row_id, 0.0), end - time.monotonic())
        if schedule.expect(spec) <= left_s:
            began = time.monotonic()
            _measure_again(replace(spec, budget_s=left_s), store, run, attempt)
            seconds[spec.row_id] = seconds.get(spec.row_id, 0.0) + time.monotonic() - began
    return schedule.left_out


def _measure_again(spec: RowSpec, store: RowStore, run: int, attempt: int) -> None:
    """Measure a row once more if it is noisy and this attempt is its next; the quieter of both measurements stays in
    the store.
    """
    before = store.find_reusable_row(spec, run)
    if before is None or not before["noisy"] or before.get("attempts", 1) != attempt - 1:
        return
    after = store.add(spec, _measure(spec, keep_failures=True), run, attempt)
    print(f"[again, {attempt} of at most {MOST_ATTEMPTS}] {format_row(spec, after)}", flush=True)
    if _rank_noise(after) >= _rank_noise(before):
        store.add(spec, before, run, attempt)


def _rank_noise(row: Mapping[str, Any]) -> tuple[bool, int, float]:
    """The lower, the quieter."""
    return row["status"] != "ok", len(row["noisy"]), find_spread(row) or 0.0


def measure_pairs(specs: Sequence[RowSpec], store: RowStore, *, run: int = 1) -> None:
    """Where a baseline ran out of memory, measure it and the Vittt of its size again, at the largest smaller batch that
    both fit.
    """
    for spec in specs:
        row = store.find_reusable_row(spec, run)
        if row is None or row["status"] != "oom" or spec.model.startswith("vittt"):
            continue
        size = spec.model.split("_")[1]
        ours = next(
            (each for each in specs if each.model.startswith(f"vittt_{size}") and each.image_size == spec.image_size),
            None,
        )
        batch_size = spec.batch_size // 2
        while ours is not None and batch_size:
            pair = [replace(each, batch_size=batch_size) for each in (spec, ours)]
            for each in pair:
                if store.find_reusable_row(each, run) is None:
                    measured = store.add(each, _measure(each, keep_failures=True), run)
                    print(f"[pair at batch {batch_size}] {format_row(each, measured)}", flush=True)
            if all(store.find_reusable_row(each, run)["status"] == "ok" for each in pair):
                break
            batch_size //= 2


def measure_gates(families: Iterable[str], *, batch_size: int, dtype: str, device: str) -> list[dict[str, Any]]:
    """`repro.bench.op_rate.measure_gate` of each of the families with an operator of this project's, and a line for
    each.
    """
    gates = []
    for family in sorted(OPERATORS.keys() & set(families)):
        gates.append(gate := measure_gate(family, batch_size=batch_size, dtype=dtype, device=device))
        verdict = (
            "" if gate["holds"] else f": below {gate['at_least_percent']} %, no ratio against {family} will be given"
        )
        print(
            f"{gate['operator']}: {gate['share_of_copy_percent']:.0f} % of the bandwidth of a copy{verdict}", flush=True
        )
    return gates


def format_row(spec: RowSpec, row: Mapping[str, Any]) -> str:
    """The line that is printed for a row of a store."""
    if row["status"] != "ok":
        return f"{spec.row_id}: {row['status']} ({row['reason']})"
    memory = f", peak {row['peak_memory_mib']:.0f} MiB" if row["peak_memory_mib"] is not None else ""
    noise = f"; {describe_noise(row)}" if row["noisy"] else ""
    return f"{spec.row_id}: {row['latency_ms']:.1f} ms, {row['throughput_img_per_s']:.2f} img/s{memory}{noise}"


def format_remaining(seconds: float | None) -> str:
    """The expected time as the end of a phrase; empty where it is unknown."""
    if seconds is None:
        return ""
    return f", at most {seconds / 60:.0f} min left" if seconds >= 60 else f", {seconds:.0f} s left"


def _measure(spec: RowSpec, keep_failures: bool) -> dict[str, Any]:
    try:
        return measure(spec)
    except RuntimeError as error:
        if not keep_failures:
            raise RunError(f"efficiency: {error}") from None
        # one row less must not end an hour of measuring
        return unmeasured_row(spec, "failed", str(error).removeprefix(f"{spec.row_id}: "))
