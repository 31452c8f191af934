"""The records of the Triton kernels: checks, times, and what the compiler makes of them.

The rows of a record are written as they come, and a call that was cut short is continued by the next one, which keeps
the rows of the same kernels and versions. Where all rows that are asked for are there, they are made anew.
"""

import dataclasses
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..core.errors import RunError, UserError, did_you_mean
from ..core.paths import Paths
from ..core.record import has_versions, installed_version, make_identity, read_json, versions, write_record
from ..core.runtime import device_label, device_slug, gpu_names, usable_cores
from .lanes import run_in_lanes
from .rows import RowStore

Row = dict[str, Any]
Plan = Mapping[Hashable, Callable[[], Row]]  # the key of a row -> what makes it
PAGE = "results/speed.md"
BENCH_BLOCK = "kernels bench"
RESOURCES_BLOCK = "kernels resources"
SPILLS_BLOCK = "kernels spills"
NOTHING_MEASURED = "not measured yet (`repro kernels bench`, on a GPU)"
WRITE_EVERY_S = 5.0
LANES = 8  # processes that check at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsParams:
    """What a record answers; everything else is fixed in the code."""

    command: Literal["check", "bench", "resources"]


def run_check(paths: Paths, op: str | None = None, minutes: float | None = None, *, again: bool = True) -> bool:
    """Check the kernels of one operator, or of all; write results/replications/<device>/kernels_check.json. Whether all
    rows are there.

    `again`: make a complete record anew.
    metrics: `rows`, see `kernels.tools.check.run`; `failed`, how many; `source_hash` of each operator; `unfinished`,
    operators of which rows are missing.

    Raises:
        UserError: no such operator, or kernels that cannot run here. RunError: a check failed.
    """
    chosen = find_operators(op)
    import torch

    from kernels.tools import check, operators, text

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        for cases in chosen:
            cases.op.selected_backend("triton", device)
    except ValueError as error:
        raise UserError(f"kernels check: {error}; on a CPU run TRITON_INTERPRET=1 repro kernels check") from None
    path = paths.replications(device_slug(device)) / f"kernels_check{'_interpreted' * operators.INTERPRETED}.json"
    deadline = _deadline(minutes)

    def plan(cases: Any) -> Plan:
        return {number: partial(check.run, cases, *each) for number, each in enumerate(check.planned(cases, device))}

    with _Table(paths, path, "check", device_label(device), chosen, plan, again=again) as table:
        make = partial(_check_in_lanes, deadline) if device.type == "cuda" else None
        for cases in chosen:
            table.fill(cases, text.format_check, deadline, make)
            check.draw_case.cache_clear()
    failed = sum(row["passed"] is False for row in table.chosen_rows())
    print(table.describe(f"checks, {failed} failed"))
    if failed:
        raise RunError(f"kernels check: {failed} of {len(table.chosen_rows())} checks failed, see {path}")
    return not table.pending


def _check_in_lanes(deadline: float, op: str, numbers: Sequence[int]) -> Iterator[tuple[int, Row]]:
    """Make rows of `check.planned` on a GPU, several at a time."""

    def died(number: int) -> Row:
        return {"operator": op, "check": f"number {number}", "reason": "its process was killed", "passed": False}

    lanes = min(LANES, usable_cores())
    return run_in_lanes(numbers, partial(_check_one, op), lanes, died, lambda: _left(deadline) <= 0)


def _check_one(op: str, number: int) -> tuple[Row, bool]:
    """In the process of a lane: a row, and whether the GPU is lost to the process."""
    import torch

    from kernels import triton_launch
    from kernels.tools import check, operators

    triton_launch.KEEP_CHOICES = False
    cases, device = operators.OPERATORS[op], torch.device("cuda")
    row = check.run(cases, *_list_checks(op)[number])
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return {**row, "passed": False, **check.failure(error)}, True
    return row, False


