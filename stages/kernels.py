"""`repro kernels check|bench|resources`: are the Triton kernels right, are they fast, and what does the compiler make of them?"""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.errors import RunError, UserError, did_you_mean
from repro.core.paths import Paths, find_root
from repro.core.record import installed_version, make_identity, read_json, replace_block, versions, write_record
from repro.core.runtime import device_label, device_slug, gpu_names

from . import Stage

app = typer.Typer(help="Check and time the Triton kernels.", no_args_is_help=True)
DOCS, BENCH_BLOCK, RESOURCES_BLOCK, SPILLS_BLOCK = "docs/gpu.md", "kernels bench", "kernels resources", "kernels spills"

STAGE = Stage(purpose="prove")

Op = Annotated[str | None, typer.Option("--op", help="Only this operator: ttt_linear, selective_scan, bi_wkv or ms_deform_attn.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsParams:
    """What a record answers; everything else is fixed in the code."""

    command: Literal["check", "bench", "resources"]


@app.command()
def check(op: Op = None) -> None:
    """Compare outputs and all gradients with the fp64 reference; on a CPU: TRITON_INTERPRET=1 repro kernels check (minutes)."""
    paths = find_root()
    chosen = _find_operators(op)
    import torch

    from kernels.tools import operators, text
    from kernels.tools.check import rows as check_rows

    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        for cases in chosen:
            cases.op.selected_backend("triton", device)
    except ValueError as error:
        raise UserError(f"kernels check: {error}; on a CPU run TRITON_INTERPRET=1 repro kernels check") from None
    path = paths.measured(device_slug(device)) / f"kernels_check{'_interpreted' * operators.INTERPRETED}.json"
    before = _read_metrics(path) if op else {}
    rows = [row for cases in chosen for row in _print_each(check_rows(cases, device), text.format_check)]
    metrics = operators.merge_rows(before, chosen, rows)
    metrics["failed"] = sum(row["passed"] is False for row in metrics["rows"])
    _write(paths, path, metrics, "check", device_label(device), started)
    failed = sum(row["passed"] is False for row in rows)
    print(f"{len(rows)} checks, {failed} failed")
    if failed:
        raise RunError(f"kernels check: {failed} of {len(rows)} checks failed, see {path}")


@app.command()
def bench() -> None:
    """Run the check, then time the kernels on the GPU beside the torch backend, kernels of other projects and a copy."""
    paths = find_root()
    chosen = _find_operators(None)
    import torch

    from kernels.tools import bench as tools
    from kernels.tools import operators, text
    from kernels.tools.ttt_linear_cases import memory_reference_over_kernel

    if not torch.cuda.is_available():
        raise UserError("kernels bench: PyTorch sees no CUDA device; speed is measured on a GPU")
    if operators.INTERPRETED:
        raise UserError("kernels bench: TRITON_INTERPRET is set, and the speed of the interpreter means nothing; unset it")
    check()  # no speed without kernels that are right
    started = time.monotonic()
    device = torch.device("cuda")
    rows = [row for cases in chosen for row in _print_each(tools.rows(cases, device), text.format_bench)]
    metrics = {"rows": rows, "summary": {cases.NAME: tools.summarise(cases, rows) for cases in chosen}, "driver": gpu_names()}
    metrics |= {"op": memory_reference_over_kernel(device), "tuned": [each for cases in chosen for each in tools.tuned_configs(cases)]}
    metrics |= {key: installed_version(package) or "not installed" for cases in chosen for key, package in cases.DISTRIBUTIONS.items()}
    label = device_label(device)
    _write(paths, paths.measured(device_slug(device)) / "kernels.json", metrics, "bench", label, started)
    replace_block(paths.root / DOCS, BENCH_BLOCK, text.bench_table(metrics, label))
    if failed := [row for row in rows if row["status"] == "failed" and row["implementation"] in tools.OURS]:
        raise RunError(f"kernels bench: {len(failed)} rows failed, the first: {text.format_bench(failed[0])}")


@app.command()
def resources(op: Op = None) -> None:
    """Compile every configuration for sm_80, sm_89 and sm_90, without a GPU: registers, spills, shared memory, instructions."""
    paths = find_root()
    chosen = _find_operators(op)
    from kernels.tools import operators, text
    from kernels.tools.resources import rows as compile_rows

    if operators.INTERPRETED:
        raise UserError("kernels resources: TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it")
    started = time.monotonic()
    path = paths.measured("compile") / "resources.json"
    before = _read_metrics(path) if op else {}
    rows = [row for cases in chosen for row in _print_each(compile_rows(cases), text.format_resources)]
    metrics = operators.merge_rows(before, chosen, rows)
    _write(paths, path, metrics, "resources", "none: compiled, not run", started)
    replace_block(paths.root / DOCS, RESOURCES_BLOCK, text.resources_table(metrics["rows"]))
    replace_block(paths.root / DOCS, SPILLS_BLOCK, text.describe_spills(metrics["rows"]))


def _find_operators(op: str | None) -> list[Any]:
    """The cases of the operator of that name; of all operators without one."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels: the package triton is not installed; PyTorch's CUDA builds bring it (Linux)")
    from kernels.tools.operators import OPERATORS

    if op is not None and op not in OPERATORS:
        raise UserError(f"kernels: --op {op}: no such operator{did_you_mean(op, OPERATORS)}")
    return list(OPERATORS.values()) if op is None else [OPERATORS[op]]


def _read_metrics(path: Path) -> dict[str, Any]:
    """The metrics of the record to which rows of one operator are added; raises a UserError if other versions made it."""
    record = read_json(path) if path.exists() else {"metrics": {}, "identity": {"versions": versions()}}
    if record["identity"]["versions"] != versions():
        raise UserError(f"{path}: was made with other versions; run without --op to make all of it again")
    return record["metrics"]


def _print_each(rows: Iterable[dict[str, Any]], format_row: Callable[[dict[str, Any]], str]) -> Iterable[dict[str, Any]]:
    for row in rows:
        print(format_row(row), flush=True)
        yield row


def _write(paths: Paths, path: Path, metrics: dict, command: Any, device: str, started: float) -> None:
    from kernels.tools.operators import INTERPRETED

    dtype, backend = "bf16" if command == "bench" else "each row says", "triton, interpreted" if INTERPRETED else "triton"
    params = KernelsParams(command=command)
    identity = make_identity(paths.root, ["stages.kernels"], params, device=device, dtype=dtype, backend=backend)
    write_record(path.parent, metrics, identity, time.monotonic() - started, name=path.stem)
    print(f"written: {path.relative_to(paths.root)}")
