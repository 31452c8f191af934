"""The lines and Markdown tables that are made of rows: every number is in its place, and what is missing is a dash."""

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