@functools.cache
def _list_checks(op: str) -> list[Any]:
    import torch

    from kernels.tools import check, operators

    return list(check.planned(operators.OPERATORS[op], torch.device("cuda")))


def run_bench(
    paths: Paths, op: str | None = None, *, compared: bool = False, minutes: float | None = None, again: bool = True
) -> bool:
    """Check kernels that no record says are right, time them, and write results/replications/<device>/kernels.json.

    metrics: `rows`, see `kernels.tools.bench.measure`; `summary`, see `kernels.tools.bench.summarise`; `op`, the memory of
    Appendix B; `tuned`, the configs that tuning chose; `source_hash`, `unfinished`, as in `run_check`; and the versions
    of other people's kernels. `compared`: only the shapes that the goals are about; `again`: make them anew where they
    are there. Returns whether all rows that were asked for are there.

    Raises:
        UserError: no such operator, or no GPU. RunError: a check or a row of our own failed.
    """
    chosen = find_operators(op)
    import torch

    from kernels.tools import bench, operators, text

    if not torch.cuda.is_available():
        raise UserError("kernels bench: PyTorch sees no CUDA device; speed is measured on a GPU")
    if operators.INTERPRETED:
        raise UserError(
            "kernels bench: TRITON_INTERPRET is set, and the speed of the interpreter means nothing; unset it"
        )
    device, deadline = torch.device("cuda"), _deadline(minutes)
    if not run_check(paths, op, _left(deadline) / 60, again=False):
        return False  # no speed without kernels that are right

    def plan(cases: Any, compared: bool = False) -> Plan:
        measure = partial(bench.measure, cases, device, find=lambda key: table.find((cases.NAME, key)))
        return {key: partial(measure, step) for key, step in bench.planned(cases, compared).items()}

    path = paths.replications(device_slug(device)) / "kernels.json"
    options = {"wanted": lambda cases: plan(cases, compared), "key": bench.row_key, "again": again}
    table = _Table(paths, path, "bench", device_label(device), chosen, plan, **options)
    table.extra |= {key: table.before[key] for key in ("op", "tuned") if table.before.get(key)}
    table.extra |= {"driver": gpu_names()}
    for cases in chosen:
        table.extra |= {key: installed_version(name) or "not installed" for key, name in cases.DISTRIBUTIONS.items()}
    table.summarise = lambda rows: {
        "summary": {name: bench.summarise(cases, rows) for name, cases in operators.OPERATORS.items()}
    }
    with table:
        for cases in chosen:
            name = cases.NAME
            is_asked = bool(table.todo[name])
            table.fill(cases, text.format_bench, deadline)
            tuned = [*table.extra.get("tuned", []), *bench.tuned_configs(cases)]
            table.extra["tuned"] = list({(each["kernel"], *each["key"]): each for each in tuned}.values())
            if name == "ttt_linear" and is_asked and _left(deadline) > 0:
                table.extra["op"] = bench.memory_reference_over_kernel(cases, device)
    print(table.describe("rows"))
    ours = (row for row in table.chosen_rows() if row["implementation"] in bench.OURS)
    if failed := [row for row in ours if row["status"] == "failed"]:
        raise RunError(f"kernels bench: {len(failed)} rows failed, the first: {text.format_bench(failed[0])}")
    return not table.pending


def run_resources(paths: Paths, op: str | None = None, *, defaults: bool = False) -> None:
    """Compile every configuration without a GPU, or only the default ones, and write
    results/replications/compile/resources.json.

    `defaults` writes resources_triton_<version>.json instead, which is for another version than the lock file's.
    metrics: `rows`, see `kernels.tools.resources.planned`; `source_hash`, `unfinished`, as in `run_check`.

    Raises:
        UserError: no such operator, or the interpreter is chosen.
    """
    chosen = find_operators(op)
    from kernels.tools import operators, resources, text

    if operators.INTERPRETED:
        raise UserError("kernels resources: TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it")
    path = paths.replications("compile") / "resources.json"
    if defaults:
        path = path.with_name(f"resources_triton_{str(installed_version('triton')).replace('.', '_')}.json")

    def plan(cases: Any) -> Plan:
        rows = enumerate(resources.planned(cases, defaults))
        return {number: partial(resources.compile_row, *each) for number, each in rows}

    with _Table(paths, path, "resources", "none: compiled, not run", chosen, plan) as table:
        for cases in chosen:
            table.fill(cases, text.format_resources)


