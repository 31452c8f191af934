"""Correctness and speed of the Triton kernels: `repro kernels check` and `bench`.

Each row is written as soon as it is measured. The next call continues one that was cut short, and repeats a complete
one.
"""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..core.children import ask
from ..core.csvfile import read_typed_csv, write_csv
from ..core.errors import RunError, UserError, did_you_mean
from ..core.paths import Paths
from ..core.record import installed_version, label_commit
from ..core.runtime import device_label, device_slug, usable_cores
from ..core.ui import print_table
from .lanes import run_in_lanes
from .unfinished import Unfinished, read_clock

Row = dict[str, Any]
_LANES = 8  # the most processes that check at once
_WHERE = ("device", "commit", "torch", "triton", "measured")
_CHECK_COLUMNS = (*"operator backend checks failed not_run failures nearest error limit".split(), *_WHERE)
CHECK_TYPES = {"checks": int, "failed": int, "not_run": int, "error": float, "limit": float}
_BENCH_NUMBERS = tuple(
    "median_ms p20_ms p80_ms gb_per_s tflop_per_s share_of_copy_percent peak_memory_mib gflop".split()
)
_BENCH_COLUMNS = (*"operator implementation passes sizes dtype status samples bytes".split(), *_BENCH_NUMBERS)
_BENCH_COLUMNS += ("reason", "peer_version", *_WHERE)
# key of a size in a row -> its name in a printed line
_PRINTED = {"tokens": "T", "heads": "heads", "head_dim": "D", "levels": "levels", "chunk_size": "chunk"}
_PRINTED |= {"channels": "channels", "state_dim": "states"}
_BENCH_TYPES = dict.fromkeys(_BENCH_NUMBERS, float) | {"samples": int, "bytes": int, "sizes": json.loads}


def check_kernels(
    paths: Paths,
    op: str | None = None,
    minutes: float | None = None,
    *,
    began: str | None = None,
    first: int | None = None,
) -> bool:
    """Check the kernels of one operator, or of all; write a line for each to results/speed/checks/<device>.csv.

    Args:
        op: the operator; None: all of them.
        minutes: no check begins after this time.
        began: operators checked since this time (`read_clock`) are not checked again, unless a check failed at another
            commit; None: the start of the unfinished call, if there is one.
        first: the number of checks of each operator to make; the next call continues with the others. None: all.

    Returns:
        Whether all checks that were asked for are made.

    Raises:
        UserError: no such operator, or kernels that cannot run here.
        RunError: a check failed.
    """
    chosen = _find_operators(op)
    import torch

    from kernels.tools import check, operators

    device, deadline = torch.device("cuda" if torch.cuda.is_available() else "cpu"), _deadline(minutes)
    try:
        for cases in chosen:
            cases.op.selected_backend("triton", device)
    except ValueError as error:
        raise UserError(f"kernels check: {error}; on a CPU run TRITON_INTERPRET=1 repro kernels check") from None
    name = f"checks/{device_slug(device)}{'_interpreted' * operators.INTERPRETED}"
    # a call for one operator leaves an unfinished one for all as it is
    path, state = paths.speed / f"{name}.csv", Unfinished(paths, f"{name}_{op}" if op else name)
    lines = {line["operator"]: line for line in read_typed_csv(path, CHECK_TYPES)}
    since = began or state.began
    unfinished = []
    for cases in chosen:
        line = lines.get(cases.NAME)
        if _is_since(line, since) and (not line["failed"] or line["commit"] == label_commit(paths.root)):
            continue
        rows = _check_operator(cases, device, state, deadline, first)
        made = state.kept[cases.NAME].values()
        if first is not None and (failures := [row for row in made if row["passed"] is False]):
            raise RunError(f"kernels check: {format_check(failures[0])}")
        if rows is None:
            if first is None or len(made) < first:
                unfinished.append(cases.NAME)
            continue
        backend = f"triton{', interpreted' * operators.INTERPRETED}"
        lines[cases.NAME] = _describe_place(paths, device) | {"backend": backend} | _summarise_checks(rows)
        ordered = [lines[each] for each in operators.OPERATORS if each in lines]
        write_csv(path, ordered, _CHECK_COLUMNS)
        state.kept.pop(cases.NAME)
        state.save()
        check.draw_case.cache_clear()
    if unfinished:
        print(f"time is up: the next call continues with {', '.join(unfinished)}")
        return False
    if first is not None:
        return True
    state.finish()
    failed, made = (sum(lines[cases.NAME][key] for cases in chosen) for key in ("failed", "checks"))
    if failed:
        raise RunError(f"kernels check: {failed} of {made} checks failed, see {path}")
    print(f"{made} checks, none failed: {path.relative_to(paths.root)}")
    return True


