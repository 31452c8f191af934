"""`repro efficiency` with options: families, sizes and resolutions on this machine, into results/measured/<device>/.

Nothing here is an output of the graph. Rows are written as they come; a call that was stopped, or asks for more, continues.
"""

import csv
import dataclasses
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from repro.core.errors import Interrupted, RunError, UserError
from repro.core.hashing import hash_files, import_closure
from repro.core.paths import Paths
from repro.core.record import make_identity, read_json, versions, write_record, write_text
from repro.core.runtime import Runtime, choose_device, device_label, device_slug

COLUMNS = (
    "row",
    "model",
    "attention",
    "side",
    "batch",
    "dtype",
    "mode",
    "compile",
    "device",
    "backend",
    "attention_kernel",
    "status",
    "throughput_img_per_s",
    "latency_ms",
    "latency_ms_low",
    "latency_ms_high",
    "peak_memory_mib",
    "params",
    "macs_g",
    "run",
)
# of the bandwidth of a copy, before a ratio against the operator's family is given
LEAST_SHARE_PERCENT = {"cpu": 20, "cuda": 30}
ON_CPU = {"sizes": ("T",), "batch": 1, "dtype": "fp32", "minutes": 10.0}
ON_GPU = {"sizes": ("T", "S", "B"), "batch": 64, "dtype": "bf16", "minutes": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is asked for; None takes the device's default (see `ON_CPU`, `ON_GPU`).

    Args:
        resolutions: sides of the square image in pixels.
        families: of `repro.measure.sweep.FAMILIES`.
        sizes: of T, S, B.
        batch: images per step, never changed silently.
        dtype: weights and inputs are cast to it.
        mode, compile: see `repro.measure.speed.RowSpec`.
        minutes: for all rows; what does not fit is left out, and said.
        runs: how often each row is measured, each time in a process of its own.
    """

    resolutions: tuple[int, ...]
    families: tuple[str, ...]
    sizes: tuple[str, ...] | None = None
    batch: int | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    mode: Literal["infer", "train"] = "infer"
    compile: bool = False
    minutes: float | None = None
    runs: int = 1
    steps: int = 10
    warmup: int = 2
    budget_s: float = 600.0

    def on(self, device_type: str) -> "Sweep":
        """With the defaults of a device in place of None."""
        defaults = ON_CPU if device_type == "cpu" else ON_GPU
        return dataclasses.replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


def run(asked: Sweep, paths: Paths, runtime: Runtime) -> None:
    """Measure what is not measured yet, and write efficiency.{json,csv} and efficiency/*.{png,svg}.

    metrics: `rows`, see repro.measure.speed.measure, each with `row`, `device`, `code` (a hash of what determines it) and `run`;
    `left_out`; `gates`, a list of what `_gates` found at each batch and dtype; `compared`, `growth` and `repeated`, see `conclude`.

    Raises:
        UserError: a model or device that is not there. Interrupted: Ctrl-C; the rows that are done are kept.
        RunError: no row could be measured.
    """
    from repro.measure import sweep
    from repro.measure.flops import cost

    started = time.monotonic()
    device = choose_device(runtime.device)
    asked = asked.on(device.type)
    label = device_label(device, runtime.threads)
    shared = {"batch": asked.batch, "dtype": asked.dtype, "device": device.type, "mode": asked.mode, "compile": asked.compile}
    shared |= {"steps": asked.steps, "warmup": asked.warmup, "budget_s": asked.budget_s, "threads": runtime.threads}
    specs = sweep.specs_of(asked.families, asked.sizes, asked.resolutions, **shared)
    try:
        macs = {spec.row_id: cost(spec.model, spec.options, spec.resolution).macs_g for spec in specs}
    except ValueError as error:
        raise UserError(f"efficiency: {error}") from None
    store = _Store(paths, device_slug(device), label, asked, started)
    if runtime.threads:
        import torch

        torch.set_num_threads(runtime.threads)
    numbers = range(1, asked.runs + 1)
    new = {spec.model.split("_")[0] for spec in specs if not all(store.good(spec, number) for number in numbers)}
    store.gates = [*_gates(asked, device.type, new), *store.gates]
    store.gates = list({(gate["family"], gate["batch"], gate["dtype"]): gate for gate in reversed(store.gates)}.values())
    try:
        for number in numbers:
            _measure_all(specs, lambda spec: macs[spec.row_id], number, asked, store)
            _measure_pairs(specs, number, store)
    except KeyboardInterrupt:
        raise Interrupted(2, f"{len(store.rows)} rows are kept in {store.file}; the same command continues") from None
    finally:
        if store.rows:
            store.write()
            _draw(store)
    if not store.rows:
        raise RunError("efficiency: nothing was measured")
    print("\n".join(store.summary()))


class _Store:
    """The rows of a device: those of earlier calls, those that are still good, and the new ones."""

    def __init__(self, paths: Paths, slug: str, label: str, asked: Sweep, started: float):
        self.paths, self.label, self.asked, self.started = paths, label, asked, started
        self.folder = paths.measured(slug)
        self.file = self.folder / "efficiency.json"
        before = read_json(self.file)["metrics"] if self.file.is_file() else {"rows": [], "gates": []}
        self.rows: list[dict[str, Any]] = before["rows"]
        self.gates: list[dict[str, Any]] = before["gates"]
        self.left_out: list[dict[str, Any]] = []
        self._versions = versions()
        self._codes: dict[str, str] = {}

    def code(self, model: str) -> str:
        """A hash of the sources that a row of this model depends on."""
        from repro.models.registry import family_module

        module = family_module(model)
        if module not in self._codes:
            # each family is found by lying in repro.models, but only its own module shapes its rows
            files = import_closure(self.paths.root, ["repro.measure.speed", *([module] if module.startswith("repro.") else [])])
            self._codes[module] = hash_files(self.paths.root, files)
        return self._codes[module]

    def good(self, spec: Any, number: int) -> dict[str, Any] | None:
        """The row of an earlier call that measures the same, of the same code on the same versions and as many threads."""
        from repro.measure.sweep import key_of, spec_key

        wanted = spec_key(spec)
        same = (row for row in self.rows if key_of(row) == wanted and (row["run"], row["device"]) == (number, self.label))
        fresh = (row for row in same if row["code"] == self.code(spec.model) and row["versions"] == self._versions["torch"])
        return next(fresh, None)

    def add(self, spec: Any, row: Mapping[str, Any], number: int) -> None:
        """Put a row in place of an older one of the same measurement, and write."""
        from repro.measure.sweep import key_of

        new = {"row": spec.row_id, **row, "device": self.label, "code": self.code(spec.model), "run": number}
        new["versions"] = self._versions["torch"]
        kept = [old for old in self.rows if (key_of(old), old["run"]) != (key_of(new), number)]
        self.rows = sorted(
            [*kept, new], key=lambda r: (r["run"], r["mode"], r["compile"], r["dtype"], r["batch"], r["resolution"], r["row"])
        )
        self.write()

    def write(self) -> None:
        """The record and the table, whole."""
        write_text(self.folder / "efficiency.csv", rows_csv(self.rows))
        metrics = {"rows": self.rows, "left_out": self.left_out, "gates": self.gates, **conclude(self.rows, self.gates)}
        backends = sorted({row["backend"] for row in self.rows if row["status"] == "ok"})
        identity = make_identity(
            self.paths.root,
            ["stages.efficiency_sweep"],
            self.asked,
            device=self.label,
            dtype=self.asked.dtype,
            backend=", ".join(backends) or "none",
        )
        write_record(self.folder, metrics, identity, time.monotonic() - self.started, name="efficiency")

    def summary(self) -> list[str]:
        """What a person wants to know at the end."""
        lines = [f"{len(self.rows)} rows in {self.file.relative_to(self.paths.root)}"]
        for each in self.left_out:
            lines.append(f"left out: {each['side']}², expected to take {each['expected_s']:.0f} s; --minutes gives more time")
        return lines


def _measure_all(specs: Sequence[Any], macs_g: Callable[[Any], float], number: int, asked: Sweep, store: _Store) -> None:
    from repro.measure.sweep import Plan

    done = [(spec, row) for spec in specs if (row := store.good(spec, number))]
    if done:
        print(f"{len(done)} of {len(specs)} rows are there from an earlier call", flush=True)
    todo = [spec for spec in specs if not store.good(spec, number)]
    plan = Plan(todo, macs_g, None if asked.minutes is None else 60 * asked.minutes / asked.runs)
    for spec, row in done:
        plan.note(spec, row)
    for place, (spec, left_s) in enumerate(plan, 1):
        began = time.monotonic()
        row = _measured(spec)
        plan.note(spec, row, time.monotonic() - began)
        store.add(spec, row, number)
        left = "" if left_s is None else f", at most {left_s / 60:.0f} min left" if left_s >= 60 else f", {left_s:.0f} s left"
        print(f"[{place} of {len(todo)}{left}] {line(row, spec.row_id)}", flush=True)
    store.left_out = [{"side": side, "expected_s": seconds} for side, seconds in {s.resolution[0]: e for s, e in plan.left_out}.items()]


def _measure_pairs(specs: Sequence[Any], number: int, store: _Store) -> None:
    """Where a baseline runs out of memory: it and Vittt of its size again, at the largest smaller batch that both fit."""
    for spec in specs:
        row = store.good(spec, number)
        if row is None or row["status"] != "oom" or spec.model.startswith("vittt"):
            continue
        size = spec.model.split("_")[1]
        ours = next((other for other in specs if other.model.startswith(f"vittt_{size}") and other.resolution == spec.resolution), None)
        batch = spec.batch // 2
        while ours is not None and batch:
            pair = [dataclasses.replace(each, batch=batch) for each in (spec, ours)]
            for each in pair:
                if store.good(each, number) is None:
                    store.add(each, found := _measured(each), number)
                    print(f"[pair at batch {batch}] {line(found, each.row_id)}", flush=True)
            if all(store.good(each, number)["status"] == "ok" for each in pair):
                break
            batch //= 2


def _measured(spec: Any) -> dict[str, Any]:
    from repro.measure.speed import measure, unmeasured

    try:
        return measure(spec)
    except RuntimeError as error:  # one row less, and not the end of an hour's measuring
        return unmeasured(spec, "failed", str(error))


def _draw(store: _Store) -> None:
    """Fig. 6 and the panels of Fig. 1, for each size of each batch, dtype, mode and compilation that was measured."""
    from repro.core.figures import LABELS, against_resolution, at_largest
    from repro.measure.sweep import FAMILIES, SIZES

    first = [row for row in store.rows if row["run"] == 1]
    for batch, dtype, mode, compiled in dict.fromkeys((row["batch"], row["dtype"], row["mode"], row["compile"]) for row in first):
        own = [row for row in first if (row["batch"], row["dtype"], row["mode"], row["compile"]) == (batch, dtype, mode, compiled)]
        for letter, size in SIZES.items():
            series = {
                family: rows
                for family, (pattern, attention) in FAMILIES.items()
                if (rows := [row for row in own if (row["model"], row["attention"]) == (pattern.format(size), attention)])
            }
            sides = {row["resolution"][0] for rows in series.values() for row in rows}
            if len(sides) < 2:
                continue
            about = f"{store.label}, batch {batch}, {dtype}, {mode}{', compiled' if compiled else ''}"
            name = f"{letter}_batch{batch}_{dtype}_{mode}{'_compiled' if compiled else ''}"
            against_resolution(store.folder / "efficiency" / f"fig6_{name}", series, f"size {letter}: {about}")
            bars: dict[str, dict[str, float]] = {}
            for family, rows in series.items():
                for row in rows:
                    if row["resolution"][0] == max(sides):
                        for key in LABELS:
                            if row[key] is not None:
                                bars.setdefault(key, {})[family] = row[key]
            at_largest(store.folder / "efficiency" / f"fig1_{name}", bars, f"size {letter} at {max(sides)}²: {about}")


def _gates(asked: Sweep, device_type: str, families: set[str]) -> list[dict[str, Any]]:
    """For each of the families with an operator of this project's: whether that is fast enough for a fair comparison.

    Each is {family, batch, dtype, holds, at_least_percent} and what `repro.measure.op_rate.share_of_copy` returns.
    """
    from repro.measure.op_rate import OPERATORS, share_of_copy

    limit = LEAST_SHARE_PERCENT[device_type]
    gates = []
    for family in sorted(families & OPERATORS.keys()):
        found = share_of_copy(family, batch=asked.batch, device=device_type, dtype=asked.dtype)
        holds = found["share_of_copy_percent"] >= limit
        about = {"family": family, "batch": asked.batch, "dtype": asked.dtype}
        gates.append({**about, **found, "at_least_percent": limit, "holds": holds})
        verdict = "" if holds else f": below {limit} %, no ratio against {family} is given"
        print(f"{found['operator']}: {found['share_of_copy_percent']:.0f} % of the bandwidth of a copy{verdict}", flush=True)
    return gates


def conclude(rows: Sequence[Mapping[str, Any]], gates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What rows say together; only rows of one batch, dtype, mode and compilation are set against each other.

    Returns:
        `compared`: a list of {batch, dtype, mode, compile, size, against, side, speedup, memory_saved_percent, crossover,
        crossover_side}, Vittt against each other family at the largest side where both ran; null with a reason where there is no
        such side, or where the family's side of the comparison is not known to be as fast as it should be. `growth`: a list of
        {.., model, attention, sides, macs_exponent, latency_exponent, memory_exponent, latency_1280_over_640}: quantity ~ tokens
        to this power, from 512 pixels on. `repeated`: {rows, overlap_percent} of what was measured twice.
    """
    from repro.measure.sweep import FAMILIES, SIZES, crossover, exponent, overlap_percent

    first = [row for row in rows if row["run"] == 1]
    names = ("batch", "dtype", "mode", "compile")
    groups = list(dict.fromkeys(tuple(row[name] for name in names) for row in first))
    compared, growth = [], []
    for group in groups:
        about = dict(zip(names, group, strict=True))
        own = [row for row in first if all(row[name] == value for name, value in about.items())]
        for letter, size in SIZES.items():
            by_family = {
                family: [row for row in own if (row["model"], row["attention"]) == (pattern.format(size), attention)]
                for family, (pattern, attention) in FAMILIES.items()
            }
            ours = by_family.pop("vittt")
            for family, theirs in by_family.items():
                if ours and theirs:
                    compared.append({**about, "size": letter, "against": family, **_compare(family, ours, theirs, gates, crossover)})
        for model, attention in dict.fromkeys((row["model"], row["attention"]) for row in own):
            ok = {row["resolution"][0]: row for row in own if (row["model"], row["attention"], row["status"]) == (model, attention, "ok")}
            large = {side: row for side, row in ok.items() if side >= 512}
            found: dict[str, Any] = {**about, "model": model, "attention": attention or "none", "sides": sorted(large)}
            for name, key in (("macs", "macs_g"), ("latency", "latency_ms"), ("memory", "peak_memory_mib")):
                found[f"{name}_exponent"] = exponent({side: row[key] for side, row in large.items() if row[key] is not None})
            found["latency_1280_over_640"] = ok[1280]["latency_ms"] / ok[640]["latency_ms"] if {640, 1280} <= ok.keys() else None
            if None in found.values():
                found["reason"] = "too few sides were measured"
            growth.append(found)
    again = [row for row in rows if row["run"] == 2]
    share = overlap_percent(first, again)
    repeated = {
        "rows": len(again),
        "overlap_percent": share,
        **({"reason": "nothing was measured twice; --runs 2"} if share is None else {}),
    }
    return {"compared": compared, "growth": growth, "repeated": repeated}


def _compare(
    family: str, ours: Sequence[Mapping], theirs: Sequence[Mapping], gates: Sequence[Mapping[str, Any]], crossover: Callable
) -> dict[str, Any]:
    from repro.measure.op_rate import OPERATORS

    good = [{row["resolution"][0]: row for row in rows if row["status"] == "ok"} for rows in (ours, theirs)]
    both = good[0].keys() & good[1].keys()
    empty = dict.fromkeys(("side", "speedup", "memory_saved_percent", "crossover", "crossover_side"))
    about = family, theirs[0]["batch"], theirs[0]["dtype"]
    gate = next((gate for gate in gates if (gate["family"], gate["batch"], gate["dtype"]) == about), None)
    if gate is None and family in OPERATORS:
        return {**empty, "reason": "how fast its operator is was not measured at this batch and dtype"}
    if gate is not None and not gate["holds"]:
        what = f"{gate['operator']} reaches {gate['share_of_copy_percent']:.0f} % of the bandwidth of a copy"
        return {**empty, "reason": f"{what}, {gate['at_least_percent']} % are asked for before a ratio is given"}
    if family == "deit_fused" and any(row["attention_kernel"] == "none" for row in good[1].values()):
        return {**empty, "reason": "PyTorch did not take a fused attention kernel for it"}
    if not both:
        return {**empty, "reason": "there is no side at which both ran"}
    side = max(both)
    a, b = good[0][side], good[1][side]
    saved = None if None in (a["peak_memory_mib"], b["peak_memory_mib"]) else 100 * (1 - a["peak_memory_mib"] / b["peak_memory_mib"])
    relation, where = crossover(*({each: rows[each]["latency_ms"] for each in both} for rows in good))
    found = {"side": side, "speedup": b["latency_ms"] / a["latency_ms"], "memory_saved_percent": saved}
    found |= {"crossover": relation, "crossover_side": where}
    if where is None:
        found["crossover_side_reason"] = f"{relation} faster among the measured sides"
    if saved is None:
        found["memory_saved_percent_reason"] = "a peak is not known"
    return found


def line(row: Mapping[str, Any], name: str) -> str:
    """A row as it is printed."""
    if row["status"] != "ok":
        return f"{name}: {row['status']} ({row['reason']})"
    memory = f", peak {row['peak_memory_mib']:.0f} MiB" if row["peak_memory_mib"] is not None else ""
    return f"{name}: {row['latency_ms']:.1f} ms, {row['throughput_img_per_s']:.2f} img/s{memory}"


def rows_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = COLUMNS) -> str:
    """Rows as a table, one line each."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        low, high = row["latency_ms_ci95"] or (None, None)
        writer.writerow({**row, "side": row["resolution"][0], "latency_ms_low": low, "latency_ms_high": high})
    return stream.getvalue()
