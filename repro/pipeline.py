"""Running the stages of dvc.yaml, or the commands of results/measured/steps.yaml, several at once where none needs
another's output.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .core.config import build, load_yaml
from .core.errors import RunError
from .core.paths import Paths, describe_missing_results
from .core.record import write_json
from .core.runtime import RUN_BEGAN, Runtime, choose_device, device_slug, usable_cores
from .graph import find_needs, open_dvc
from .runs.pool import Work, run_all


def release_dead_locks(root: Path) -> None:
    """Take the locks of dead processes out of DVC's list: a process that gets the number of one would seem to hold
    them.

    DVC itself takes one out where it is in the way, if no process has its number.
    """
    from dvc.lock import LockError, make_lock
    from psutil import pid_exists  # DVC has it too

    with open_dvc(root) as repo:
        folder, hardlink = repo.tmp_dir, repo.config["core"].get("hardlink_lock", False)
    file = Path(folder) / "rwlock"
    # a list that is broken, or that another DVC keeps busy, is left to DVC
    with (
        contextlib.suppress(FileNotFoundError, ValueError, LockError),
        make_lock(f"{file}.lock", tmp_dir=folder, hardlink_lock=hardlink),
    ):
        locks = {"write": {}, "read": {}} | json.loads(file.read_text(encoding="utf-8"))
        write = {path: holder for path, holder in locks["write"].items() if pid_exists(holder["pid"])}
        read = {path: [each for each in of_path if pid_exists(each["pid"])] for path, of_path in locks["read"].items()}
        kept = {"write": write, "read": {path: of_path for path, of_path in read.items() if of_path}}
        if kept != locks:
            write_json(file, kept)


def choose_jobs(runtime: Runtime) -> int:
    """As many stages at once as there are GPUs, or cores where there is none."""
    if choose_device(runtime.device).type == "cuda":
        import torch

        return torch.cuda.device_count()
    return usable_cores()


def run_stages(paths: Paths, table: Mapping[str, Any], runtime: Runtime, *, jobs: int, force: bool) -> None:
    """Bring every stage up to date by `dvc repro`, `jobs` of them at once, each with its share of the threads.

    A stage that measures speed runs while nothing else does, with all threads. Where a stage fails, those that need it
    do not run, and the others do.

    Args:
        table: name -> `stages.Stage`.
        jobs: how many processes.
        force: also run what is up to date.

    Raises:
        RunError: a stage failed; Interrupted: a signal came.
    """
    release_dead_locks(paths.root)
    # dvc.yaml says `repro`, which is in this Python's folder whether or not its environment is activated
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # DVC waits for the stage that it runs after a SIGINT, and dies of a SIGTERM
    shared = {"module": "dvc", "environment": {RUN_BEGAN: f"{time.time()} {jobs}", "PATH": path}}
    works = {}
    for name, needed in find_needs(paths.root).items():
        row = table.get(name.partition("@")[0])
        arguments = ("--wait-for-lock", "repro", "--single-item", *(["--force"] if force else []), name)
        log = paths.logs("run", name) / "output.txt"
        works[name] = Work(arguments=arguments, log=log, after=needed, alone=bool(row and row.alone), **shared)
    try:
        failed = run_all(works, jobs, runtime, paths.root, alike=False)
    finally:
        if missing := describe_missing_results(paths.root):
            print(missing, flush=True)
    if failed:
        said = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise RunError(f"{len(failed)} of {len(works)} stages failed: {said}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Commands of results/measured/steps.yaml, which explains the keys."""

    purpose: str
    commands: tuple[str, ...]
    each: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    makes: str | None = None
    at_once: bool = False
    quiet: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of a group with its values: its words, and the variables in front."""

    group: Group
    variables: Mapping[str, str]
    words: tuple[str, ...]


def read_steps(paths: Paths, here: str, jobs: int) -> list[Step]:
    """The steps of results/measured/steps.yaml in their order; `here` is the folder of this device. Raises UserError."""
    file = paths.results / "measured" / "steps.yaml"
    steps = []
    for number, content in enumerate(load_yaml(file, list), start=1):
        group = build(Group, content, f"{file.name}: group {number}")
        for values in itertools.product(*group.each.values()):
            named = dict(zip(group.each, values, strict=True), here=here, jobs=jobs)
            for command in group.commands:
                words = shlex.split(command.format_map(named))
                begin = next(place for place, word in enumerate(words) if "=" not in word)
                variables = dict(word.split("=", 1) for word in words[:begin])
                steps.append(Step(group, variables, tuple(words[begin:])))
    return steps


def choose_steps(paths: Paths, steps: Iterable[Step]) -> list[Step]:
    """The steps but for those whose file is there."""
    return [step for step in steps if not (step.group.makes and (paths.root / step.group.makes).is_file())]


def run_measured(paths: Paths, runtime: Runtime, *, jobs: int) -> None:
    """Run the steps of results/measured/steps.yaml; each keeps what is finished, so that a second call continues.

    Raises:
        RunError: a step failed, and those behind it did not run; Interrupted: a signal came.
    """
    here = paths.measured(device_slug(choose_device(runtime.device))).relative_to(paths.root).as_posix()
    steps = choose_steps(paths, read_steps(paths, here, jobs))
    works: dict[str, Work] = {}
    before: tuple[str, ...] = ()
    for number, (_, listed) in enumerate(itertools.groupby(steps, key=lambda step: step.group), start=1):
        names = []
        for place, step in enumerate(listed, start=1):
            name = f"{shlex.join(step.words)}{' (needs a quiet machine)' if step.group.quiet else ''}"
            names.append(f"{name}, step {len(works) + 1}" if name in works else name)
            log = paths.logs("measured", f"{number:02d}_{step.words[0]}") / f"{place:02d}.txt"
            more = {"after": before, "alone": not step.group.at_once, "environment": step.variables}
            works[names[-1]] = Work(arguments=step.words, log=log, **more)
        before = tuple(names)
    failed = run_all(works, jobs, runtime, paths.root, alike=False)
    if failed:
        said = "; ".join(f"{name}: {error}" for name, error in failed.items() if not error.startswith("not run"))
        raise RunError(f"{len(failed)} of {len(works)} steps failed or did not run: {said}")
    print(f"{len(works)} steps are done; `repro report` shows what they measured" if works else "nothing to do")
