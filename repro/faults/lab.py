"""Temporary checkouts with this code, commands that run in them, and the verdict on each fault."""

import contextlib
import copy
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..core.errors import RunError
from ..core.hashing import FIRST_PARTY
from ..core.runtime import usable_cores

SAVE_EVERY, EPOCHS, CELL = 3, 2, "nano"
LIMIT_S = 180  # for one command; far above what any takes, so that one that hangs fails and does not stop the lab


def choose_seed(seed: int) -> dict[str, Any]:
    """The parameters of a training cell that choose its random numbers."""
    return {"seeds": [seed]}


PARAMS: dict[str, Any] = {
    "runtime": {
        "device": "cpu",
        "workers": 0,
        "threads": 1,
        "save_every_steps": SAVE_EVERY,
        "log_every_steps": 1,
        "data_roots": {"digits": "data/digits"},
    },
    "prepare_data": {
        "digits": {
            "kind": "digits",
            "expected": {"classes": 10, "train": 1438, "val": 359},
            "generate": {"image_size": 32, "val_fraction": 0.2, "seed": 0},
        }
    },
    "pretrain": {
        CELL: {
            "model": "vittt_nano_patch16_144",
            "options": {"depth": 1},
            "data": "digits",
            **choose_seed(0),
            "epochs": EPOCHS,
            "batch_size": 128,
            "drop_path": 0.1,
            "snapshot_epochs": [0, 1, EPOCHS],
            "max_bad_steps": 2,
            "optim": {"lr": 0.003, "lr_batch_size": 128, "warmup_epochs": 0},
            "mix": {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
            "transform": {"image_size": 32, "hflip": 0.0, "crop_pct": 1.0, "re_prob": 0.25},
        }
    },
}
TRAIN = ("pretrain", "--cell", CELL)
Jobs = list[Callable[[], None]]  # each reports to `Lab.fault`, and may run beside the others
# a write beyond the limit fails like a write to a full disk, only with another errno
SMALL_FILES = "import resource, runpy, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
SMALL_FILES += "runpy.run_module('repro', run_name='__main__', alter_sys=True)"


class Failure(Exception):
    """A fault was not survived as it should be; the message says what happened instead, and where."""


class Skip(Exception):
    """This machine cannot show it; the message says why."""


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    def require(self, code: int, *parts: str) -> None:
        """Raise a `Failure` unless the exit code is this one and, where it is not 0, one line of error contains all `parts`."""
        lines = self.err.strip().splitlines()
        if self.code != code:
            raise Failure(f"exit code {self.code} instead of {code}: {lines[-1] if lines else 'no message'}")
        if code and (len(lines) != 1 or not lines[0].startswith("repro: ")):
            raise Failure(f"{len(lines)} lines of error instead of one, the last {lines[-1:]}")
        if missing := [part for part in parts if part not in self.err]:
            raise Failure(f"the error does not mention {missing[0]!r}: {self.err.strip()}")

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

    def start(self, *args: str, program: tuple[str, ...] = ("-m", "repro")) -> subprocess.Popen:
        """Start `repro ARGS` here."""
        not_ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPRO_DEBUG")
        environment = {name: value for name, value in os.environ.items() if name not in not_ours}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(self.root)}
        # in a session of its own: a Ctrl-C here must not be one of the faults
        return subprocess.Popen(
            [sys.executable, *program, *args],
            cwd=self.root,
            env=environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def start_training(self, processes: int = 1, largest_file: int | None = None) -> subprocess.Popen:
        """Start the training; with `largest_file`, no file may grow beyond so many bytes."""
        args = [*TRAIN, *(["--gpus", str(processes)] if processes > 1 else [])]
        return self.start(*args) if largest_file is None else self.start(str(largest_file), *args, program=("-c", SMALL_FILES))

    def wait_for_training(self, process: subprocess.Popen) -> float:
        """Wait until the process begins to train, or ends; return the time of day then, in seconds."""
        while process.poll() is None and not self.find_in_run("run.json"):
            time.sleep(0.005)
        return time.time()

    def seconds_to_results(self, began: float) -> float:
        """Seconds from `began` until the results were written; torchrun takes some more to end."""
        return (self.results / "metrics.json").stat().st_mtime - began

    def wait(self, process: subprocess.Popen) -> CommandResult:
        """How the process ended; raises a `Failure` if it does not."""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_all_in(self.root)
            raise Failure(f"{' '.join(process.args[1:])} did not end within {LIMIT_S} s") from None
        return CommandResult(process.returncode, out, err)

    def compare(self, whole: "Checkout") -> None:
        """Raise a `Failure` unless the results have the same bytes as those of another checkout."""
        snapshots = sorted(f"snapshots/{path.name}" for path in (whole.results / "snapshots").iterdir())
        for name in ["weights.safetensors", "curve.csv", *snapshots]:
            ours, theirs = self.results / name, whole.results / name
            if not ours.is_file():
                raise Failure(f"{ours}: is missing")
            if ours.read_bytes() != theirs.read_bytes():
                raise Failure(f"{ours}: differs from the uninterrupted run's{_describe_difference(ours, theirs)}")


@dataclasses.dataclass(kw_only=True)
class Lab:
    """Where the faults are done, and the verdict on each.

    Args:
        folder: holds the checkouts.
        kills: random moments of a training at which it is killed.
        flips: bytes of a saved state that are flipped.
        seed: chooses the moments and the bytes.

    whole, seconds: the checkouts and the training times of uninterrupted runs, by number of processes.
    stopped: will be a checkout whose run SIGTERM stopped, not to be changed but to be copied.
    verdicts: `ok`, `FAILED` or `skipped` for each fault by its name.
    """

    folder: Path
    kills: int
    flips: int
    seed: int
    whole: dict[int, Checkout] = dataclasses.field(default_factory=dict)
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    stopped: Future | None = None
    verdicts: dict[str, str] = dataclasses.field(default_factory=dict)
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[Callable[[str], None]]:
        """Print one line for what happens inside: ok with what the yielded function was told, else FAILED or skipped with the reason."""
        notes: list[str] = []
        verdict = "ok"
        try:
            yield notes.append
        except Skip as reason:
            verdict, notes = "skipped", [str(reason)]
        except Exception as error:  # a fault that breaks the lab must not hide the others
            verdict, notes = "FAILED", [str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"]
        with self.lock:
            self.verdicts[name] = verdict
            print(f"{verdict:7} {': '.join([name, *notes])}", flush=True)

    def with_verdict(self, verdict: str) -> list[str]:
        """The names of the faults with this verdict."""
        return [name for name, found in self.verdicts.items() if found == verdict]

    def make_checkout(self, like: Checkout | None = None) -> Checkout:
        """A new checkout with the copied code and the data that all share; with `like`, also that one's results and states."""
        root = Path(tempfile.mkdtemp(prefix="checkout_", dir=self.folder))
        shutil.copytree(like.root if like else self.folder / "prepared", root, symlinks=True, dirs_exist_ok=True)
        return Checkout(root)

    def copy_stopped(self) -> tuple[Checkout, dict[Path, bytes]]:
        """A new checkout with the run that SIGTERM stopped, and its states, newest first."""
        checkout = self.make_checkout(self.stopped.result())
        return checkout, {path: path.read_bytes() for path in checkout.states}

    def prepare(self) -> None:
        """Copy the code, write the data, and train twice without interruption.

        Raises:
            RunError: already that fails.
        """
        prepared = Checkout(self.folder / "prepared")
        prepared.root.mkdir()
        for package in FIRST_PARTY:  # copied, so that nobody's edit comes between two runs
            shutil.copytree(Path(__file__).resolve().parents[2] / package, self.folder / "code" / package)
            (prepared.root / package).symlink_to(self.folder / "code" / package)
        (prepared.root / "dvc.yaml").write_text("stages: {}\n")
        prepared.edit()
        (self.folder / "data").mkdir()
        (prepared.root / "data").symlink_to(self.folder / "data")
        with self.fault("the same run twice") as note:
            prepared.wait(prepared.start("prepare-data")).require(0)
            one, other = self.make_checkout(), self.make_checkout()
            # at the same time, since the runs that are killed later have company too
            processes = [checkout.start_training() for checkout in (one, other)]
            began = one.wait_for_training(processes[0])
            for checkout, process in zip((one, other), processes, strict=True):
                checkout.wait(process).require(0)
            self.whole[1], self.seconds[1] = one, one.seconds_to_results(began)
            other.compare(one)
            note(f"weights, curve and snapshots have the same bytes; {self.seconds[1]:.1f} s")
        if not self.whole:
            raise RunError("selftest faults: an uninterrupted run fails, and nothing can be compared with it")

    def stop_run(self, number: int, code: int) -> Checkout:
        """A checkout whose run a signal stopped, with this exit code, once it had saved two states."""
        checkout = self.make_checkout()
        process, until = checkout.start_training(), time.monotonic() + LIMIT_S
        while len(checkout.states) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(number)
        checkout.wait(process).require(code, "is saved")
        if checkout.results.exists() or len(checkout.states) != 2:
            raise Failure(f"{checkout.root}: has results, or {len(checkout.states)} states instead of 2")
        return checkout

    def kill_run(self, share: float, processes: int) -> tuple[Checkout, float, CommandResult]:
        """Kill all processes of a run when this share of an uninterrupted one's training time is over.

        Returns:
            its checkout, the seconds that it had trained, and what it had written.
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
        return checkout, moment, checkout.wait(process)

    def finish_run(self, checkout: Checkout, processes: int = 1) -> int:
        """Run to the end and compare with the uninterrupted run; return the step after which it continued, 0 if from the beginning."""
        result = checkout.wait(checkout.start_training(processes))
        result.require(0)
        checkout.compare(self.whole[processes])
        return result.find_step("continuing after step")

    def run_jobs(self, groups: Iterable[Callable[["Lab"], Jobs]]) -> None:
        """Do the jobs of these groups, as many at a time as there are cores, beside a run that SIGTERM stops for them to start from."""
        with ThreadPoolExecutor(max(2, min(4, usable_cores()))) as pool:
            try:
                self.stopped = pool.submit(self.stop_run, signal.SIGTERM, 143)
                for job in [pool.submit(job) for group in groups for job in group(self)]:
                    job.result()
            except BaseException:  # Ctrl-C: else the pool would wait for every job
                pool.shutdown(wait=False, cancel_futures=True)
                kill_all_in(self.folder)
                raise


def require_kept(states: dict[Path, bytes]) -> None:
    """Raise a `Failure` unless the files still have these bytes."""
    for path, content in states.items():
        if not path.is_file() or path.read_bytes() != content:
            raise Failure(f"{path}: was changed or removed")


def flip(path: Path, at: int, by: int) -> None:
    """Change one byte of a file to its exclusive or with `by`."""
    content = bytearray(path.read_bytes())
    content[at] ^= by
    path.write_bytes(content)


def step_of(state: Path) -> int:
    """The step in the file name of a training state."""
    return int(state.name.split(".")[0].removeprefix("step_"))


def kill_all_in(folder: Path) -> None:
    """Send SIGKILL to every process that works in this folder or below; the children of torchrun lead sessions of their own."""
    found = True
    while found:
        found = False
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        time.sleep(0.02 * found)


def _describe_difference(ours: Path, theirs: Path) -> str:
    """The largest difference of two weights files, as the end of a message; nothing for another file, or an unreadable one."""
    from safetensors.torch import load_file

    if ours.suffix != ".safetensors":
        return ""
    with contextlib.suppress(Exception):
        a, b = load_file(ours), load_file(theirs)
        return f", by {max(float((a[name].double() - b[name].double()).abs().max()) for name in b):.3g} at most"
    return ""
