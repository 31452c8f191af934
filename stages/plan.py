"""`repro plan`: what the parameters would run, for which tables and figures of the paper, and what it costs. Nothing is
started.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from repro.core.config import active_profile, find_profile, load_yaml
from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.runtime import PEAK_TFLOPS, find_peak

from . import Stage, load_stages

STAGE = Stage(purpose="check", records=False)
GPUS = ("RTX 4090", "A100", "H100")  # that a profile for GPUs is planned for where there is none


def command(
    profile: Annotated[str | None, typer.Option(help="Plan this profile instead of params.yaml.")] = None,
    img_per_s: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=NUMBER", help="Training images per second on one device; may be repeated."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Plan for this GPU, e.g. H100; may be repeated. Default: the device here; for a profile in bf16 without "
            f"a GPU here, {', '.join(GPUS)}.",
        ),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Peak of the GPU, for models of unknown speed. Default: by its data sheet.")
    ] = None,
    utilisation: Annotated[float, typer.Option(help="The share of that peak that training reaches.")] = 0.3,
    gpus: Annotated[int, typer.Option(help="Number of GPUs that share the work.")] = 1,
) -> None:
    """Show what would run, for which table or figure, with its time, GPU memory and disk space, before anything is
    started.
    """
    from repro.planning.planner import Rates, parse_rates, plan_costs
    from repro.planning.table import print_plan

    if gpus < 1:
        raise UserError(f"plan: --gpus {gpus}: expected 1 or more")
    paths = find_root()
    file = paths.params if profile is None else find_profile(paths, profile)
    given = parse_rates(img_per_s or [])
    names, planned_for = (gpu, "as asked") if gpu else _choose_devices(load_yaml(file))
    if not names and (gpus > 1 or tflops is not None):
        raise UserError(
            f"plan: --gpus and --tflops are of GPUs, and the plan is for {planned_for}; name a GPU with --gpu"
        )
    if len(names) > 1 and (given or tflops is not None):
        raise UserError(
            f"plan: --img-per-s and --tflops are of one GPU, and the plan is for {', '.join(names)}; name one with --gpu"
        )
    devices = [Rates(given=given, gpu=name, tflops=_find_peak(name, tflops), utilisation=utilisation) for name in names]
    plans = plan_costs(load_stages(), file, paths, devices or [Rates(given=given, gpu=None, utilisation=utilisation)])

    if profile is not None and active_profile(paths) != profile:
        print(f"first: repro profile use {profile}")
    print(f"planned for: {', '.join([*names, planned_for])}")
    print_plan(plans, devices, gpus, paths)


def _find_peak(gpu: str, tflops: float | None) -> float:
    """The TFLOP/s that are given, else those of the GPU's data sheet."""
    peak = find_peak(gpu) if tflops is None else tflops
    if peak is None:
        raise UserError(f"plan: {gpu}: its peak is not in our table ({', '.join(PEAK_TFLOPS)}); say it with --tflops")
    return peak


def _choose_devices(profile: Mapping[str, Any]) -> tuple[Sequence[str], str]:
    """The GPUs, or none for the CPU, that work is planned for where none is asked for; and why, or what the CPU is."""
    import torch

    from repro.core.runtime import cpu_name

    if torch.cuda.is_available() and profile.get("runtime", {}).get("device") != "cpu":
        return (torch.cuda.get_device_name(),), "the GPU here"
    sections = [section for section in profile.values() if isinstance(section, dict)]
    cells = [cell for section in sections for cell in section.values() if isinstance(cell, dict)]
    if any(cell.get("precision") in ("bf16", "fp16") for cell in cells):
        return GPUS, "since the profile trains in bf16 or fp16 and no GPU is here; --gpu names another"
    return (), f"the CPU here, {cpu_name()}"