def find_operators(op: str | None) -> list[Any]:
    """The cases of the operator of that name; of all operators without one."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels: the package triton is not installed; PyTorch's CUDA builds bring it (Linux)")
    from kernels.tools.operators import OPERATORS

    if op is not None and op not in OPERATORS:
        raise UserError(f"kernels: --op {op}: no such operator{did_you_mean(op, OPERATORS)}")
    return list(OPERATORS.values()) if op is None else [OPERATORS[op]]


def make_passages(paths: Paths) -> list[tuple[str, str, str]]:
    """(page, marker, text) of the tables in results/speed.md, from results/replications; none where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        return []
    from kernels.tools import bench, operators, text

    records = [read_json(path) for path in sorted(paths.results.glob("replications/*/kernels.json"))]
    tables = [text.bench_table(record["metrics"], record["identity"]["device"]) for record in records]
    nothing = {"rows": [], "summary": {name: bench.summarise(cases, []) for name, cases in operators.OPERATORS.items()}}
    passages = [(PAGE, BENCH_BLOCK, "\n\n".join(tables or [text.bench_table(nothing, NOTHING_MEASURED)]))]
    compiled = paths.replications("compile") / "resources.json"
    if compiled.is_file():
        rows = read_json(compiled)["metrics"]["rows"]
        files = sorted(compiled.parent.glob("resources_triton_*.json"))
        records = [read_json(file) for file in files if ".run." not in file.name]
        others = {record["identity"]["versions"]["triton"]: record["metrics"]["rows"] for record in records}
        passages += [(PAGE, RESOURCES_BLOCK, text.resources_table(rows, others))]
        passages += [(PAGE, SPILLS_BLOCK, text.describe_spills(rows, others))]
    return passages


