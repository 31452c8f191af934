"""Kills in every stage that trains, as many as one likes; see test_campaign.

One process imports everything and forks a child for each run, which saves the seconds that an import takes. A child is
killed at a random moment, or just before one of its changes to the file system.
"""

import contextlib
import functools
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from repro.core.errors import RunError
from tests.conftest import run_main
from tests.faults.lab import PARAMS, describe_damage, make_base
from tests.stages import helpers

# what a run does to the file system, and what a kill may come before
CHANGES = ("fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir")
NANO = PARAMS["pretrain"]["nano"] | {"batch_size": 32, "steps_per_epoch": 3, "snapshot_epochs": [1]}
_WEIGHTS = str(helpers.WEIGHTS)
_SECTIONS = yaml.safe_load(helpers.DENSE) | yaml.safe_load(helpers.GENERATE)
_T5 = {"model": "t5_nano_patch4_32", "options": {"depth": 1}, "batch_size": 32, "steps_per_epoch": 3, "drop_path": 0.0}
_SHORT = {"steps_per_epoch": 2, "batch_size": 2}
CELLS: dict[str, Any] = {
    "pretrain": {
        "nano": NANO | {"options": {"depth": 4}},
        "killed": NANO,
        "teacher": NANO | _T5 | {"model": "t5_softmax_nano_patch4_32"},
    },
    "ablate": {"killed": NANO | {"options": {"depth": 1, "design": "dual"}}},
    "linearize": {"killed": NANO | _T5 | {"init": {"weights": "artifacts/pretrain/teacher/weights.safetensors"}}},
    "detect": {"killed": _SECTIONS["detect"]["nano"] | _SHORT},
    "segment": {"killed": _SECTIONS["segment"]["nano"] | _SHORT},
    "generate": {"killed": _SECTIONS["generate"]["nano"] | {"judge": {"weights": _WEIGHTS, "samples": 10}}},
}
KILLED = {stage: (stage, "--cell", "killed") for stage in CELLS} | {"report": ("report",)}
SEED = int(os.environ.get("FAULT_SEED", 0))


class Campaign:
    """A prepared checkout, and the runs that nothing interrupts.

    Args:
        folder: holds the temporary checkouts.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        runtime = PARAMS["runtime"] | {"data_roots": {"digits": "data/digits", "scenes": "data/scenes"}}
        data = PARAMS["prepare_data"] | _SECTIONS["prepare_data"]
        params = PARAMS | CELLS | {"runtime": runtime, "prepare_data": data}
        self.base = make_base(folder, params)
        for command in (("prepare-data",), ("pretrain", "--cell", "nano"), ("pretrain", "--cell", "teacher")):
            self.require(self.base, command)

    def require(self, root: Path, command: tuple[str, ...]) -> tuple[int, float]:
        """Run a command to its end, or raise a RunError: how often it changed the file system, and its seconds."""
        began = time.monotonic()
        code = wait(start(root, command))
        if code:
            said = (root / "output").read_text(errors="replace")
            raise RunError(f"{' '.join(command)}: exit code {code}: {' '.join(said.split())[-300:]}")
        return int((root / "changes").read_text()), time.monotonic() - began

    @functools.cache  # noqa: B019 (there is one campaign)
    def run_whole(self, name: str) -> tuple[Path, int, float]:
        """A checkout in which a command ran uninterrupted, how often that changed the file system, and its seconds."""
        root = self.copy(f"whole_{name}")
        return root, *self.require(root, KILLED[name])

    def copy(self, name: str) -> Path:
        """A new checkout with the prepared data and results."""
        shutil.copytree(self.base, self.folder / name, symlinks=True)
        return self.folder / name

    def try_kill(self, name: str, number: int) -> str:
        """Kill a command, run it again, and say what is wrong with its results; nothing if all is right."""
        whole, changes, seconds = self.run_whole(name)
        moment = random.Random(f"{SEED} {name} {number}").random() * seconds
        while True:
            root = self.copy(f"{name}_{number}")
            if number % 2:  # before one of its changes, each of them in turn
                code = wait(start(root, KILLED[name], kill_at=(number // 2) % changes))
            else:
                pid = start(root, KILLED[name])
                time.sleep(moment)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                code = wait(pid)
            if code == -signal.SIGKILL:
                break
            moment /= 2  # it ended before its moment
            shutil.rmtree(root)
        found = describe_damage(root, whole)
        if not found:
            try:
                self.require(root, KILLED[name])
                found = describe_damage(root, whole, finished=True)
            except RunError as error:
                found = f"the next run failed: {error}"
        if not found:
            shutil.rmtree(root)
        return found


def start(root: Path, command: tuple[str, ...], kill_at: int | None = None) -> int:
    """Fork a child that runs `repro COMMAND`, and kills itself before its change number `kill_at` from 0. Its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        output = os.open(root / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        sys.argv = ["repro", *command]
        counted = count_changes(kill_at)
        code = run_main()
        (root / "changes").write_text(str(next(counted)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def count_changes(kill_at: int | None) -> Iterator[int]:
    """Count this process's changes to the file system from now on, and have it die before one of them."""
    counted = iter(range(sys.maxsize))

    def watch(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if next(counted) == kill_at:
                os.killpg(0, signal.SIGKILL)
            return change(*args, **kwargs)

        return changed

    for name in CHANGES:
        setattr(os, name, watch(getattr(os, name)))
    return counted


def wait(pid: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
