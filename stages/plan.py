"""`repro plan`: what the parameters would run, for which tables and figures of the paper, and what it costs. Nothing is started."""

import shutil
from typing import Annotated

import typer

from repro.core.config import active_profile, find_profile
from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.ui import print_table

from . import Stage, load_stages

STAGE = Stage(purpose="check")


def command(
    profile: Annotated[str | None, typer.Option(help="Plan this profile instead of params.yaml.")] = None,
    img_per_s: Annotated[
        list[str] | None, typer.Option(metavar="MODEL=NUMBER", help="Training images per second on one GPU; may be repeated.")
    ] = None,
    tflops: Annotated[float, typer.Option(help="Peak of a GPU, for models of unknown speed (A100 in bf16: 312 TFLOP/s).")] = 312.0,
    utilisation: Annotated[float, typer.Option(help="The share of that peak that training reaches.")] = 0.3,
    gpus: Annotated[int, typer.Option(help="Number of GPUs that share the work.")] = 1,
) -> None:
    """Show what would run, for which table or figure, with its GPU-hours and disk space, before anything is started."""
    from repro.planning.planner import Rates, parse_rates, plan_costs

    if gpus < 1:
        raise UserError(f"plan: --gpus {gpus}: expected 1 or more")
    paths = find_root()
    file = paths.params if profile is None else find_profile(paths, profile)
    rates = Rates(given=parse_rates(img_per_s or []), tflops=tflops, utilisation=utilisation)
    plan = plan_costs(load_stages(), file, paths, rates)

    if profile is not None and active_profile(paths) != profile:
        print(f"first: repro profile use {profile}")
    table = []
    for row in plan.rows:
        places = ", ".join(f"{place} ({count})" for place, count in plan.find_places(row).items()) or "–"
        days = None if row.gpu_hours is None else row.gpu_hours / 24 / gpus
        table.append([row.command, places, *map(_format_number, (row.gpu_hours, days, row.disk_gb)), row.basis])
    print_table(["command", "for (numbers that need it)", "GPU-hours", f"days on {gpus}", "disk GB", "basis"], table)
    for note in dict.fromkeys(row.note for row in plan.rows if row.note):
        print(note)
    hours, disk_gb = plan.total("gpu_hours"), plan.total("disk_gb")
    ideal = f" if {gpus} GPUs are {gpus} times as fast as one" if gpus > 1 else " on one GPU"
    print(f"total: {_format_number(hours)} GPU-hours, {_format_number(hours / 24 / gpus)} days{ideal}; disk {_format_number(disk_gb)} GB")
    print(f"free disk here: {shutil.disk_usage(paths.root).free / 1e9:.0f} GB")
    if plan.unknown:
        print(f"of unknown cost, not in the total: {', '.join(plan.unknown)}")
    covered = ", ".join(f"{place} {ours} of {all_numbers}" for place, (ours, all_numbers) in plan.count_covered().items())
    print(f"the paper's numbers that could then be compared with ours: {covered}")


def _format_number(value: float | None) -> str:
    if not value:
        return "unknown" if value is None else "0"
    return "<0.1" if value < 0.05 else f"{value:,.1f}"
