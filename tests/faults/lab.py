"""Temporary work trees with this code, commands that run in them, and checks of their results."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from repro.core.hashing import FIRST_PARTY
from tests.conftest import ROOT
from tests.stages import helpers

CELL = "nano"
# for one command; far above what any takes on a busy machine, so that one that hangs fails and does not stop the lab
LIMIT_S = 1800

_USUAL = yaml.safe_load(helpers.PARAMS)
_RUNTIME = {"device": "cpu", "threads": 1, "log_every_steps": 1, "data_roots": {"digits": "data/digits"}}
PARAMS: dict[str, Any] = {
    "runtime": _USUAL["runtime"] | _RUNTIME,
    "prepare_data": {"digits": _USUAL["prepare_data"]["digits"]},
    "pretrain": {CELL: _USUAL["pretrain"]["nano"] | {"snapshot_epochs": [0, 1, 2], "max_bad_steps": 2}},
}
SAVE_EVERY = PARAMS["runtime"]["save_every_steps"]
TRAIN = ("pretrain", "--cell", CELL)


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    def require(self, code: int, *parts: str) -> None:
        """Assert that the exit code is this one and, where it is not 0, that one line of error contains all `parts`."""
        lines = self.err.strip().splitlines()
        assert self.code == code, self.err
        assert not code or (len(lines) == 1 and lines[0].startswith("repro: ")), self.err
        assert all(part in self.err for part in parts), self.err

    def find_step(self, before: str) -> int:
        """The largest number that follows this text at the beginning of a line; 0 if there is no such line."""
        return max(map(int, re.findall(rf"^{before} (\d+)", self.out, re.M)), default=0)


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A folder with params.yaml, links to the code and the data, and whatever the commands that ran there have left."""

    root: Path

    @property
    def results(self) -> Path:
        return self.root / "results" / "pretrain" / CELL

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts" / "pretrain" / CELL

    @property
    def states(self) -> list[Path]:
        """The saved training states, newest first."""
        return sorted(self.find_in_run("step_*.pt"), reverse=True)

    def find_in_run(self, pattern: str) -> list[Path]:
        """The files with such names in the folders where runs of the cell keep what they need to continue."""
        return list(self.root.glob(f".runs/pretrain/{CELL}/*/{pattern}"))

    def edit(self, generate: dict[str, Any] | None = None, **changed: Any) -> None:
        """Write params.yaml, with other values for the cell or for the generation of its data."""
        params = copy.deepcopy(PARAMS)
        params["prepare_data"]["digits"]["generate"] |= generate or {}
        params["pretrain"][CELL] |= changed
        (self.root / "params.yaml").write_text(json.dumps(params))  # JSON is YAML

    def start(self, *args: str) -> subprocess.Popen:
        """Start `repro ARGS` here."""
        not_ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPRO_DEBUG")
        environment = {name: value for name, value in os.environ.items() if name not in not_ours}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(self.root)}
        # in a session of its own: a Ctrl-C here must not be one of the faults
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "repro", *args]
        return subprocess.Popen(command, cwd=self.root, env=environment, start_new_session=True, **pipes)

    def start_training(self, processes: int = 1) -> subprocess.Popen:
        """Start the training."""
        return self.start(*TRAIN, *(["--gpus", str(processes)] if processes > 1 else []))

    def wait_for_training(self, process: subprocess.Popen) -> float:
        """Wait until the process begins to train, or ends; return the time of day then, in seconds."""
        while process.poll() is None and not self.find_in_run("run.json"):
            time.sleep(0.005)
        return time.time()

    def seconds_to_results(self, began: float) -> float:
        """Seconds from `began` until the results were written; torchrun takes some more to end."""
        return (self.results / "metrics.json").stat().st_mtime - began

    def wait(self, process: subprocess.Popen) -> CommandResult:
        """How the process ended."""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_all_in(self.root)
            raise AssertionError(f"{' '.join(process.args[1:])} did not end within {LIMIT_S} s") from None
        return CommandResult(process.returncode, out, err)

    def compare(self, whole: "Checkout") -> None:
        """Assert that the results have the same bytes as those of another checkout, and that no state is left."""
        damage = describe_damage(self.root, whole.root, finished=True)
        assert not damage, f"{self.root}: {damage}"


def make_base(folder: Path, params: dict[str, Any]) -> Path:
    """folder/base, with these params, a copy of the code, which nobody edits between runs, and a folder for data."""
    base = folder / "base"
    base.mkdir()
    for package in FIRST_PARTY:
        shutil.copytree(ROOT / package, folder / "code" / package)
        (base / package).symlink_to(folder / "code" / package)
    (base / "dvc.yaml").write_text("stages: {}\n")
    (base / "params.yaml").write_text(json.dumps(params))  # JSON is YAML
    (folder / "data").mkdir()
    (base / "data").symlink_to(folder / "data")
    return base


