"""The rows of `check`, `bench` and `resources` as lines for the terminal, and as Markdown tables for the pages."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

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


def format_resources(row: Mapping[str, Any]) -> str:
    """A line for a row of `resources.compile_row`."""
    config = ", ".join(f"{key} {value}" for key, value in row["config"].items() if value is not None)
    mark = "default, " if row["default"] else ""
    return (
        f"{row['kernel']}, {row['dtype']}, {row['target']}, {mark}{config}: {row['registers']} registers, {row['stack_bytes']} stack "
        f"bytes, {_spills(row)} spill instructions, {row['shared_bytes']} shared bytes, {row['instructions']['BAR']} barriers"
    )


def resources_table(rows: Iterable[Mapping[str, Any]], others: Mapping[str, Iterable[Mapping[str, Any]]] = {}) -> str:
    """Markdown: a line for each kernel and target, of the default configs in bf16, at chunk size 16 if any.

    `others`: Triton's version -> the rows that it gives, of which registers and stack bytes are shown.
    """
    more = "".join(f" Triton {version}: registers, stack bytes |" for version in others)
    by_label = {version: {_label(row): row for row in theirs} for version, theirs in others.items()}
    lines = [
        f"| kernel | target | registers | stack bytes | shared bytes | LDL + STL | loop: instructions, shuffles, barriers |{more}"
    ]
    lines.append("|" + "---|" * (7 + len(others)))
    for row in rows:
        if _is_shown(row) and row["dtype"] == "bf16":
            first, rest = row["loops"][:1], row["loops"][1:]
            # it is the loop over groups
            holds_the_rest = rest and first[0]["instructions"] > sum(loop["instructions"] for loop in rest)
            shown = rest if holds_the_rest else row["loops"]
            loops = "; ".join(f"{loop['instructions']}, {loop['SHFL']}, {loop['BAR']}" for loop in shown) or "none"
            numbers = f"{row['registers']} | {row['stack_bytes']} | {row['shared_bytes']} | {_spills(row)} | {loops}"
            states = f", N {row['config']['state_dim']}" if "state_dim" in row["config"] else ""
            found = [theirs.get(_label(row)) for theirs in by_label.values()]
            beside = "".join(f" {other['registers']}, {other['stack_bytes']} |" if other else " – |" for other in found)
            lines.append(f"| `{row['operator']}` {_pass(row)}{states} | {row['target']} | {numbers} |{beside}")
    return "\n".join(lines)


def describe_spills(rows: Iterable[Mapping[str, Any]], others: Mapping[str, Iterable[Mapping[str, Any]]] = {}) -> str:
    """How many rows spill registers to memory, of all and of the default configs; of these by operator, pass and dtype.

    Then the default configurations of TTT-Linear at chunk size 16, each with its stack bytes and the share of
    instructions that are spills, also by `others`: Triton's version -> the rows that it gives.
    """
    listed = list(rows)
    default = [row for row in listed if row["default"]]
    spilling = [[row for row in group if row["stack_bytes"] or _spills(row)] for group in (listed, default)]
    counts = Counter(f"`{row['operator']}` {_pass(row)} in {row['dtype']}" for row in spilling[1])
    named = "; ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
    every = f"Of the {len(listed)} rows, one for each kernel, configuration, dtype and target, {len(spilling[0])} spill"
    parts = [
        f"{every}; of the {len(default)} of default configurations, {len(spilling[1])}{f' ({named})' if named else ''}."
    ]
    for version, group in {"": default, **others}.items():
        chosen = [row for row in group if _is_shown(row) and row["dtype"] != "fp16"]
        named = (f"`{row['operator']}` {_pass(row)} {row['dtype']} {row['target']}" for row in chosen)
        spilled = [f"{name}: {_cost(row)}" for name, row in zip(named, chosen, strict=True) if row["stack_bytes"]]
        by = f" under Triton {version}" if version else ""
        parts.append(
            f"Of those in fp32 and bf16, with chunks of 16 where there are chunks, {len(spilled)} of {len(chosen)} spill{by}"
            + (f": {'; '.join(spilled)}." if spilled else ".")
        )
    return "\n\n".join(parts)


def bench_table(metrics: Mapping[str, Any], label: str) -> str:
    """Markdown, for each operator of `summary`: its goals, then the times of its rows."""
    parts = []
    for name, summary in metrics["summary"].items():
        parts.append(goals_table(OPERATORS[name], summary, label))
        if rows := [row for row in metrics["rows"] if row["operator"] == name]:
            parts += [f"Median milliseconds of `{name}`, bf16:", times_table(rows)]
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


def _is_shown(row: Mapping[str, Any]) -> bool:
    """Whether it is of a default config, at chunk size 16 where there are chunks."""
    return row["default"] and row["config"].get("chunk_size", 16) == 16


def _sizes(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{printed} {row[key]}" for key, printed in SIZES.items() if key in row)


def _label(row: Mapping[str, Any]) -> tuple:
    """What a row is of, whatever config the version of Triton takes by default."""
    config = row["config"]
    sizes = [(key, config[key]) for key in ("chunk_size", "state_dim", "gate", "sequences") if key in config]
    return row["kernel"], row["dtype"], row["target"], tuple(sizes) if row["default"] else str(config)


def _cost(row: Mapping[str, Any]) -> str:
    """Bytes, and how many loads and stores of spilled registers there are for each hundred instructions in loops."""
    instructions = max((loop["instructions"] for loop in row["loops"]), default=0)
    share = f", {100 * _spills(row) / instructions:.1f} per 100 instructions" if instructions else ""
    return f"{row['stack_bytes']} B{share}"


def _pass(row: Mapping[str, Any]) -> str:
    return row["kernel"].removeprefix(f"{row['operator']}_").replace("_", " ")


def _spills(row: Mapping[str, Any]) -> int:
    return row["instructions"]["LDL"] + row["instructions"]["STL"]


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{spec}}{unit}"
