"""`repro plan`: the runs that the parameters define, with their time where it was measured. Nothing is started."""

from typing import Annotated

import typer

from repro.core.config import active_profile, find_profile, load_yaml
from repro.core.errors import UserError
from repro.core.paths import find_root

from . import Stage, load_stages

STAGE = Stage(purpose="check", records=False)


def command(
    profile: Annotated[str | None, typer.Option(help="Plan this profile instead of params.yaml.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Plan for this GPU, of which the results have speeds. Default: the device here."
        ),
    ] = None,
) -> None:
    """Show what would run, and its time and GPU memory where these were measured, before anything is started."""
    import torch

    from repro.core.runtime import cpu_name
    from repro.planning import list_gpus, plan_rows, print_plan

    paths, stages = find_root(), load_stages()
    file = paths.params if profile is None else find_profile(paths, profile)
    if gpu is not None:
        known = list_gpus(stages, paths)
        if not any(gpu.lower() in name.lower() for name in known):
            raise UserError(
                f"plan: --gpu {gpu}: nothing was measured on it, only on {', '.join(known) or 'CPUs'}; run a cell on it first"
            )
    elif torch.cuda.is_available() and (load_yaml(file).get("runtime") or {}).get("device") != "cpu":
        gpu = torch.cuda.get_device_name()
    rows = plan_rows(stages, file, paths, gpu)
    if profile is not None and active_profile(paths) != profile:
        print(f"first: repro profile use {profile}")
    print(f"planned for: {gpu or f'the CPU here, {cpu_name()}'}")
    print_plan(rows, gpu, paths)
