"""`repro kernels check|bench|resources`: are the Triton kernels right, are they fast, what does the compiler make of them."""

import dataclasses
import importlib.util
import time
from collections.abc import Iterable
from typing import Any, Literal

import typer

from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, replace_block, write_record
from repro.core.runtime import device_label, device_slug, gpu_names

app = typer.Typer(help="Prove and measure the Triton kernels of TTT-Linear.", no_args_is_help=True)
DOCS, BENCH_BLOCK, RESOURCES_BLOCK = "docs/gpu.md", "kernels bench", "kernels resources"
NO_GPU = "measured: nothing, for want of a GPU (`repro kernels bench`)"
GOALS = {
    "forward_speedup_over_fla": ("forward, against the faster of flash-linear-attention's two", 2, " ×"),
    "forward_backward_speedup_over_fla": ("forward and backward, against the faster of the two", 2, " ×"),
    "forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 40, " %"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a record answers: everything else is fixed in the code."""

    command: Literal["check", "bench", "resources"]


@app.command()
def check() -> None:
    """Compare outputs and all gradients with the fp64 reference; on a CPU: TRITON_INTERPRET=1 repro kernels check (minutes)."""
    run_check(find_root())


@app.command()
def bench() -> None:
    """Run the check, then time the kernels on the GPU beside the torch backend, flash-linear-attention and a copy."""
    run_bench(find_root())


@app.command()
def resources() -> None:
    """Compile every configuration for sm_80, sm_89 and sm_90, without a GPU: registers, spills, shared memory, instructions."""
    run_resources(find_root())


def run_check(paths: Paths) -> None:
    """Print a line per check and write results/measured/<device>/kernels_check.json.

    Raises:
        UserError: no device that runs the kernels. RunError: a check failed; the record says which.
    """
    _require_triton()
    import torch

    from kernels import selected_backend
    from kernels.tools.check import rows

    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        selected_backend("triton", device)
    except ValueError as error:
        raise UserError(f"kernels check: {error}; on a CPU run TRITON_INTERPRET=1 repro kernels check") from None
    done = list(_printed(rows(device), _check_line))
    failed = [row for row in done if row["passed"] is False]
    folder = paths.measured(device_slug(device))
    name = "kernels_check_interpreted" if _interpreted() else "kernels_check"
    _write(paths, folder, name, {"rows": done, "failed": len(failed)}, "check", device_label(device), started)
    print(f"{len(done)} checks, {len(failed)} failed")
    if failed:
        raise RunError(f"kernels check: {len(failed)} of {len(done)} checks failed, see {folder / name}.json")


def run_bench(paths: Paths) -> None:
    """Write results/measured/<device>/kernels.json and the table in docs/gpu.md; no speed without a green check.

    Raises:
        UserError: no CUDA device, or the interpreter is on. RunError: a check failed, or a row of our own implementations.
    """
    _require_triton()
    import torch

    if not torch.cuda.is_available():
        raise UserError("kernels bench: PyTorch sees no CUDA device; speed is measured on a GPU")
    if _interpreted():
        raise UserError("kernels bench: TRITON_INTERPRET is set; the interpreter's speed says nothing, unset it")
    run_check(paths)
    from kernels.tools import bench as measure
    from kernels.tools import peers

    started = time.monotonic()
    device = torch.device("cuda")
    rows = list(_printed(measure.rows(device), _bench_line))
    metrics = {
        "rows": rows,
        "summary": measure.summary(rows),
        "op": measure.memory_reference_over_kernel(device),
        "tuned": measure.tuned_configs(),
        "driver": gpu_names(),
        "fla_core": peers.version() or "not installed",
    }
    label = device_label(device)
    _write(paths, paths.measured(device_slug(device)), "kernels", metrics, "bench", label, started)
    replace_block(paths.root / DOCS, BENCH_BLOCK, bench_table(metrics, label))
    if broken := [row for row in rows if row["status"] == "failed" and row["implementation"] in measure.OURS]:
        raise RunError(f"kernels bench: {len(broken)} rows failed, the first: {_bench_line(broken[0])}")


def run_resources(paths: Paths) -> None:
    """Write results/measured/compile/resources.json: {rows, source_sha256}; see kernels.tools.resources.rows.

    Raises:
        UserError: the interpreter is on.
    """
    _require_triton()
    if _interpreted():
        raise UserError("kernels resources: TRITON_INTERPRET is set; the interpreter compiles nothing, unset it")
    from kernels.tools import resources as compiler

    started = time.monotonic()
    metrics = {"rows": list(_printed(compiler.rows(), _resources_line)), "source_sha256": compiler.source_hash()}
    _write(paths, paths.measured("compile"), "resources", metrics, "resources", "none: compiled, not run", started)
    replace_block(paths.root / DOCS, RESOURCES_BLOCK, resources_table(metrics["rows"]))


def resources_table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: the default configs at chunk size 16 in bf16, a line for each kernel and target."""
    lines = ["| kernel | target | registers | stack bytes | shared bytes | LDL + STL | loop: instructions, shuffles, barriers |"]
    lines.append("|" + "---|" * 7)
    for row in rows:
        if row["default"] and row["config"]["chunk_size"] == 16 and row["dtype"] == "bf16":
            spills = row["instructions"]["LDL"] + row["instructions"]["STL"]
            inner = row["loops"][1:] if len(row["loops"]) > 1 else row["loops"]  # the backward kernel's outer one holds its two
            loops = "; ".join(f"{loop['instructions']}, {loop['SHFL']}, {loop['BAR']}" for loop in inner)
            numbers = f"{row['registers']} | {row['stack_bytes']} | {row['shared_bytes']} | {spills} | {loops}"
            lines.append(f"| {row['kernel'].removeprefix('ttt_linear_').replace('_', ' ')} | {row['target']} | {numbers} |")
    return "\n".join(lines)


def bench_table(metrics: dict[str, Any], label: str) -> str:
    """Markdown: the goals, then a line for each shape and pass with a column for each implementation, in milliseconds."""
    lines = [goals_table(metrics["summary"], label), ""]
    cells: dict[tuple, dict[str, dict]] = {}
    for row in metrics["rows"]:
        cells.setdefault((row["heads"], row["tokens"], row["passes"], row["batch"]), {})[row["implementation"]] = row
    names = list(dict.fromkeys(name for found in cells.values() for name in found))
    lines += ["Median milliseconds, bf16, both directions:", ""]
    lines += [f"| heads | T | passes | {' | '.join(names)} | share of copy | peak MiB |", "|" + "---|" * (len(names) + 5)]
    for (heads, tokens, passes, _), found in cells.items():
        times = [_number(found[name]["median_ms"], ".3f") if name in found else "–" for name in names]
        ours = found.get("triton", {})
        share, peak = _number(ours.get("share_of_copy_percent"), ".0f", " %"), _number(ours.get("peak_memory_mib"), ".0f")
        lines.append(f"| {heads} | {tokens} | {passes} | {' | '.join(times)} | {share} | {peak} |")
    return "\n".join(lines)


def goals_table(summary: dict[str, Any], label: str) -> str:
    """Markdown: what is asked at batch 64, T 6400, 3 heads, and what was measured on `label`; a dash for null."""
    lines = [f"| B 64, T 6400, 3 heads, both directions, bf16 | asked on an H200 | {label} |", "|---|---|---|"]
    for key, (what, asked, unit) in GOALS.items():
        lines.append(f"| {what} | {asked}{unit} | {_number(summary[key], '.2f' if unit == ' ×' else '.0f', unit)} |")
    return "\n".join(lines)


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels: the package triton is not installed; PyTorch's CUDA builds bring it (Linux)")


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
    detail = ""
    if "tokens" in row:  # else it broke off
        sizes = f"T {row['tokens']}, heads {row['heads']}, D {row['head_dim']}, chunk {row['chunk_size']}, {row['dtype']}"
        detail = f", {sizes}"
    if row.get("errors"):
        name, error = max(row["errors"].items(), key=lambda item: item[1] / row["limits"][item[0]])
        detail += f", nearest its limit: {name} {error:.1e} of {row['limits'][name]:.0e}"
    if row.get("not_finite"):
        detail += f", not finite: {', '.join(row['not_finite'])}"
    if row.get("reason"):
        detail += f", {row['reason']}"
    return f"{verdict}: {row['check']}{detail}"


def _bench_line(row: dict[str, Any]) -> str:
    what = f"T {row['tokens']}, heads {row['heads']}, {row['passes']}, {row['implementation']}"
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