class Lab:
    """Checkouts with the same copied code and the same data, and the runs that nothing interrupts.

    Args:
        folder: holds the checkouts.

    whole, seconds: the checkouts and the training times of uninterrupted runs, by number of processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.whole: dict[int, Checkout] = {}
        self.seconds: dict[int, float] = {}
        prepared = Checkout(make_base(folder, PARAMS))
        prepared.wait(prepared.start("prepare-data")).require(0)

    def make_checkout(self, like: Checkout | None = None) -> Checkout:
        """A new checkout with the code and the data that all share; with `like`, also its results and states."""
        root = Path(tempfile.mkdtemp(prefix="checkout_", dir=self.folder))
        shutil.copytree(like.root if like else self.folder / "base", root, symlinks=True, dirs_exist_ok=True)
        return Checkout(root)

    def train_whole(self) -> None:
        """Train without interruption."""
        checkout = self.make_checkout()
        process = checkout.start_training()
        began = checkout.wait_for_training(process)
        checkout.wait(process).require(0)
        self.whole[1], self.seconds[1] = checkout, checkout.seconds_to_results(began)

    @functools.cached_property
    def begun_by_two(self) -> Checkout:
        """A checkout with the first state of a run of two processes, which itself goes on uninterrupted."""
        checkout, begun = self.make_checkout(), self.make_checkout()
        process, states = checkout.start_training(2), []
        began = checkout.wait_for_training(process)
        while process.poll() is None and not (states := checkout.states):
            time.sleep(0.005)
        for path in states and (states[0], states[0].with_name("run.json")):
            (copied := begun.root / path.relative_to(checkout.root)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
        checkout.wait(process).require(0)
        self.whole[2], self.seconds[2] = checkout, checkout.seconds_to_results(began)
        return begun

    @functools.cached_property
    def stopped(self) -> Checkout:
        """A checkout whose run SIGTERM stopped, not to be changed but to be copied."""
        return self.stop_run(signal.SIGTERM, 143)

    def copy_stopped(self) -> tuple[Checkout, dict[Path, bytes]]:
        """A new checkout with the run that SIGTERM stopped, and its states, newest first."""
        checkout = self.make_checkout(self.stopped)
        return checkout, {path: path.read_bytes() for path in checkout.states}

    def stop_run(self, number: int, code: int, processes: int = 1) -> Checkout:
        """A checkout whose run a signal stopped, with this exit code, once it had saved two states."""
        checkout = self.make_checkout()
        process, until = checkout.start_training(processes), time.monotonic() + LIMIT_S
        while len(checkout.states) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(number)
        stopped = checkout.wait(process)
        if processes == 1:
            stopped.require(code, "is saved")
        else:  # torchrun says at length that it was stopped
            assert stopped.code == code
            assert stopped.err.endswith("the last saved state is kept; the same command continues\n")
        assert not checkout.results.exists() and not checkout.artifacts.exists() and len(checkout.states) == 2
        return checkout

    def kill_run(self, share: float, processes: int) -> tuple[Checkout, CommandResult]:
        """Kill all processes of a run when this share of an uninterrupted one's training time is over.

        Returns:
            its checkout, and what it had written.
        """
        for _ in range(3):
            checkout, moment = self.make_checkout(), share * self.seconds[processes]
            process = checkout.start_training(processes)
            began = checkout.wait_for_training(process)
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                break
            # the machine was busier when an uninterrupted run was timed: this one ended before its moment
            self.seconds[processes] = checkout.seconds_to_results(began)
        process.kill()  # by its number too: it may not have reached its folder yet
        kill_all_in(checkout.root)
        return checkout, checkout.wait(process)

    def finish_run(self, checkout: Checkout, processes: int = 1) -> int:
        """Run to the end and compare with the uninterrupted run; the step after which it continued, or 0."""
        result = checkout.wait(checkout.start_training(processes))
        result.require(0)
        checkout.compare(self.whole[processes])
        return result.find_step("continuing after step")


def require_kept(states: dict[Path, bytes]) -> None:
    """Assert that the files still have these bytes."""
    for path, content in states.items():
        assert path.is_file() and path.read_bytes() == content, f"{path}: was changed or removed"


def flip(path: Path, at: int, by: int) -> None:
    """Change one byte of a file to its exclusive or with `by`."""
    content = bytearray(path.read_bytes())
    content[at] ^= by
    path.write_bytes(content)


def step_of(state: Path) -> int:
    """The step in the file name of a training state."""
    return int(state.name.split(".")[0].removeprefix("step_"))


def list_processes_in(folder: Path) -> list[int]:
    """The numbers of the processes that work in this folder or below."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [int(entry.name)] if Path(os.readlink(entry / "cwd")).is_relative_to(folder) else []
    return found


def kill_all_in(folder: Path) -> None:
    """Send SIGKILL to every process there; the children of torchrun lead sessions of their own."""
    while found := list_processes_in(folder):
        for number in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)


def describe_damage(root: Path, whole: Path, *, finished: bool = False) -> str:
    """What is wrong with the results of a run beside those of an uninterrupted one; nothing if all is right.

    Every file under its final name must have the uninterrupted run's bytes. Once `finished`, all of them must be there
    and nothing else, in the folder of states too.
    """
    ours, theirs = (_list_results(each) for each in (root, whole))
    differing = [name for name in sorted(ours & theirs) if (root / name).read_bytes() != (whole / name).read_bytes()]
    found = [f"{name}: differs" for name in differing]
    if finished:
        found += [f"{name}: {'is there' if name in ours else 'is missing'}" for name in sorted(ours ^ theirs)]
        left = (path for path in root.glob(".runs/**/*") if path.is_file() and "logs" not in path.parts)
        found += [f"{path.relative_to(root)}: is left" for path in left]
    return "; ".join(found)


def _list_results(root: Path) -> set[str]:
    """The files of the results and artifacts, without those that have the date."""
    every = (path for name in ("results", "artifacts") for path in (root / name).rglob("*"))
    found = (path for path in every if path.is_file() and not path.name.endswith("run.json"))
    return {str(path.relative_to(root)) for path in found}
