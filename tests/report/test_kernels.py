"""The tables of the kernels' times: every number is in its place, and what is missing is a dash."""

import json

import pytest

from kernels.tools.bench import BOTH_PASSES, FORWARD, OURS
from kernels.tools.operators import OPERATORS
from repro.report.kernels import GOALS, tabulate_goals, tabulate_times


def cells(table: str) -> list[list[str]]:
    """The cells of a table in Markdown, the line under its header left out."""
    rows = [line for line in table.splitlines() if not line.startswith("|---")]
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]
    assert len({len(line) for line in lines}) == 1, rows
    return lines


def bench_row(implementation, median_ms, operator="ttt_linear", **more):
    """As `bench.measure` returns it, at the shape that the goals of the operator are about."""
    shared = {"operator": operator, **vars(OPERATORS[operator].COMPARED), "passes": "forward", "median_ms": median_ms}
    return {"implementation": implementation, **shared, "share_of_copy_percent": None, "peak_memory_mib": None, **more}


def timed(operator, names, forward, both):
    """Rows of `bench.measure` at the compared shape, with these medians."""
    return [
        bench_row(name, ms, operator, passes=passes)
        for passes, times in ((FORWARD, forward), (BOTH_PASSES, both))
        for name, ms in zip(names, times, strict=True)
    ]


FLA, MAMBA = [*OURS, "fla chunk", "fla fused_chunk"], [*OURS, "mamba-ssm"]
MEASURED = timed("ttt_linear", FLA, (1.0, 2.0, 90.0, 5.0, 4.0), (2.0, 8.0, 90.0, 12.0, 20.0))
# the faster of two peers; forward, and both passes, against the peer; the copy's time over ours
REACHED = [
    ("ttt_linear", MEASURED, ["2.00 ×", "1.50 ×", "50 %"]),
    ("ttt_linear", [*MEASURED, bench_row("fla chunk", 0.1, tokens=196)], ["2.00 ×", "1.50 ×", "50 %"]),
    ("ttt_linear", timed("ttt_linear", FLA[:4], (1.0, 2.0, 90.0, None), (None,) * 4), ["–", "–", "50 %"]),
    ("ttt_linear", timed("ttt_linear", FLA[:4], (None, 2.0, 90.0, 5.0), (2.0, None, 90.0, 4.0)), ["2.50 ×", "–", "–"]),
    (
        "selective_scan",
        timed("selective_scan", MAMBA, (1.0, 4.0, 90.0, 5.0), (2.0, 4.0, 90.0, 2.0)),
        ["1.25 ×", "0.50 ×", "25 %"],
    ),
    ("bi_wkv", timed("bi_wkv", OURS, (1.0, 4.0, 90.0), (2.0, 5.0, 90.0)), ["25 %"]),
    *((name, [], ["–"] * len(GOALS[name][1])) for name in OPERATORS),
]


@pytest.mark.parametrize(("operator", "rows", "reached"), REACHED)
def test_goals_stand_beside_what_was_measured(operator, rows, reached):
    rows = json.loads(json.dumps(rows))  # as a record has them
    header, *lines = cells(tabulate_goals(operator, rows, "cuda: X"))
    where, goals = GOALS[operator]
    assert header == [f"`{operator}`, {where}", "target (H200)", "cuda: X"]
    targets = [f"{target} {line[1][-1]}" for line, target in zip(lines, goals.values(), strict=True)]
    assert [line[1:] for line in lines] == [list(pair) for pair in zip(targets, reached, strict=True)]


def test_times_have_a_column_for_each_implementation():
    rows = [
        bench_row("copy", 0.3),
        bench_row("triton", 0.6, share_of_copy_percent=50.2, peak_memory_mib=10.4),
        bench_row("fla chunk", None),
        bench_row("copy", 0.01, tokens=196),
    ]
    header, long, short = cells(tabulate_times(rows))
    assert header[:3] == ["heads", "T", "passes"] and header[3:6] == ["copy", "triton", "fla chunk"]
    sizes = vars(OPERATORS["ttt_linear"].COMPARED)
    assert long == [str(sizes["heads"]), str(sizes["tokens"]), "forward", "0.300", "0.600", "–", "50 %", "10"]
    assert short[1:] == ["196", "forward", "0.010", "–", "–", "–", "–"]
    # a further size that tells rows apart stands beside the one before it
    for operator, key, values, column, label in (
        ("ms_deform_attn", "levels", (1, 3), 1, f"{OPERATORS['ms_deform_attn'].COMPARED.tokens}, L"),
        ("selective_scan", "state_dim", (16, 1), 0, f"{OPERATORS['selective_scan'].COMPARED.channels}, N"),
    ):
        found = cells(tabulate_times([{**bench_row("triton", 1.0, operator), key: value} for value in values]))
        assert [row[column] for row in found[1:]] == [f"{label} {value}" for value in values]
