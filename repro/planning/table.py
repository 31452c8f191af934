"""The plan as it is printed: rows and totals, what its marks mean, and the paper's places, in 120 columns."""

import math
import shutil
import textwrap
from collections.abc import Sequence

from ..core.paths import Paths
from ..core.record import read_json
from ..core.ui import print_table
from ..report.answer import PIPELINE_FILE
from .planner import PASSES, CostPlan, PlanRow, Rates

WIDTH = 120  # of what is printed, in characters
MARKS = "≥ the same for a detector or segmenter, without its heads", "≤ the time after which every row is stopped"


def print_plan(plans: Sequence[CostPlan], devices: Sequence[Rates], count: int, paths: Paths) -> None:
    """Print the plans of one params file, one for each of `devices` or one of the CPU; `count` GPUs share the work."""
    names = [each.gpu for each in devices if each.gpu]
    _print_rows(plans, names, count)
    _print_legend(plans, devices)
    if not names and (pipeline := paths.results / PIPELINE_FILE).is_file():
        noted = read_json(pipeline)
        print(f"the last run of all stages: {noted['seconds'] / 60:.1f} minutes, {noted['jobs']} at once")
    free_gb = shutil.disk_usage(paths.root).free / 1e9
    print(f"disk: {_format(plans[0].total('disk_gb'))} GB; free here: {free_gb:.0f} GB")
    if unknown := [command.removeprefix("dvc repro ") for command in plans[0].unknown]:
        named = ", ".join(unknown) if len(unknown) <= 3 else f"{len(unknown)} of {len(plans[0].rows)} rows"
        print(f"of unknown time or disk, not in the total: {named}")
    print()
    _print_places(plans, names)


def _print_rows(plans: Sequence[CostPlan], gpus: Sequence[str], count: int) -> None:
    """A line for each row of the plans, with its hours on each GPU or its minutes on the CPU, and the totals."""
    table = []
    for rows in zip(*(plan.rows for plan in plans), strict=True):
        times = [_format_time(row.hours, gpus, row.mark) for row in rows]
        memory = [_format_memory(rows[0])] if gpus else []
        name = rows[0].command.removeprefix("dvc repro ")
        table.append([name, *times, *memory, _format(rows[0].disk_gb), rows[0].basis])
    totals = [plan.total("hours") for plan in plans]
    blank = [""] if gpus else []
    disk = _format(plans[0].total("disk_gb"))
    table.append(["total of what is known", *(_format_time(hours, gpus) for hours in totals), *blank, disk, ""])
    if gpus:
        named = "days on one GPU" if count == 1 else f"days on {count} GPUs"
        ideal = "" if count == 1 else f"if {count} are {count} times as fast"
        table.append([named, *(_format(hours / 24 / count) for hours in totals), "", "", ideal])
    header = [*(f"{gpu} h" for gpu in gpus), "GPU GiB"] if gpus else ["CPU minutes"]
    print_table(["dvc repro", *header, "disk GB", "basis"], table)


def _print_legend(plans: Sequence[CostPlan], devices: Sequence[Rates]) -> None:
    """What the marks and the numbers mean, and where the measured ones are from."""
    rows = [row for plan in plans for row in plan.rows]
    marks = {row.mark for row in rows}
    if devices:
        if marks & {"~", "≥"}:
            peaks = ", ".join(f"{each.gpu} {each.tflops:g}" for each in devices)
            share = f"{100 * devices[0].utilisation:g} %"
            passes = f"the multiply-adds of {PASSES} forward passes a step at {share} of the bf16 peak"
            print(f"~ estimated, not measured: {passes}")
            print(f"  (TFLOP/s: {peaks}); at half that share, twice the hours; small models may reach less")
        for line in (each for each in MARKS if each[0] in marks):
            print(line)
        if any(row.basis.endswith("images") for row in rows):
            print("images: seeds × epochs × images of an epoch; evaluations are not counted")
        if unmeasured := [row for row in plans[0].rows if row.measure and row.memory_gib is None]:
            print("GPU GiB: at least (≥) the weights, gradients and moments of AdamW in fp32; activations come on top,")
            print("  and were not measured. A training on a GPU records its speed and memory; for the first such row:")
            print(f"  {unmeasured[0].measure}")
    for note in dict.fromkeys(line for row in rows for line in row.note.splitlines()):
        print(note)


def _print_places(plans: Sequence[CostPlan], gpus: Sequence[str]) -> None:
    """A line for each table or figure: its numbers that could be compared, and the time that these need."""
    table, without = [], []
    for place, (ours, every) in plans[0].count_covered().items():
        hours = [sum(row.hours or 0.0 for row in plan.find_rows(place)) for plan in plans]
        if ours or any(hours):
            table.append([place, f"{ours} of {every}", *(_format_time(each, gpus) for each in hours)])
        else:
            without.append(place)
    header = [f"{gpu} h" for gpu in gpus] if gpus else ["CPU minutes"]
    print_table(["the paper's", "numbers that could then be compared with ours", *header], table)
    print("(a stage or cell counts for every table and figure that needs it)")
    if without:
        print(textwrap.fill(f"without any such number: {', '.join(without)}", WIDTH))


def _format_time(hours: float | None, gpus: Sequence[str], mark: str = "") -> str:
    """Hours on GPUs, minutes on a CPU; what is below 0.01 or unknown has no mark."""
    text = _format(hours if gpus or hours is None else hours * 60)
    return text if text.startswith(("<", "u")) else mark + text


def _format_memory(row: PlanRow) -> str:
    """The GiB of a training; a lower bound is rounded down, or it would be none."""
    if row.least_memory_gib is None:
        return "–"
    if row.memory_gib is not None:
        return f"{row.memory_gib:.2f}"
    places = 2 if row.least_memory_gib >= 0.01 else 4
    return f"≥{math.floor(10**places * row.least_memory_gib) / 10**places:.{places}f}"


def _format(value: float | None) -> str:
    """About two digits."""
    if not value:
        return "unknown" if value is None else "0"
    if value < 0.01:
        return "<0.01"
    return f"{value:.2f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