class _Table(RowStore):
    """The rows of a record of kernels, each found by (operator, key); valid where the operator's sources made it.

    `todo` has the keys that were asked for and are missing, by operator, in the order in which they are made. `before`
    are the metrics of the record, `extra` further metrics, and `summarise` makes more of them from all rows.

    Args:
        plan: cases -> the keys of all rows of an operator, and what makes each. A key is the number of a row, or what
            `key` says.
        wanted: cases -> those that are asked for; None: all.
        key: (cases, row) -> its key; None: its number.
        again: make all anew where all that was asked for is there.
    """

    def __init__(
        self,
        paths: Paths,
        path: Path,
        command: Any,
        device: str,
        chosen: Sequence[Any],
        plan: Callable[[Any], Plan],
        wanted: Callable[[Any], Iterable[Any]] | None = None,
        key: Callable[[Any, Row], Any] | None = None,
        again: bool = True,
    ):
        from kernels.tools.operators import OPERATORS
        from kernels.tools.resources import source_hash

        self.paths, self.path, self.command, self.device = paths, path, command, device
        self.before = self._read(is_whole=len(chosen) == len(OPERATORS))
        self.extra: dict[str, Any] = {}
        self.summarise: Callable[[list[Row]], dict[str, Any]] = lambda rows: {}
        self.started = time.monotonic()
        hashes = {name: source_hash(cases) for name, cases in OPERATORS.items()}
        made_by = self.before.get("source_hash", {})
        rows = {}
        for number, row in enumerate(self.before.get("rows", [])):
            name = row["operator"]
            if key and made_by.get(name) == hashes.get(name):
                number = key(OPERATORS[name], row)
            elif not key:
                number = sum(operator == name for operator, _ in rows)
            rows[name, number] = row | {"source_hash": made_by.get(name)}
        super().__init__(rows, lambda what: {"source_hash": hashes[what[0]]}, _Table._write, list, WRITE_EVERY_S)
        self.plan = {cases.NAME: plan(cases) for cases in chosen}
        asked = {cases.NAME: list((wanted or plan)(cases)) for cases in chosen}
        self.todo = {name: [each for each in keys if not self.find((name, each))] for name, keys in asked.items()}
        if again and not self.pending:
            self.todo = asked
        self.is_complete = not self.pending

    def _read(self, is_whole: bool) -> dict[str, Any]:
        """The metrics of the record so far; none where other versions made it and it `is_whole` that is made anew."""
        record = read_json(self.path) if self.path.exists() else {"metrics": {}, "identity": {"versions": versions()}}
        if has_versions(record["identity"]["versions"]):
            return record["metrics"]
        if not is_whole:
            raise UserError(f"{self.path}: was made with other versions; run without --op to make all of it again")
        return {}

    def __exit__(self, *_: object) -> None:
        if not self.is_complete:
            self.save()
            print(f"written: {self.path.relative_to(self.paths.root)}")

    def fill(self, cases: Any, format_row: Callable[[Row], str], deadline: float = math.inf, make: Any = None) -> None:
        """Add what is missing of an operator until the deadline, each row printed as it comes.

        Rows of another source are kept until the first new one is there. `make`: (operator, keys) -> (key, row) in any
        order; None makes them here, one after the other.
        """
        name, todo = cases.NAME, self.todo[cases.NAME]
        gone = [what for what, _ in self.items() if what[0] == name and (what[1] in todo or not self.find(what))]
        one_by_one = ((key, self.plan[name][key]()) for key in todo if _left(deadline) > 0)
        for key, row in make(name, todo) if make else one_by_one:
            self.forget(gone)
            gone = []
            self.todo[name] = [each for each in self.todo[name] if each != key]
            self.add((name, key), row)
            print(format_row(row), flush=True)

    @property
    def pending(self) -> int:
        """How many rows that were asked for are missing."""
        return sum(map(len, self.todo.values()))

    def chosen_rows(self) -> list[Row]:
        """The rows of the chosen operators, those that were kept among them."""
        return [row for what, row in self.items() if what[0] in self.plan and self.find(what)]

    def describe(self, what: str) -> str:
        """How many rows there are, and what the next call will do."""
        left = f"; time is up: the next call continues with the other {self.pending}" if self.pending else ""
        return f"{len(self.chosen_rows())} {what}{left}"

    def _write(self) -> None:
        from kernels.tools.operators import INTERPRETED, OPERATORS

        order = list(OPERATORS)
        rows = sorted(self.rows, key=lambda row: order.index(row["operator"]))
        metrics: dict[str, Any] = {"source_hash": {row["operator"]: row["source_hash"] for row in rows}}
        metrics["rows"] = rows = [{k: value for k, value in row.items() if k != "source_hash"} for row in rows]
        unfinished = {name for name in self.before.get("unfinished", []) if name not in self.plan}
        unfinished |= {name for name, keys in self.plan.items() if not all(self.find((name, key)) for key in keys)}
        metrics["unfinished"] = [name for name in metrics["source_hash"] if name in unfinished]
        if self.command == "check":
            metrics["failed"] = sum(row["passed"] is False for row in rows)
        metrics |= self.extra | self.summarise(rows)
        shown = {"device": self.device, "dtype": "bf16" if self.command == "bench" else "each row says"}
        backend = "triton, interpreted" if INTERPRETED else "triton"
        identity = make_identity(self.paths.root, KernelsParams(command=self.command), **shown, backend=backend)
        write_record(self.path, metrics, identity, time.monotonic() - self.started)


def _deadline(minutes: float | None) -> float:
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def _left(deadline: float) -> float:
    """Seconds until the deadline."""
    return deadline - time.monotonic()
