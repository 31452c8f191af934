"""The one store of rows that are timed, and the loop that measures rows of models: in order, within a time limit."""

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ..core.csvfile import write_csv
from ..core.errors import RunError, blame
from ..core.noise import describe_noise, find_spread, mark_noise
from ..core.record import find_commit, installed_version
from .flops import cost
from .op_rate import OPERATORS, measure_gate
from .speed import RowSpec, measure, unmeasured_row
from .sweep import BASIS, GROUP_KEYS, RowSchedule, find_family, row_key

COLUMNS = tuple(
    "row model attention image_size batch_size dtype mode compile device backend attention_kernel status noisy throughput_img_per_s "
    "latency_ms latency_ms_low latency_ms_high peak_memory_mib num_params macs_g run".split()
)
MOST_ATTEMPTS = 3  # so often a noisy row is measured, the first time included
# the keys of a stored row of a model by which it is found and sorted
ROW_KEYS = ("row", "model", "options", "attention", "image_size", *GROUP_KEYS, "device", "run")
ROW_KEYS += ("commit", "torch_version")

Row = Mapping[str, Any]


class RowStore:
    """The rows of a record: each is found by what it measures, and valid where and with the code that measured it.

    As a context, it saves what there is at the end, also where the work is interrupted.

    Args:
        rows: what a row measures -> the row, as earlier calls left them.
        provenance: what a row measures -> the fields that say where and by which code it would be measured now.
        save: called with the store after a change, at most every `every_s` seconds.
        mark: rows -> the same rows with their noise.
    """

    def __init__(
        self,
        rows: Mapping[Hashable, Row],
        provenance: Callable[[Any], Row],
        save: Callable[[Self], None] = lambda store: None,
        mark: Callable[[Iterable[Row]], list[dict[str, Any]]] = mark_noise,
        every_s: float = 0.0,
    ):
        self._rows, self._provenance, self._save, self._mark = dict(rows), provenance, save, mark
        self._every_s, self._saved = every_s, time.monotonic()
        self._update()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, those of other commits among them, in the order in which they came."""
        return list(self._rows.values())

    def items(self) -> list[tuple[Any, dict[str, Any]]]:
        """What each row measures, and the row."""
        return list(self._rows.items())

    def find(self, what: Hashable) -> dict[str, Any] | None:
        """The row that measures this; None where there is none, or where it was made elsewhere or by other code."""
        row = self._rows.get(what)
        return row if row is not None and self._provenance(what).items() <= row.items() else None

    def add(self, what: Hashable, row: Row) -> dict[str, Any]:
        """Put a row in place of an older one that measures the same, save, and return it with its provenance and noise."""
        self._rows[what] = {**row, **self._provenance(what)}
        self._update()
        if time.monotonic() - self._saved >= self._every_s:
            self.save()
        return self._rows[what]

    def list_old(self) -> list[Any]:
        """What the rows measure that `find` does not find: those made elsewhere or by other code."""
        return [what for what in self._rows if self.find(what) is None]

    def forget(self, gone: Iterable[Hashable]) -> None:
        """Remove rows, which need not be there."""
        for what in gone:
            self._rows.pop(what, None)

    def save(self) -> None:
        """Save now."""
        self._save(self)
        self._saved = time.monotonic()

    def _update(self) -> None:
        self._rows = dict(zip(self._rows, self._mark(self._rows.values()), strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self.save()


def open_model_rows(
    root: Path, device: str, rows: Sequence[Row] = (), save: Callable[[RowStore], None] = lambda store: None
) -> RowStore:
    """A store of rows of models, each found by (`row_key`, run); `device` is the label of where they are measured.

    A row is valid with the PyTorch, and at the commit of the checkout at `root`, that measured it.
    """
    here = {"device": device, "torch_version": installed_version("torch"), "commit": find_commit(root) or "not in Git"}
    return RowStore({(row_key(row), row["run"]): row for row in rows}, lambda what: here | {"run": what[1]}, save)


def write_rows(path: Path, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> None:
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
        store: gets each row as soon as it is measured; see `open_model_rows`.
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
    found = [(spec, find_row(store, spec, run)) for spec in specs]
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
        _add(store, spec, run, row, f"{number} of {len(todo)}{format_remaining(remaining_s)}")
    for attempt, spec in itertools.product(range(2, MOST_ATTEMPTS + 1), specs):
        left_s = min(spec.budget_s - seconds.get(spec.row_id, 0.0), end - time.monotonic())
        if schedule.expect(spec) <= left_s:
            began = time.monotonic()
            _measure_again(replace(spec, budget_s=left_s), store, run, attempt)
            seconds[spec.row_id] = seconds.get(spec.row_id, 0.0) + time.monotonic() - began
    return schedule.left_out


def find_row(store: RowStore, spec: RowSpec, run: int) -> dict[str, Any] | None:
    """The valid row of a spec in a run, see `open_model_rows`; None without one."""
    return store.find((row_key(vars(spec)), run))


def _add(store: RowStore, spec: RowSpec, run: int, row: Row, progress: str, attempts: int = 1) -> dict[str, Any]:
    """Put a measured row into the store and print its line."""
    added = store.add((row_key(vars(spec)), run), {"row": spec.row_id, **row, "attempts": attempts})
    print(f"[{progress}] {format_row(spec, added)}", flush=True)
    return added


def _measure_again(spec: RowSpec, store: RowStore, run: int, attempt: int) -> None:
    """Measure a noisy row again if this attempt is its next; the quieter of both stays in the store."""
    before = find_row(store, spec, run)
    if before is None or not before["noisy"] or before.get("attempts", 1) != attempt - 1:
        return
    measured = _measure(spec, keep_failures=True)
    after = _add(store, spec, run, measured, f"again, {attempt} of at most {MOST_ATTEMPTS}", attempt)
    if _rank_noise(after) >= _rank_noise(before):
        store.add((row_key(vars(spec)), run), {**before, "attempts": attempt})


def _rank_noise(row: Row) -> tuple[bool, int, float]:
    """The lower, the quieter."""
    return row["status"] != "ok", len(row["noisy"]), find_spread(row) or 0.0


def measure_pairs(specs: Sequence[RowSpec], store: RowStore, *, run: int = 1) -> None:
    """Measure a model that ran out of memory, and the basis of its size, at the largest smaller batch that both fit."""
    placed = [(*find_family(vars(spec)), spec) for spec in specs]
    bases = {(size, spec.image_size): spec for family, size, spec in placed if family == BASIS}
    for family, size, spec in placed:
        row, basis = find_row(store, spec, run), bases.get((size, spec.image_size))
        if row is None or row["status"] != "oom" or family == BASIS or basis is None:
            continue
        batch_size = spec.batch_size // 2
        while batch_size:
            pair = [replace(each, batch_size=batch_size) for each in (spec, basis)]
            for each in pair:
                if find_row(store, each, run) is None:
                    _add(store, each, run, _measure(each, keep_failures=True), f"pair at batch {batch_size}")
            if all(find_row(store, each, run)["status"] == "ok" for each in pair):
                break
            batch_size //= 2


def measure_gates(families: Iterable[str], *, batch_size: int, dtype: str, device: str) -> list[dict[str, Any]]:
    """`repro.bench.op_rate.measure_gate` of each family with an operator of this project's, and a line for each."""
    gates = []
    for family in sorted(OPERATORS.keys() & set(families)):
        gates.append(gate := measure_gate(family, batch_size=batch_size, dtype=dtype, device=device))
        line = f"{gate['operator']}: {gate['share_of_copy_percent']:.0f} % of the bandwidth of a copy"
        if not gate["holds"]:
            line += f": below {gate['at_least_percent']} %, no ratio against {family} will be given"
        print(line, flush=True)
    return gates


def format_row(spec: RowSpec, row: Row) -> str:
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
