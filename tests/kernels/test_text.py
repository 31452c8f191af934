"""The lines and Markdown tables that are made of rows: every number is in its place, and what is missing is a dash."""

import re

from kernels.tools import text
from kernels.tools.operators import OPERATORS


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, the line under its header left out."""
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in table.splitlines()
        if not line.startswith("|---")
    ]
    assert len({len(line) for line in lines}) == 1, table
    return lines


def bench_row(implementation, median_ms, operator="ttt_linear", **more):
    """As `bench.rows` yields it, at the shape that the goals of the operator are about."""
    shared = {"operator": operator, **vars(OPERATORS[operator].COMPARED), "passes": "forward", "median_ms": median_ms}
    return {"implementation": implementation, **shared, "share_of_copy_percent": None, "peak_memory_mib": None, **more}


def test_a_line_for_each_verdict_of_a_check():
    sizes = {"operator": "ttt_linear", "tokens": 17, "heads": 1, "dtype": "fp32", "head_dim": 64}
    errors = {"errors": {"out": 1e-7, "q": 2e-6}, "limits": {"out": 1e-5, "q": 1e-3}}
    lines = [
        text.format_check({"check": "default config", **sizes, **errors, "not_finite": [], "passed": True}),
        text.format_check({"check": "default config", **sizes, **errors, "not_finite": ["k"], "passed": False}),
        text.format_check({"check": "a peer", **sizes, "passed": None, "reason": "not installed"}),
        text.format_check(
            {"operator": "ttt_linear", "check": "a config", "passed": False, "reason": "ValueError: shared memory"}
        ),
    ]
    assert [line.split(": ")[0] for line in lines] == ["ok", "FAILED", "not run", "FAILED"]
    # out is at 1 % of its limit, q at 0.2 %
    assert (
        all("T 17, heads 1, D 64, fp32" in line for line in lines[:3])
        and "nearest its limit: out 1.0e-07 of 1e-05" in lines[0]
    )
    assert (
        lines[1].endswith("not finite: k")
        and lines[2].endswith("not installed")
        and lines[3].endswith("a config, ValueError: shared memory")
    )


def test_goals_stand_beside_what_was_measured():
    for cases in OPERATORS.values():
        summary = dict.fromkeys(cases.GOALS, None) | {next(iter(cases.GOALS)): 2.345}
        header, *rows = cells(text.goals_table(cases, summary, "cuda: X"))
        assert header == [f"`{cases.NAME}`, {cases.AT}", "target (H200)", "cuda: X"]
        assert [row[:2] for row in rows] == [[what, f"{target}{unit}"] for what, target, unit in cases.GOALS.values()]
        _, _, unit = next(iter(cases.GOALS.values()))
        assert [row[2] for row in rows] == [
            f"2.35{unit}" if unit == " ×" else f"2{unit}",
            *["–"] * (len(cases.GOALS) - 1),
        ]


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
    by_levels = cells(text.times_table([{**bench_row("triton", 1.0, "ms_deform_attn"), "levels": n} for n in (1, 3)]))
    by_states = cells(
        text.times_table([{**bench_row("triton", 1.0, "selective_scan"), "state_dim": n} for n in (16, 1)])
    )
    assert [row[0] for row in by_states[1:]] == [
        f"{OPERATORS['selective_scan'].COMPARED.channels}, N {n}" for n in (16, 1)
    ]
    assert [row[1] for row in by_levels[1:]] == [
        f"{OPERATORS['ms_deform_attn'].COMPARED.tokens}, L {n}" for n in (1, 3)
    ]


def test_the_tables_of_all_operators_follow_each_other():
    summary = {name: dict.fromkeys(OPERATORS[name].GOALS) for name in ("bi_wkv", "ttt_linear")}
    rows = [bench_row("triton", 0.25, "bi_wkv", share_of_copy_percent=40.4)]
    parts = text.bench_table({"rows": rows, "summary": summary}, "cuda: X").split("\n\n")
    goals = [text.goals_table(OPERATORS[name], summary[name], "cuda: X") for name in summary]
    assert parts == [goals[0], "Median milliseconds of `bi_wkv`, bf16:", text.times_table(rows), goals[1]]


def test_resources_show_default_configs_in_bf16_and_the_loops_of_a_chunk():
    shared = {
        "default": True,
        "dtype": "bf16",
        "config": {"chunk_size": 16, "num_warps": 4},
        "registers": 168,
        "stack_bytes": 0,
    }
    shared |= {
        "operator": "ttt_linear",
        "shared_bytes": 8192,
        "instructions": {"LDL": 1, "STL": 2, "BAR": 30},
        "target": "sm_90",
    }
    groups, first, second = (
        {"instructions": n, "SHFL": s, "BAR": b} for n, s, b in ((900, 40, 20), (500, 20, 10), (300, 12, 8))
    )
    rows = [
        {**shared, "kernel": "ttt_linear_forward", "loops": [first]},
        {**shared, "kernel": "ttt_linear_backward", "loops": [groups, first, second]},
        {**shared, "kernel": "ttt_linear_backward", "default": False},
        {**shared, "kernel": "ttt_linear_forward", "dtype": "fp16"},
        {**shared, "kernel": "ttt_linear_forward", "config": {"chunk_size": 64}},
        {
            **shared,
            "operator": "bi_wkv",
            "kernel": "bi_wkv_forward",
            "config": {"channels": 192},
            "loops": [second, first],
        },
    ]
    scan = {**shared, "operator": "selective_scan", "kernel": "selective_scan_forward", "loops": [first]}
    by_states = cells(text.resources_table([{**scan, "config": {"state_dim": n}} for n in (16, 1)]))
    assert [row[0] for row in by_states[1:]] == [f"`selective_scan` forward, N {n}" for n in (16, 1)]
    header, *found = cells(text.resources_table(rows))
    assert [row[0] for row in found] == ["`ttt_linear` forward", "`ttt_linear` backward", "`bi_wkv` forward"]
    assert all(row[1:-1] == ["sm_90", "168", "0", "8192", "3"] for row in found) and len(header) == len(found[0])
    # a loop that is longer than all others together holds them, and is left out
    assert [row[-1] for row in found] == ["500, 20, 10", "500, 20, 10; 300, 12, 8", "300, 12, 8; 500, 20, 10"]
    line = text.format_resources(rows[1])
    assert "168 registers" in line and "3 spill instructions" in line and "chunk_size 16" in line


def test_other_versions_stand_beside_the_locked_one():
    """A row of another version of Triton is found whatever its config; what it lacks is a dash."""
    shared = {
        "dtype": "bf16",
        "default": True,
        "stack_bytes": 0,
        "shared_bytes": 1,
        "instructions": {"LDL": 0, "STL": 0},
    }
    loops = [{"instructions": 400, "BAR": 0, "SHFL": 0}]
    shared |= {"operator": "ttt_linear", "kernel": "ttt_linear_forward", "loops": loops}
    rows = [
        {**shared, "target": target, "registers": 168, "config": {"chunk_size": 16, "num_warps": 4}}
        for target in ("sm_80", "sm_90")
    ]
    other = {**rows[1], "registers": 160, "stack_bytes": 8, "config": {"chunk_size": 16, "num_warps": 8}}
    other |= {"instructions": {"LDL": 3, "STL": 1}}
    header, *found = cells(text.resources_table(rows, {"3.6.0": [other]}))
    assert header[-1] == "Triton 3.6.0: registers, stack bytes" and [row[-1] for row in found] == ["–", "160, 8"]
    said = text.describe_spills(rows, {"3.6.0": [other]})
    assert "0 of 2" in said and all(part in said for part in ("1 of 1", "3.6.0", "sm_90", "8 B", "1.0 per 100"))


def test_spills_are_counted_of_all_rows_and_of_the_default_ones():
    about = {
        "operator": "bi_wkv",
        "kernel": "bi_wkv_backward",
        "dtype": "fp32",
        "stack_bytes": 0,
        "config": {},
        "target": "sm_90",
        "loops": [],
    }
    none, spilled = ({"LDL": count, "STL": 0} for count in (0, 2))
    rows = [
        {**about, "default": True, "instructions": none},
        {**about, "default": True, "instructions": none, "stack_bytes": 8},
        {**about, "default": True, "instructions": spilled},
        {**about, "default": False, "instructions": spilled},
    ]
    assert [int(n) for n in re.findall(r"\b\d\b", text.describe_spills(rows))][:5] == [4, 3, 3, 2, 2]
    assert [int(n) for n in re.findall(r"\b\d\b", text.describe_spills(rows[:1]))][:4] == [1, 0, 1, 0]
