"""Running the stages of dvc.yaml, several at once where none needs the output of another."""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .core.errors import RunError
from .core.paths import Paths
from .core.runtime import RUN_BEGAN, Runtime, choose_device, usable_cores
from .training.pool import Work, run_all


@dataclasses.dataclass(frozen=True)
class Unit:
    """A stage of dvc.yaml, or a cell of one.

    Args:
        name: as DVC calls it, e.g. `pretrain@vittt_nano_digits`.
        needs: the names of those whose output it reads.
        depth: how many follow it, one after another.
    """

    name: str
    needs: tuple[str, ...]
    depth: int

    @property
    def stage(self) -> str:
        """The name of the stage, without that of the cell."""
        return self.name.partition("@")[0]


def read_units(root: Path) -> list[Unit]:
    """The units of dvc.yaml as DVC understands it, those with the longest chain behind them first.

    Raises:
        RunError: DVC cannot read dvc.yaml or params.yaml.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            graph = repo.index.graph  # from each stage to those that it needs
            needs = {stage.name: tuple(sorted(other.name for other in graph.successors(stage))) for stage in graph}
            order = [stage.name for stage in repo.index.stages]
    except DvcException as error:
        raise RunError(f"{root / 'dvc.yaml'}: {' '.join(str(error).split())}") from None
    depths: dict[str, int] = {}

    def find_depth(name: str) -> int:
        if name not in depths:
            depths[name] = max((1 + find_depth(other) for other in needs if name in needs[other]), default=0)
        return depths[name]

    units = [Unit(name, needs[name], find_depth(name)) for name in order]
    return sorted(units, key=lambda unit: -unit.depth)


def choose_jobs(runtime: Runtime) -> int:
    """As many stages at once as there are GPUs, or cores where there is none."""
    if choose_device(runtime.device).type == "cuda":
        import torch

        return torch.cuda.device_count()
    return usable_cores()


def run_stages(paths: Paths, table: Mapping[str, Any], runtime: Runtime, *, jobs: int, force: bool) -> None:
    """Bring every stage up to date by `dvc repro`, `jobs` of them at once, each with its share of the threads.

    A stage that measures speed runs while nothing else does, with all threads. Where a stage fails, those that need it do not run, and
    the others do.

    Args:
        table: name -> `stages.Stage`.
        jobs: how many processes.
        force: also run what is up to date.

    Raises:
        RunError: a stage failed; Interrupted: a signal came.
    """
    # dvc.yaml says `repro`, which lies beside this Python whether or not its environment is activated
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # DVC waits for the stage that it runs after a SIGINT, and dies of a SIGTERM
    shared = {"module": "dvc", "environment": {RUN_BEGAN: f"{time.time()} {jobs}", "PATH": path}, "stopped_as_group": True}
    works = {}
    for unit in read_units(paths.root):
        row = table.get(unit.stage)
        arguments = ("--wait-for-lock", "repro", "--quiet", "--single-item", *(["--force"] if force else []), unit.name)
        log = paths.logs("run", unit.name) / "output.txt"
        works[unit.name] = Work(arguments=arguments, log=log, after=unit.needs, alone=bool(row and row.alone), **shared)
    failed = run_all(works, jobs, runtime, paths.root, alike=False)
    if failed:
        said = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise RunError(f"{len(failed)} of {len(works)} stages failed: {said}")
