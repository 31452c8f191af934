"""The rows of `check` and `bench` as lines for the terminal, and as Markdown tables for the pages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .bench import MEMORY, summarise
from .cases import Cases
from .operators import OPERATORS

# what a row calls a size -> how a line prints it
SIZES = {"tokens": "T", "heads": "heads", "head_dim": "D", "levels": "levels", "chunk_size": "chunk"}
SIZES |= {"channels": "channels", "state_dim": "states"}


def format_check(row: Mapping[str, Any]) -> str:
    """A line for a row of `check.run`: the verdict, what was checked, and the error that comes nearest to its limit."""
    verdict = {True: "ok", False: "FAILED", None: "not run"}[row["passed"]]
    detail = f", {_sizes(row)}, {row['dtype']}" if "tokens" in row else ""  # a check that broke off has no sizes
    if row.get("errors"):
        name, error = max(row["errors"].items(), key=lambda item: item[1] / row["limits"][item[0]])
        detail += f", nearest its limit: {name} {error:.1e} of {row['limits'][name]:.0e}"
    if row.get("not_finite"):
        detail += f", not finite: {', '.join(row['not_finite'])}"
    if row.get("reason"):
        detail += f", {row['reason']}"
    return f"{verdict}: {row['operator']}, {row['check']}{detail}"


def format_bench(row: Mapping[str, Any]) -> str:
    """A line for a row of `bench.measure`."""
    what = f"{row['operator']}, {_sizes(row)}, {row['passes']}, {row['implementation']}"
    if row["status"] != "ok":
        return f"{what}: {row['status']} ({row['reason']})"
    spread = f"{row['median_ms']:.3f} ms ({row['p20_ms']:.3f} to {row['p80_ms']:.3f})"
    share = _number(row["share_of_copy_percent"], ".0f", " % of a copy")
    return f"{what}: {spread}, {row['gb_per_s']:.0f} GB/s, {share}, peak {row['peak_memory_mib']:.0f} MiB"


def bench_table(rows: Sequence[Mapping[str, Any]], label: str) -> str:
    """Markdown, for each operator: its goals, then the times of its rows."""
    parts = []
    for name, cases in OPERATORS.items():
        parts.append(goals_table(cases, summarise(cases, rows), label))
        if timed := [row for row in rows if row["operator"] == name and row["passes"] != MEMORY]:
            parts += [f"Median milliseconds of `{name}`, bf16:", times_table(timed)]
    return "\n\n".join(parts)


def goals_table(cases: Cases, summary: Mapping[str, Any], label: str) -> str:
    """Markdown: an operator's goals at their shape, and what was measured on `label`; a dash where nothing was."""
    lines = [f"| `{cases.NAME}`, {cases.AT} | target (H200) | {label} |", "|---|---|---|"]
    for key, (what, target, unit) in cases.GOALS.items():
        lines.append(f"| {what} | {target}{unit} | {_number(summary[key], '.2f' if unit == ' ×' else '.0f', unit)} |")
    return "\n".join(lines)


def times_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: one operator's median milliseconds, a line per shape and pass, a column per implementation."""
    cells: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        width = "heads" if "heads" in row else "channels"
        tokens = f"{row['tokens']}, L {row['levels']}" if "levels" in row else row["tokens"]
        size = f"{row[width]}, N {row['state_dim']}" if "state_dim" in row else row[width]
        cells.setdefault((size, tokens, row["passes"], row["batch"]), {})[row["implementation"]] = row
    names = list(dict.fromkeys(name for found in cells.values() for name in found))
    lines = [
        f"| {width} | T | passes | {' | '.join(names)} | share of copy | peak MiB |",
        "|" + "---|" * (len(names) + 5),
    ]
    for (size, tokens, passes, _), found in cells.items():
        times = [_number(found[name]["median_ms"], ".3f") if name in found else "–" for name in names]
        ours = found.get("triton", {})
        share = _number(ours.get("share_of_copy_percent"), ".0f", " %")
        peak = _number(ours.get("peak_memory_mib"), ".0f")
        lines.append(f"| {size} | {tokens} | {passes} | {' | '.join(times)} | {share} | {peak} |")
    return "\n".join(lines)


def _sizes(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{printed} {row[key]}" for key, printed in SIZES.items() if key in row)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{spec}}{unit}"