def _check_operator(cases: Any, device: Any, state: Unfinished, deadline: float, first: int | None) -> list[Row] | None:
    """Make the checks of an operator that earlier calls did not; return all rows, or None if the time ended before.

    Rows of earlier calls are kept by the check's number in `check.planned`, whatever code made them. After an edit of
    kernels or checks, remove the state in .runs/measuring/checks; the worker's `_list_checks` must keep the numbers.
    """
    from kernels.tools import check

    planned, rows = list(check.planned(cases, device)), state.kept.setdefault(cases.NAME, {})
    todo = [number for number in range(len(planned))[:first] if str(number) not in rows]

    def died(number: int) -> Row:
        return {
            "operator": cases.NAME,
            "check": f"number {number}",
            "reason": "its process was killed",
            "passed": False,
        }

    if device.type == "cuda":
        lanes = min(_LANES, usable_cores())
        made = run_in_lanes(todo, partial(_check_one, cases.NAME), lanes, died, lambda: _left(deadline) <= 0)
    else:
        made = ((number, check.check_one(cases, *planned[number])) for number in todo if _left(deadline) > 0)
    for number, row in made:
        rows[str(number)] = row
        state.save()
        print(format_check(row), flush=True)
    return [rows[str(number)] for number in range(len(planned))] if len(rows) == len(planned) else None


def _summarise_checks(rows: Sequence[Row]) -> Row:
    """Summarise an operator's checks in a line: their number, the failed ones, and the error nearest to its limit."""
    failures = [row["check"] for row in rows if row["passed"] is False]
    shares = [
        (error / row["limits"][name], f"{name} in {row['check']}, {row['dtype']}", error, row["limits"][name])
        for row in rows
        for name, error in row.get("errors", {}).items()
    ]
    _, nearest, error, limit = max(shares, default=(0.0, None, None, None), key=lambda share: share[0])
    line = {"operator": rows[0]["operator"], "checks": len(rows), "failed": len(failures)}
    line |= {"not_run": sum(row["passed"] is None for row in rows), "failures": "; ".join(failures) or None}
    return line | {"nearest": nearest, "error": error, "limit": limit}


def format_check(row: Mapping[str, Any]) -> str:
    """Format a row of `check.check_one`: the verdict, the check, and the error nearest to its limit."""
    verdict = {True: "ok", False: "FAILED", None: "not run"}[row["passed"]]
    detail = f", {_sizes(row)}, {row['dtype']}" if "tokens" in row else ""  # a check that raised an error has no sizes
    if row.get("errors"):
        name, error = max(row["errors"].items(), key=lambda item: item[1] / row["limits"][item[0]])
        detail += f", nearest its limit: {name} {error:.1e} of {row['limits'][name]:.0e}"
    if row.get("not_finite"):
        detail += f", not finite: {', '.join(row['not_finite'])}"
    if row.get("reason"):
        detail += f", {row['reason']}"
    return f"{verdict}: {row['operator']}, {row['check']}{detail}"


def _sizes(row: Mapping[str, Any]) -> str:
    """Write the sizes that a row of any operator has, as `T 196, D 64`."""
    return ", ".join(f"{printed} {row[key]}" for key, printed in _PRINTED.items() if key in row)


def _check_one(op: str, number: int) -> tuple[Row, bool]:
    """Run a check in a worker process; return its row, and whether the process has lost its GPU context."""
    import torch

    from kernels import triton_launch
    from kernels.tools import check, operators

    triton_launch.KEEP_CHOICES = False
    cases, device = operators.OPERATORS[op], torch.device("cuda")
    row = check.check_one(cases, *_list_checks(op)[number])
    try:
        torch.cuda.synchronize(device)  # kernels run asynchronously: their errors surface here
    except RuntimeError as error:
        return {**row, "passed": False, **check.failure(error)}, True
    return row, False


@functools.cache  # a worker asks once for each of its checks
def _list_checks(op: str) -> list[Any]:
    """Return the checks of `check.planned` on a GPU, which workers and the process that started them know by number."""
    import torch

    from kernels.tools import check, operators

    return list(check.planned(operators.OPERATORS[op], torch.device("cuda")))


