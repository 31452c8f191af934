"""`repro plan`: what the parameters would run, for which tables and figures of the paper, and what it costs. Nothing is
started.
"""

import shutil
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from repro.core.config import active_profile, find_profile, load_yaml
from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.runtime import PEAK_TFLOPS, find_peak
from repro.core.ui import print_table

from . import Stage, load_stages

STAGE = Stage(purpose="check")


def command(
    profile: Annotated[str | None, typer.Option(help="Plan this profile instead of params.yaml.")] = None,
    img_per_s: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=NUMBER", help="Training images per second on one device; may be repeated."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Plan for this GPU, e.g. H100. Default: the device here; A100 for a profile in bf16."
        ),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Peak of the GPU, for models of unknown speed. Default: by its data sheet.")
    ] = None,
    utilisation: Annotated[float, typer.Option(help="The share of that peak that training reaches.")] = 0.3,
    gpus: Annotated[int, typer.Option(help="Number of GPUs that share the work.")] = 1,
) -> None:
    """Show what would run, for which table or figure, with its time and disk space, before anything is started."""
    from repro.core.record import read_json
    from repro.planning.planner import Rates, parse_rates, plan_costs
    from repro.report.answer import PIPELINE_FILE

    if gpus < 1:
        raise UserError(f"plan: --gpus {gpus}: expected 1 or more")
    paths = find_root()
    file = paths.params if profile is None else find_profile(paths, profile)
    given = parse_rates(img_per_s or [])
    name, planned_for = (gpu, f"{gpu}, as asked") if gpu else _choose_device(load_yaml(file))
    if name and tflops is None:
        tflops = find_peak(name)
        if tflops is None:
            raise UserError(
                f"plan: {name}: its peak is not in our table ({', '.join(PEAK_TFLOPS)}); say it with --tflops"
            )
    rates = Rates(given=given, gpu=name, tflops=1.0 if tflops is None else tflops, utilisation=utilisation)
    if name is None and (gpus > 1 or tflops is not None):
        raise UserError(
            f"plan: --gpus and --tflops are of GPUs, and the plan is for {planned_for}; name a GPU with --gpu"
        )
    plan = plan_costs(load_stages(), file, paths, rates)

    if profile is not None and active_profile(paths) != profile:
        print(f"first: repro profile use {profile}")
    table = []
    for row in plan.rows:
        places = ", ".join(f"{place} ({count})" for place, count in plan.find_places(row).items()) or "–"
        table.append(
            [row.command, places, *map(_format_number, (*_times(row.hours, name, gpus), row.disk_gb)), row.basis]
        )
    header = ["GPU-hours", f"days on {gpus}"] if name else ["CPU minutes"]
    print_table(["command", "for (numbers that need it)", *header, "disk GB", "basis"], table)
    for note in dict.fromkeys(row.note for row in plan.rows if row.note):
        print(note)
    times, disk = _times(plan.total("hours"), name, gpus), f"disk {_format_number(plan.total('disk_gb'))} GB"
    print(f"planned for: {planned_for}")
    if name:
        ideal = f" if {gpus} GPUs are {gpus} times as fast as one" if gpus > 1 else " on one GPU"
        print(f"total: {_format_number(times[0])} GPU-hours, {_format_number(times[1])} days{ideal}; {disk}")
    else:
        print(f"total of what is known: {_format_number(times[0])} minutes, one stage after another; {disk}")
        if (pipeline := paths.results / PIPELINE_FILE).is_file():
            noted = read_json(pipeline)
            print(f"the last run of all stages: {noted['seconds'] / 60:.1f} minutes, {noted['jobs']} at once")
    print(f"free disk here: {shutil.disk_usage(paths.root).free / 1e9:.0f} GB")
    if plan.unknown:
        named = ", ".join(plan.unknown) if len(plan.unknown) <= 4 else f"{len(plan.unknown)} of {len(plan.rows)} rows"
        print(f"of unknown cost, not in the total: {named}")
    covered = ", ".join(
        f"{place} {ours} of {all_numbers}" for place, (ours, all_numbers) in plan.count_covered().items()
    )
    print(f"the paper's numbers that could then be compared with ours: {covered}")


def _choose_device(profile: Mapping[str, Any]) -> tuple[str | None, str]:
    """A GPU, or None for the CPU, that work is planned for where none is asked for; and that in words."""
    import torch

    from repro.core.runtime import cpu_name

    if torch.cuda.is_available() and profile.get("runtime", {}).get("device") != "cpu":
        name = torch.cuda.get_device_name()
        return name, f"{name}, the GPU here"
    cells = [
        cell
        for section in profile.values()
        if isinstance(section, dict)
        for cell in section.values()
        if isinstance(cell, dict)
    ]
    if any(cell.get("precision") in ("bf16", "fp16") for cell in cells):
        return (
            "A100",
            "one A100, since the profile trains in bf16 or fp16 and there is no GPU here; --gpu names another",
        )
    return None, f"the CPU here, {cpu_name()}"


def _times(hours: float | None, gpu: str | None, gpus: int) -> tuple[float | None, ...]:
    if gpu is None:
        return (None if hours is None else hours * 60,)
    return hours, None if hours is None else hours / 24 / gpus


def _format_number(value: float | None) -> str:
    if not value:
        return "unknown" if value is None else "0"
    return "<0.1" if value < 0.05 else f"{value:,.1f}"
