"""`repro kernels check|bench|resources`: are the Triton kernels right, are they fast, what does the compiler make of them."""

import dataclasses
import difflib
import importlib.util
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, read_json, replace_block, versions, write_record
from repro.core.runtime import device_label, device_slug, gpu_names

from . import Stage

app = typer.Typer(help="Prove and measure the Triton kernels.", no_args_is_help=True)
DOCS, BENCH_BLOCK, RESOURCES_BLOCK = "docs/gpu.md", "kernels bench", "kernels resources"
NO_GPU = "measured: nothing, for want of a GPU (`repro kernels bench`)"
# what a row says of its sizes -> how a line prints it
SIZES = {"tokens": "T", "heads": "heads", "head_dim": "D", "levels": "levels", "chunk_size": "chunk", "channels": "channels"}
SIZES |= {"state_dim": "states"}

Op = Annotated[str | None, typer.Option("--op", help="One operator alone: ttt_linear, selective_scan, bi_wkv or ms_deform_attn.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a record answers: everything else is fixed in the code."""

    command: Literal["check", "bench", "resources"]


STAGE = Stage(purpose="prove")


@app.command()
def check(op: Op = None) -> None:
    """Compare outputs and all gradients with the fp64 reference; on a CPU: TRITON_INTERPRET=1 repro kernels check (minutes)."""
    run_check(find_root(), op)


@app.command()
def bench() -> None:
    """Run the check, then time the kernels on the GPU beside the torch backend, implementations of others and a copy."""
    run_bench(find_root())


@app.command()
def resources(op: Op = None) -> None:
    """Compile every configuration for sm_80, sm_89 and sm_90, without a GPU: registers, spills, shared memory, instructions."""
    run_resources(find_root(), op)


def run_check(paths: Paths, op: str | None = None) -> None:
    """Print a line per check and write results/measured/<device>/kernels_check.json; with `op`, the others' rows there stay.

    Raises:
        UserError: no device that runs the kernels, or no such operator. RunError: a check failed; the record says which.
    """
    chosen = _chosen(op)
    import torch

    from kernels.tools.check import rows

    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        for cases in chosen:
            cases.op.selected_backend("triton", device)
    except ValueError as error:
        raise UserError(f"kernels check: {error}; on a CPU run TRITON_INTERPRET=1 repro kernels check") from None
    folder = paths.measured(device_slug(device))
    name = "kernels_check_interpreted" if _interpreted() else "kernels_check"
    kept = _kept(folder / f"{name}.json", chosen)
    done = [row for cases in chosen for row in _printed(rows(cases, device), _check_line)]
    failed = [row for row in done if row["passed"] is False]
    metrics = _joined(kept, chosen, done)
    metrics["failed"] = sum(row["passed"] is False for row in metrics["rows"])
    _write(paths, folder, name, metrics, "check", device_label(device), started)
    print(f"{len(done)} checks, {len(failed)} failed")
    if failed:
        raise RunError(f"kernels check: {len(failed)} of {len(done)} checks failed, see {folder / name}.json")


def run_bench(paths: Paths) -> None:
    """Write results/measured/<device>/kernels.json and the table in docs/gpu.md; no speed without a green check.

    Raises:
        UserError: no CUDA device, or the interpreter is on. RunError: a check failed, or a row of our own implementations.
    """
    operators = _chosen(None)
    import torch

    if not torch.cuda.is_available():
        raise UserError("kernels bench: PyTorch sees no CUDA device; speed is measured on a GPU")
    if _interpreted():
        raise UserError("kernels bench: TRITON_INTERPRET is set; the interpreter's speed says nothing, unset it")
    run_check(paths)
    from kernels.tools import bench as measure
    from kernels.tools.ttt_linear_cases import memory_reference_over_kernel

    started = time.monotonic()
    device = torch.device("cuda")
    rows = [row for cases in operators for row in _printed(measure.rows(cases, device), _bench_line)]
    metrics = {
        "rows": rows,
        "summary": {cases.NAME: measure.summary(cases, rows) for cases in operators},
        "op": memory_reference_over_kernel(device),
        "tuned": [config for cases in operators for config in measure.tuned_configs(cases)],
        "driver": gpu_names(),
    }
    for cases in operators:
        metrics |= {key: measure.version(package) or "not installed" for key, package in cases.DISTRIBUTIONS.items()}
    label = device_label(device)
    _write(paths, paths.measured(device_slug(device)), "kernels", metrics, "bench", label, started)
    replace_block(paths.root / DOCS, BENCH_BLOCK, bench_table(metrics, label))
    if broken := [row for row in rows if row["status"] == "failed" and row["implementation"] in measure.OURS]:
        raise RunError(f"kernels bench: {len(broken)} rows failed, the first: {_bench_line(broken[0])}")


def run_resources(paths: Paths, op: str | None = None) -> None:
    """Write results/measured/compile/resources.json: {rows, source_sha256}; with `op`, the others' rows there stay.

    See kernels.tools.resources.rows.

    Raises:
        UserError: the interpreter is on, or no such operator.
    """
    chosen = _chosen(op)
    if _interpreted():
        raise UserError("kernels resources: TRITON_INTERPRET is set; the interpreter compiles nothing, unset it")
    from kernels.tools import resources as compiler

    started = time.monotonic()
    folder = paths.measured("compile")
    kept = _kept(folder / "resources.json", chosen)
    metrics = _joined(kept, chosen, [row for cases in chosen for row in _printed(compiler.rows(cases), _resources_line)])
    _write(paths, folder, "resources", metrics, "resources", "none: compiled, not run", started)
    replace_block(paths.root / DOCS, RESOURCES_BLOCK, resources_table(metrics["rows"]))


def resources_table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: the default configs in bf16, at chunk size 16 where there are chunks, a line for each kernel and target."""
    lines = ["| kernel | target | registers | stack bytes | shared bytes | LDL + STL | loop: instructions, shuffles, barriers |"]
    lines.append("|" + "---|" * 7)
    for row in rows:
        if row["default"] and row["config"].get("chunk_size", 16) == 16 and row["dtype"] == "bf16":
            spills = row["instructions"]["LDL"] + row["instructions"]["STL"]
            first, *rest = row["loops"]
            if rest and first["instructions"] > sum(loop["instructions"] for loop in rest):
                shown = rest  # the first is over groups and holds the others
            else:
                shown = row["loops"]
            loops = "; ".join(f"{loop['instructions']}, {loop['SHFL']}, {loop['BAR']}" for loop in shown)
            numbers = f"{row['registers']} | {row['stack_bytes']} | {row['shared_bytes']} | {spills} | {loops}"
            kernel = row["kernel"].removeprefix(f"{row['operator']}_").replace("_", " ")
            lines.append(f"| `{row['operator']}` {kernel} | {row['target']} | {numbers} |")
    return "\n".join(lines)


def bench_table(metrics: dict[str, Any], label: str) -> str:
    """Markdown, for each operator of `summary`: the goals, then a line for each shape and pass with a column for each
    implementation, in milliseconds.
    """
    from kernels.tools.operators import OPERATORS

    parts = []
    for name, summary in metrics["summary"].items():
        parts.append(goals_table(OPERATORS[name], summary, label))
        if rows := [row for row in metrics["rows"] if row["operator"] == name]:
            parts.append(f"Median milliseconds of `{name}`, bf16:")
            parts.append(times_table(rows))
    return "\n\n".join(parts)


def times_table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: median milliseconds of one operator."""
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        width = "heads" if "heads" in row else "channels"
        tokens = f"{row['tokens']}, L {row['levels']}" if "levels" in row else row["tokens"]
        cells.setdefault((row[width], tokens, row["passes"], row["batch"]), {})[row["implementation"]] = row
    names = list(dict.fromkeys(name for found in cells.values() for name in found))
    lines = [f"| {width} | T | passes | {' | '.join(names)} | share of copy | peak MiB |", "|" + "---|" * (len(names) + 5)]
    for (size, tokens, passes, _), found in cells.items():
        times = [_number(found[name]["median_ms"], ".3f") if name in found else "–" for name in names]
        ours = found.get("triton", {})
        share, peak = _number(ours.get("share_of_copy_percent"), ".0f", " %"), _number(ours.get("peak_memory_mib"), ".0f")
        lines.append(f"| {size} | {tokens} | {passes} | {' | '.join(times)} | {share} | {peak} |")
    return "\n".join(lines)


def goals_table(cases: ModuleType, summary: Mapping[str, Any], label: str) -> str:
    """Markdown: what is asked of an operator at its compared shape, and what was measured on `label`; a dash for null."""
    lines = [f"| `{cases.NAME}`, {cases.AT} | asked on an H200 | {label} |", "|---|---|---|"]
    for key, (what, asked, unit) in cases.GOALS.items():
        lines.append(f"| {what} | {asked}{unit} | {_number(summary[key], '.2f' if unit == ' ×' else '.0f', unit)} |")
    return "\n".join(lines)


def _chosen(op: str | None) -> list[ModuleType]:
    """The cases of the operator of that name, of all without one."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels: the package triton is not installed; PyTorch's CUDA builds bring it (Linux)")
    from kernels.tools.operators import OPERATORS

    if op is None:
        return list(OPERATORS.values())
    if op not in OPERATORS:
        close = difflib.get_close_matches(op, OPERATORS, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(OPERATORS)}"
        raise UserError(f"kernels: --op {op!r}: no such operator; {advice}")
    return [OPERATORS[op]]


def _kept(path: Path, chosen: Collection[ModuleType]) -> dict[str, Any]:
    """What a record has of the operators that are not asked for: {rows, source_sha256}.

    Raises:
        UserError: other versions made it, so that rows of now cannot stand beside them.
    """
    asked = {cases.NAME for cases in chosen}
    record = read_json(path) if path.exists() else {"metrics": {"rows": [], "source_sha256": {}}}
    kept = {name: value for name, value in record["metrics"]["source_sha256"].items() if name not in asked}
    if kept and record["identity"]["versions"] != versions():
        raise UserError(f"{path}: made with other versions; run without --op, which makes all of it anew")
    return {"rows": [row for row in record["metrics"]["rows"] if row["operator"] in kept], "source_sha256": kept}


def _joined(kept: dict[str, Any], chosen: Collection[ModuleType], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A record's rows, operator by operator, and of each the hash of the kernels that they are of."""
    from kernels.tools.operators import OPERATORS
    from kernels.tools.resources import source_hash

    order = list(OPERATORS)
    rows = sorted([*kept["rows"], *rows], key=lambda row: order.index(row["operator"]))
    return {"rows": rows, "source_sha256": kept["source_sha256"] | {cases.NAME: source_hash(cases) for cases in chosen}}


def _interpreted() -> bool:
    from kernels.ttt_linear.triton_fwd import INTERPRETED

    return INTERPRETED


def _printed(rows: Iterable[dict[str, Any]], line) -> Iterable[dict[str, Any]]:
    for row in rows:
        print(line(row), flush=True)
        yield row


def _write(paths: Paths, folder, name: str, metrics: dict, command, device: str, started: float) -> None:
    how = {"dtype": "bf16" if command == "bench" else "each row says", "backend": "triton, interpreted" if _interpreted() else "triton"}
    identity = make_identity(paths.root, ["stages.kernels"], Asked(command=command), device=device, **how)
    write_record(folder, metrics, identity, time.monotonic() - started, name=name)
    print(f"written: {(folder / name).relative_to(paths.root)}.json")


def _check_line(row: dict[str, Any]) -> str:
    verdict = {True: "ok", False: "FAILED", None: "not run"}[row["passed"]]
    detail = f", {_sizes(row)}, {row['dtype']}" if "tokens" in row else ""  # else it broke off
    if row.get("errors"):
        name, error = max(row["errors"].items(), key=lambda item: item[1] / row["limits"][item[0]])
        detail += f", nearest its limit: {name} {error:.1e} of {row['limits'][name]:.0e}"
    if row.get("not_finite"):
        detail += f", not finite: {', '.join(row['not_finite'])}"
    if row.get("reason"):
        detail += f", {row['reason']}"
    return f"{verdict}: {row['operator']}, {row['check']}{detail}"


def _sizes(row: dict[str, Any]) -> str:
    return ", ".join(f"{spelt} {row[key]}" for key, spelt in SIZES.items() if key in row)


def _bench_line(row: dict[str, Any]) -> str:
    what = f"{row['operator']}, {_sizes(row)}, {row['passes']}, {row['implementation']}"
    if row["status"] != "ok":
        return f"{what}: {row['status']} ({row['reason']})"
    spread = f"{row['median_ms']:.3f} ms ({row['p20_ms']:.3f} to {row['p80_ms']:.3f})"
    share = _number(row["share_of_copy_percent"], ".0f", " % of a copy")
    return f"{what}: {spread}, {row['gb_per_s']:.0f} GB/s, {share}, peak {row['peak_memory_mib']:.0f} MiB"


def _resources_line(row: dict[str, Any]) -> str:
    config = ", ".join(f"{key} {value}" for key, value in row["config"].items() if value is not None)
    mark = "default, " if row["default"] else ""
    spills = row["instructions"]["LDL"] + row["instructions"]["STL"]
    return (
        f"{row['kernel']}, {row['dtype']}, {row['target']}, {mark}{config}: {row['registers']} registers, {row['stack_bytes']} stack "
        f"bytes, {spills} spill instructions, {row['shared_bytes']} shared bytes, {row['instructions']['BAR']} barriers"
    )


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{spec}}{unit}"