def run_bench(
    paths: Paths,
    op: str | None = None,
    *,
    compared: bool = False,
    minutes: float | None = None,
    began: str | None = None,
) -> bool:
    """Time the kernels of one operator, or of all, and write results/speed/kernels/<device>.csv.

    Kernels with wrong results at a typical size are not timed. A row is that of `kernels.tools.bench.measure`; the rows
    of TTT-Linear include the peaks of memory of Appendix B.

    Args:
        compared: whether to time only the shapes of the goals.
        op, minutes, began: see `check_kernels`.

    Returns:
        Whether every row that was asked for exists.

    Raises:
        UserError: no such operator, or no GPU.
        RunError: a check or a row of our own kernels failed.
    """
    chosen = _find_operators(op)
    import torch

    from kernels.tools import bench, check, operators

    if not torch.cuda.is_available():
        raise UserError("kernels bench: PyTorch sees no CUDA device; speed is measured on a GPU")
    if operators.INTERPRETED:
        raise UserError(
            "kernels bench: TRITON_INTERPRET is set, and the speed of the interpreter means nothing; unset it"
        )
    device, deadline = torch.device("cuda"), _deadline(minutes)
    name = f"kernels/{device_slug(device)}"
    # each choice of rows is a series of its own, see `check_kernels`
    series = (f"_{op}" if op else "") + "_compared" * compared
    path, state = paths.speed / f"{name}.csv", Unfinished(paths, name + series)
    state.save()
    since, left = began or state.began, 0
    rows = {
        (row["operator"], bench.row_key(operators.OPERATORS[row["operator"]], row)): row for row in read_bench(path)
    }
    wanted: list[tuple[str, str]] = []

    def is_done(name: str, key: str) -> bool:
        """Tell whether a row of this series is there, and is no failure of our own kernels, which is tried again."""
        row = rows.get((name, key))
        return _is_since(row, since) and not (row["status"] == "failed" and row["implementation"] in bench.OURS)

    for cases in chosen:
        place = _describe_place(paths, device)
        package = cases.PEERS.distribution if cases.PEERS else None
        version = installed_version(package) if package else None
        place["peer_version"] = f"{package} {version}" if version else ""
        planned = bench.planned(cases, compared)
        wanted += [(cases.NAME, key) for key in planned]
        todo = {key: step for key, step in planned.items() if not is_done(cases.NAME, key)}
        if todo and _left(deadline) > 0:
            what = "before it is timed"
            run = partial(check.compare, cases, what, cases.TYPICAL, "bf16", device=device, poisoned=False)
            right = check.check_one(cases, what, run)
            if not right["passed"]:
                raise RunError(f"kernels bench: {format_check(right)}; run `repro kernels check --op {cases.NAME}`")
        for key, step in todo.items():
            if _left(deadline) <= 0:
                left += 1
                continue
            row = bench.measure(cases, device, step, find=lambda key, name=cases.NAME: rows.get((name, key)))
            rows[cases.NAME, key] = row | place
            _write_bench(path, rows.values())
            print(_format_bench(row), flush=True)
    if not left:
        state.finish()
    # a failure in an earlier part of this series counts too
    found = [rows[what] for what in wanted if _is_since(rows.get(what), since)]
    if failed := [row for row in found if row["status"] == "failed" and row["implementation"] in bench.OURS]:
        raise RunError(f"kernels bench: {len(failed)} rows failed, the first: {_format_bench(failed[0])}")
    if left:
        print(f"time is up: the next call continues with the other {left} rows")
    return not left


def bench_against(paths: Paths, base: str, op: str | None = None, *, compared: bool = False) -> None:
    """Time the kernels of another commit and then those here, and print the speed-up.

    The other commit is checked out into a temporary work tree, and runs its own `kernels bench`.

    Args:
        base: a commit, branch or tag.
        op, compared: see `run_bench`.

    Raises:
        UserError: no such commit; or see `run_bench`.
        RunError: the kernels of the other commit cannot be timed; or see `run_bench`.
    """
    began = read_clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "base"
        if ask(["git", "worktree", "add", "--detach", str(folder), base], paths.root) is None:
            raise UserError(f"kernels bench: --base {base}: Git has no such commit here")
        try:
            own = [*(["--op", op] if op else []), *(["--compared"] if compared else [])]
            command = [sys.executable, "-m", "repro", "kernels", "bench", *own]
            code = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}).returncode
            if code:
                raise RunError(f"kernels bench: --base {base}: its own `kernels bench` ended with exit code {code}")
            before = _read_own(Paths(folder), op, began)
        finally:
            ask(["git", "worktree", "remove", "--force", str(folder)], paths.root)
    run_bench(paths, op, compared=compared, began=began)
    after = _read_own(paths, op, began)
    print_table(
        ["operator, sizes, passes", f"{base}: ms (20 %, 80 %)", "here", "times as fast"],
        [
            [key, *map(_show_times, (before[key], row)), _compare_times(before[key], row)]
            for key, row in after.items()
            if key in before
        ],
    )


