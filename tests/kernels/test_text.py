"""The lines and Markdown tables that are made of rows: every number is in its place, and what is missing is a dash."""

import re

from kernels.tools import text
from kernels.tools.operators import OPERATORS


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, the line under its header left out."""
    rows = [line for line in table.splitlines() if not line.startswith("|---")]
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]
    assert len({len(line) for line in lines}) == 1, table
    return lines


def bench_row(implementation, median_ms, operator="ttt_linear", **more):
    """As `bench.measure` returns it, at the shape that the goals of the operator are about."""
    shared = {"operator": operator, **vars(OPERATORS[operator].COMPARED), "passes": "forward", "median_ms": median_ms}
    return {"implementation": implementation, **shared, "share_of_copy_percent": None, "peak_memory_mib": None, **more}


def test_a_line_for_each_verdict_of_a_check():
    shared = {"operator": "ttt_linear", "check": "a config", "tokens": 17, "dtype": "fp32", "head_dim": 64}
    errors = {"errors": {"out": 1e-7, "q": 2e-6}, "limits": {"out": 1e-5, "q": 1e-3}, "not_finite": []}
    failed = {**errors, "not_finite": ["k"], "passed": False}
    given = {**errors, "passed": True}, failed, {"passed": None, "reason": "not installed"}
    lines = [text.format_check({**shared, **more}) for more in given]
    assert [line.split(": ")[0] for line in lines] == ["ok", "FAILED", "not run"]
    # out is at 1 % of its limit, q at 0.2 %
    parts = ("out 1.0e-07 of 1e-05", "not finite: k", "not installed")
    assert all("T 17, D 64, fp32" in line and part in line for line, part in zip(lines, parts, strict=True))


def test_goals_stand_beside_what_was_measured():
    for cases in OPERATORS.values():
        summary = dict.fromkeys(cases.GOALS, None) | {next(iter(cases.GOALS)): 2.345}
        header, *rows = cells(text.goals_table(cases, summary, "cuda: X"))
        assert header == [f"`{cases.NAME}`, {cases.AT}", "target (H200)", "cuda: X"]
        assert [row[:2] for row in rows] == [[what, f"{target}{unit}"] for what, target, unit in cases.GOALS.values()]
        _, _, unit = next(iter(cases.GOALS.values()))
        first = f"2.35{unit}" if unit == " ×" else f"2{unit}"
        assert [row[2] for row in rows] == [first, *["–"] * (len(cases.GOALS) - 1)]


def test_times_have_a_column_for_each_implementation():
    rows = [
        bench_row("copy", 0.3),
        bench_row("triton", 0.6, share_of_copy_percent=50.2, peak_memory_mib=10.4),
        bench_row("fla chunk", None),
        bench_row("copy", 0.01, tokens=196),
    ]
    header, long, short = cells(text.times_table(rows))
    assert header[:3] == ["heads", "T", "passes"] and header[3:6] == ["copy", "triton", "fla chunk"]
    sizes = vars(OPERATORS["ttt_linear"].COMPARED)
    assert long == [str(sizes["heads"]), str(sizes["tokens"]), "forward", "0.300", "0.600", "–", "50 %", "10"]
    assert short[1:] == ["196", "forward", "0.010", "–", "–", "–", "–"]
    # a further size that tells rows apart stands beside the one before it
    for operator, key, values, column, label in (
        ("ms_deform_attn", "levels", (1, 3), 1, f"{OPERATORS['ms_deform_attn'].COMPARED.tokens}, L"),
        ("selective_scan", "state_dim", (16, 1), 0, f"{OPERATORS['selective_scan'].COMPARED.channels}, N"),
    ):
        found = cells(text.times_table([{**bench_row("triton", 1.0, operator), key: value} for value in values]))
        assert [row[column] for row in found[1:]] == [f"{label} {value}" for value in values]


def compiled(operator="ttt_linear", kernel="ttt_linear_forward", **more):
    """As `resources.compile_row` returns it: what a default config in bf16 compiles to."""
    shared = {"operator": operator, "kernel": kernel, "default": True, "dtype": "bf16", "target": "sm_90", "loops": []}
    shared |= {"config": {"chunk_size": 16, "num_warps": 4}, "registers": 168, "stack_bytes": 0, "shared_bytes": 8192}
    return {**shared, "instructions": {"LDL": 0, "STL": 0, "BAR": 30}, **more}


def test_resources_show_default_configs_in_bf16_and_the_loops_of_a_chunk():
    counts = ((900, 40, 20), (500, 20, 10), (300, 12, 8))
    groups, first, second = ({"instructions": n, "SHFL": s, "BAR": b} for n, s, b in counts)
    spilled = {"instructions": {"LDL": 1, "STL": 2, "BAR": 30}}
    rows = [
        compiled(loops=[first], **spilled),
        compiled(kernel="ttt_linear_backward", loops=[groups, first, second], **spilled),
        compiled(kernel="ttt_linear_backward", default=False),
        compiled(dtype="fp16"),
        compiled(config={"chunk_size": 64}),
        compiled("bi_wkv", "bi_wkv_forward", config={"channels": 192}, loops=[second, first], **spilled),
    ]
    header, *found = cells(text.resources_table(rows))
    assert [row[0] for row in found] == ["`ttt_linear` forward", "`ttt_linear` backward", "`bi_wkv` forward"]
    assert all(row[1:-1] == ["sm_90", "168", "0", "8192", "3"] for row in found) and len(header) == len(found[0])
    # a loop that is longer than all others together holds them, and is left out
    assert [row[-1] for row in found] == ["500, 20, 10", "500, 20, 10; 300, 12, 8", "300, 12, 8; 500, 20, 10"]
    line = text.format_resources(rows[1])
    assert all(part in line for part in ("168 registers", "3 spill instructions", "chunk_size 16"))


def test_other_versions_stand_beside_the_locked_one():
    """A row of another version of Triton is found whatever its config; what it lacks is a dash."""
    loop = {"instructions": 400, "BAR": 0, "SHFL": 0}
    rows = [compiled(target=target, loops=[loop]) for target in ("sm_80", "sm_90")]
    other = {**rows[1], "registers": 160, "stack_bytes": 8, "config": {"chunk_size": 16, "num_warps": 8}}
    other |= {"instructions": {"LDL": 3, "STL": 1}}
    header, *found = cells(text.resources_table(rows, {"3.6.0": [other]}))
    assert header[-1].startswith("Triton 3.6.0") and [row[-1] for row in found] == ["–", "160, 8"]
    said = text.describe_spills(rows, {"3.6.0": [other]})
    assert "0 of 2" in said and all(part in said for part in ("1 of 1", "3.6.0", "sm_90", "8 B", "1.0 per 100"))


def test_spills_are_counted_of_all_rows_and_of_the_default_ones():
    spilled = {"instructions": {"LDL": 2, "STL": 0}}
    rows = [compiled(), compiled(stack_bytes=8), compiled(**spilled), compiled(default=False, **spilled)]
    assert [int(n) for n in re.findall(r"\b\d\b", text.describe_spills(rows))][:5] == [4, 3, 3, 2, 2]
    assert [int(n) for n in re.findall(r"\b\d\b", text.describe_spills(rows[:1]))][:4] == [1, 0, 1, 0]
