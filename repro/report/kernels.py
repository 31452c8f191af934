"""Tables of the kernels' times and goals, for results/speed.md."""

import importlib.util
from collections.abc import Mapping, Sequence

from ..bench.kernels import Row, read_bench
from ..core.paths import Paths
from .markdown import join, number, table
from .records import group_by

PAGE, _BLOCK = "results/speed.md", "kernels bench"  # the file, and the marker of the tables in it

_COPY = "share of the bandwidth of a copy"
# of the operators around the inner loops
_AROUND = "B 64, T 6400, 192 channels, bf16", {("forward", _COPY): 60}
# operator -> (its shape `COMPARED` in words, {(passes, reference of the comparison): target}); a target is a percentage
# of a copy's bandwidth, or a speed-up over the fastest kernel by others
GOALS: Mapping[str, tuple[str, Mapping[tuple[str, str], int]]] = {
    "ttt_linear": (
        "B 64, T 6400, 3 heads, both directions, bf16",
        {
            ("forward", "against the faster of flash-linear-attention's two"): 2,
            ("forward and backward", "against the faster of the two"): 2,
            ("forward", _COPY): 40,
        },
    ),
    "selective_scan": (
        "B 64, T 6400, 384 channels, 16 states, both directions, bf16",
        {("forward", "against mamba-ssm"): 1, ("forward and backward", "against mamba-ssm"): 1, ("forward", _COPY): 30},
    ),
    "bi_wkv": ("B 64, T 6400, 192 channels, bf16", {("forward", _COPY): 30}),
    "ms_deform_attn": ("B 16, T 4200, 12 heads of 32, one level, bf16", {("forward", _COPY): 15}),
    **dict.fromkeys(("conv_norm", "scan_convs", "gated_norm", "gated_linear"), _AROUND),
}


def make_passages(paths: Paths) -> list[tuple[str, str, str]]:
    """Return the tables as (page, marker, text), from results/speed/kernels; empty where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        return []
    measured = [read_bench(file) for file in sorted(paths.speed.glob("kernels/*.csv"))]
    return [(PAGE, _BLOCK, join(block for rows in measured or [[]] for block in _list_operators(rows)))]


def _list_operators(rows: Sequence[Row]) -> list[str]:
    """Return each operator's tables for one device: its goals with the measured values, then its times."""
    from kernels.tools.bench import MEMORY

    label = rows[0]["device"] if rows else "not measured yet (`repro kernels bench`, on a GPU)"
    blocks = []
    for name in GOALS:
        own = [row for row in rows if row["operator"] == name]
        blocks.append(tabulate_goals(name, own, label))
        if timed := [row for row in own if row["passes"] != MEMORY]:
            blocks += [f"Median milliseconds of `{name}`, bf16:", tabulate_times(timed)]
    return blocks


def tabulate_goals(name: str, rows: Sequence[Row], label: str) -> str:
    """Return a table of an operator's goals and the values that its rows reach at the goals' shape.

    Args:
        name: the operator.
        rows: its rows of one device.
        label: the device, as the heading of the values; a missing value is a dash.
    """
    from kernels.tools import bench
    from kernels.tools.operators import OPERATORS

    cases, (where, goals) = OPERATORS[name], GOALS[name]
    # times of the rows that have the goals' shape: putting its sizes into their key changes nothing
    times = {
        (row["passes"], row["implementation"]): row["median_ms"]
        for row in rows
        if bench.row_key(cases, row) == bench.row_key(cases, {**row, **vars(cases.COMPARED)})
    }
    lines = []
    for (passes, what), target in goals.items():
        which = bench.FORWARD if passes == "forward" else bench.BOTH_PASSES
        theirs = [ms for (of, other), ms in times.items() if of == which and other not in bench.OURS]
        with_whom = [times.get((which, "copy"))] if what == _COPY else theirs
        ours, found = times.get((which, "triton")), min(filter(None, with_whom), default=None)
        factor, form, unit = (100, ".0f", " %") if what == _COPY else (1, ".2f", " ×")
        reached = factor * found / ours if ours and found else None
        lines.append((f"{passes}, {what}", f"{target}{unit}", number(reached, form, unit)))
    return table([f"`{name}`, {where}", "target (H200)", label], lines)


def tabulate_times(rows: Sequence[Row]) -> str:
    """Return a table of one operator's median milliseconds, a line per shape and pass, a column per implementation."""
    width = "heads" if "heads" in rows[0] else "channels"
    names = list(dict.fromkeys(row["implementation"] for row in rows))

    def find_line(row: Row) -> tuple:
        """Return the key of a row's line; levels follow the tokens, and state_dim follows the width.

        It must hold every size in which two shapes of an operator differ: rows of one implementation with equal keys
        replace each other.
        """
        tokens = f"{row['tokens']}, L {row['levels']}" if "levels" in row else row["tokens"]
        size = f"{row[width]}, N {row['state_dim']}" if "state_dim" in row else row[width]
        return str(size), str(tokens), row["passes"], row["batch"]

    lines = []
    for line, own in group_by(rows, find_line).items():
        by_name = {row["implementation"]: row for row in own}
        ours = by_name.get("triton", {})
        times = [number(by_name.get(name, {}).get("median_ms"), ".3f") for name in names]
        share = number(ours.get("share_of_copy_percent"), ".0f", " %")
        lines.append([*line[:3], *times, share, number(ours.get("peak_memory_mib"), ".0f")])
    return table([width, "T", "passes", *names, "share of copy", "peak MiB"], lines)