def _read_own(paths: Paths, op: str | None, began: str) -> dict[str, Row]:
    """Return "operator, sizes, passes" -> row of our Triton kernels on this machine's GPU since `began`.

    It reads the file of this checkout, or of the work tree in which the other revision was measured, which also has the
    rows that were committed there.
    """
    import torch

    rows = read_bench(paths.speed / f"kernels/{device_slug(torch.device('cuda'))}.csv")
    mine = (row for row in rows if row["implementation"] == "triton" and op in (None, row["operator"]))
    new = (row for row in mine if row["median_ms"] and _is_since(row, began))
    return {f"{row['operator']}, {_sizes(row)}, {row['passes']}": row for row in new}


def _show_times(row: Row) -> str:
    """Show the median time in milliseconds with the range from 20 % to 80 % of the samples."""
    return f"{row['median_ms']:.3f} ({row['p20_ms']:.3f}, {row['p80_ms']:.3f})"


def _compare_times(before: Row, after: Row) -> str:
    """Show the ratio of the medians, marked `open` if the ranges from 20 % to 80 % overlap."""
    apart = before["p80_ms"] < after["p20_ms"] or after["p80_ms"] < before["p20_ms"]
    return f"{before['median_ms'] / after['median_ms']:.2f}{'' if apart else ', open'}"


def _format_bench(row: Mapping[str, Any]) -> str:
    """Format a row of `bench.measure` as a line."""
    what = f"{row['operator']}, {_sizes(row)}, {row['passes']}, {row['implementation']}"
    if row["status"] != "ok":
        return f"{what}: {row['status']} ({row['reason']})"
    if row["median_ms"] is None:  # a row of memory
        return f"{what}: peak {row['peak_memory_mib']:.0f} MiB"
    spread = f"{row['median_ms']:.3f} ms ({row['p20_ms']:.3f} to {row['p80_ms']:.3f})"
    share = row["share_of_copy_percent"]
    share = "–" if share is None else f"{share:.0f} % of a copy"
    return f"{what}: {spread}, {row['gb_per_s']:.0f} GB/s, {share}, peak {row['peak_memory_mib']:.0f} MiB"


def read_bench(path: Path) -> list[Row]:
    """Read the rows of a file of results/speed/kernels; the sizes of each become keys of the row."""
    return [row | (row.pop("sizes") or {}) for row in read_typed_csv(path, _BENCH_TYPES)]


def _write_bench(path: Path, rows: Iterable[Row]) -> None:
    """Write rows in the form that `read_bench` reads: the sizes of all operators share one column, as JSON."""
    from kernels.tools.operators import OPERATORS

    def find_sizes(row: Row) -> str:
        return json.dumps({name: row[name] for name in vars(OPERATORS[row["operator"]].COMPARED)})

    write_csv(path, [{**row, "sizes": find_sizes(row)} for row in rows], _BENCH_COLUMNS)


def _is_since(row: Row | None, since: str) -> bool:
    """Tell whether there is a row that was measured since a time of `read_clock`."""
    return row is not None and (row["measured"] or "") >= since


def _describe_place(paths: Paths, device: Any) -> Row:
    """Return the device, versions, commit and time of a measurement."""
    versions = {name: installed_version(name) for name in ("torch", "triton")}
    return {"device": device_label(device), "commit": label_commit(paths.root), **versions, "measured": read_clock()}


def _find_operators(op: str | None) -> list[Any]:
    """Return the cases of an operator; those of all operators for None.

    Raises:
        UserError: no such operator, or Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels: the package triton is not installed; PyTorch's CUDA builds bring it (Linux)")
    from kernels.tools.operators import OPERATORS

    if op is not None and op not in OPERATORS:
        raise UserError(f"kernels: --op {op}: no such operator{did_you_mean(op, OPERATORS)}")
    return list(OPERATORS.values()) if op is None else [OPERATORS[op]]


def find_memory_ratio(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the peak memory of TTT-Linear's reference over that of the kernels (Appendix B); None without both."""
    peaks = {row["implementation"]: row["peak_memory_mib"] for row in rows if row["passes"] == "memory of both passes"}
    return peaks["reference"] / peaks["triton"] if all(peaks.get(name) for name in ("reference", "triton")) else None


def _deadline(minutes: float | None) -> float:
    """Return the time of `time.monotonic` in so many minutes; None: never."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def _left(deadline: float) -> float:
    """Return the seconds until the deadline."""
    return deadline - time.monotonic()
