"""Where `repro selftest faults` works: temporary checkouts with this code, commands run in them, and what came of each fault."""

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from repro.core.errors import RunError
from repro.core.hashing import FIRST_PARTY
from repro.core.runtime import usable_cores

SAVE_EVERY, EPOCHS, CELL = 3, 2, "nano"
LIMIT_S = 180  # of one command; far above what any takes, so that one that hangs is a failure and no halt
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
            "seed": 0,
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
Jobs = list[Callable[[], None]]  # each tells `Lab.fault` what it found, and can go on beside the others
# a write that passes the limit fails like one on a full disk, with another errno
SMALL_FILES = "import resource, runpy, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
SMALL_FILES += "runpy.run_module('repro', run_name='__main__', alter_sys=True)"


class Failed(Exception):
    """What was wanted did not happen; the message says what did, and where."""


class Skipped(Exception):
    """This machine cannot show it; the message says why."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def require(self, code: int, *parts: str) -> None:
        """Raise `Failed` unless it ended with this code and, where that is not 0, with one line of error that has these parts."""
        lines = self.err.strip().splitlines()
        if self.code != code:
            raise Failed(f"exit code {self.code} instead of {code}: {lines[-1] if lines else 'no message'}")
        if code and (len(lines) != 1 or not lines[0].startswith("repro: ")):
            raise Failed(f"{len(lines)} lines of error instead of one, the last {lines[-1:]}")
        if missing := [part for part in parts if part not in self.err]:
            raise Failed(f"the error says nothing of {missing[0]!r}: {self.err.strip()}")

    def step(self, before: str) -> int:
        """The last number after this text at the beginning of a line, 0 for none."""
        return max(map(int, re.findall(rf"^{before} (\d+)", self.out, re.M)), default=0)


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A folder with params.yaml, links to the code and the data, and whatever the commands that ran there left."""

    root: Path

    @property
    def results(self) -> Path:
        return self.root / "results" / "pretrain" / CELL

    @property
    def states(self) -> list[Path]:
        """The saved states, newest first."""
        return sorted(self.root.glob(f".runs/pretrain/{CELL}-*/step_*.pt"), reverse=True)

    def edit(self, generate: dict[str, Any] | None = None, **changed: Any) -> None:
        """Write params.yaml with other values of the cell, or of how its data is generated."""
        params = copy.deepcopy(PARAMS)
        params["prepare_data"]["digits"]["generate"] |= generate or {}
        params["pretrain"][CELL] |= changed
        (self.root / "params.yaml").write_text(json.dumps(params))  # JSON is YAML

    def start(self, *args: str, program: tuple[str, ...] = ("-m", "repro")) -> subprocess.Popen:
        """Begin `repro ARGS` here."""
        not_ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPRO_DEBUG")
        environment = {name: value for name, value in os.environ.items() if name not in not_ours}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(self.root)}
        # a session of its own: a Ctrl-C here must not be one of the faults
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

    def train(self, processes: int = 1, largest_file: int | None = None) -> subprocess.Popen:
        """Begin the training; with `largest_file`, no file may grow beyond so many bytes."""
        args = [*TRAIN, *(["--gpus", str(processes)] if processes > 1 else [])]
        return self.start(*args) if largest_file is None else self.start(str(largest_file), *args, program=("-c", SMALL_FILES))

    def until_training(self, process: subprocess.Popen) -> float:
        """Wait until a run begins to train, or ends; the time of day then, in seconds."""
        while process.poll() is None and not any(self.root.glob(f".runs/pretrain/{CELL}-*/run.json")):
            time.sleep(0.005)
        return time.time()

    def trained(self, began: float) -> float:
        """Seconds from then until the results were there; torchrun takes some more to end."""
        return (self.results / "metrics.json").stat().st_mtime - began

    def wait(self, process: subprocess.Popen) -> Ended:
        """Its end; one that does not come is a `Failed`."""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            end_all(self.root)
            raise Failed(f"{' '.join(process.args[1:])} did not end within {LIMIT_S} s") from None
        return Ended(process.returncode, out, err)

    def compare(self, whole: "Checkout") -> None:
        """Raise `Failed` unless the results are the same bytes as another checkout's."""
        snapshots = sorted(f"snapshots/{path.name}" for path in (whole.results / "snapshots").iterdir())
        for name in ["weights.safetensors", "curve.csv", *snapshots]:
            ours, theirs = self.results / name, whole.results / name
            if not ours.is_file():
                raise Failed(f"{ours}: is missing")
            if ours.read_bytes() != theirs.read_bytes():
                raise Failed(f"{ours}: differs from the uninterrupted run's{_difference(ours, theirs)}")


@dataclasses.dataclass(kw_only=True)
class Lab:
    """Where the faults are done, and what came of them. `whole` and `seconds` (of training) are of uninterrupted runs, by number
    of processes; `stopped` is a checkout whose run SIGTERM ended."""

    folder: Path
    kills: int
    flips: int
    seed: int
    whole: dict[int, Checkout] = dataclasses.field(default_factory=dict)
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    stopped: Future | None = None
    done: dict[str, str] = dataclasses.field(default_factory=dict)
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[Callable[[str], None]]:
        """One line for what happens inside: ok with what the yielded function was told, else FAILED with the reason."""
        said: list[str] = []
        verdict = "ok"
        try:
            yield said.append
        except Skipped as reason:
            verdict, said = "skipped", [str(reason)]
        except Exception as error:
            verdict, said = "FAILED", [str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"]
        with self.lock:
            self.done[name] = verdict
            print(f"{verdict:7} {': '.join([name, *said])}", flush=True)

    def having(self, verdict: str) -> list[str]:
        """The names of the faults that ended so."""
        return [name for name, found in self.done.items() if found == verdict]

    def checkout(self, like: Checkout | None = None) -> Checkout:
        """A new checkout: the copied code, the data that all share, and, with `like`, the results and states of that one."""
        root = Path(tempfile.mkdtemp(prefix="checkout_", dir=self.folder))
        shutil.copytree(like.root if like else self.folder / "prepared", root, symlinks=True, dirs_exist_ok=True)
        return Checkout(root)

    def copy_of_stopped(self) -> tuple[Checkout, dict[Path, bytes]]:
        """A checkout of one's own with the run that SIGTERM ended, and its states, newest first."""
        checkout = self.checkout(self.stopped.result())
        return checkout, {path: path.read_bytes() for path in checkout.states}

    def kill(self, share: float, processes: int) -> tuple[Checkout, float, Ended]:
        """SIGKILL to all of a run at this share of an uninterrupted one's training: its checkout, the seconds, what it had said."""
        for _ in range(3):
            checkout, moment = self.checkout(), share * self.seconds[processes]
            process = checkout.train(processes)
            began = checkout.until_training(process)
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                break
            # the machine was busier when an uninterrupted run was timed: this one ended before its moment
            self.seconds[processes] = checkout.trained(began)
        process.kill()  # by its number too: it may not have reached its folder yet
        end_all(checkout.root)
        return checkout, moment, checkout.wait(process)

    def finish(self, checkout: Checkout, processes: int = 1) -> int:
        """Run to the end and compare with the uninterrupted run; the step after which it continued, 0 for none."""
        ended = checkout.wait(checkout.train(processes))
        ended.require(0)
        checkout.compare(self.whole[processes])
        return ended.step("continuing after step")


def prepare(lab: Lab) -> None:
    """Copy the code, write the data, and train twice without interruption.

    Raises:
        RunError: that alone fails.
    """
    prepared = Checkout(lab.folder / "prepared")
    prepared.root.mkdir()
    for package in FIRST_PARTY:  # copied, so that nobody's edit comes between two runs
        shutil.copytree(Path(__file__).resolve().parents[1] / package, lab.folder / "code" / package)
        (prepared.root / package).symlink_to(lab.folder / "code" / package)
    (prepared.root / "dvc.yaml").write_text("stages: {}\n")
    prepared.edit()
    (lab.folder / "data").mkdir()
    (prepared.root / "data").symlink_to(lab.folder / "data")
    with lab.fault("the same run twice") as say:
        prepared.wait(prepared.start("prepare-data")).require(0)
        one, other = lab.checkout(), lab.checkout()
        # at the same time, since the runs that are killed later have company too
        processes = [checkout.train() for checkout in (one, other)]
        began = one.until_training(processes[0])
        for checkout, process in zip((one, other), processes, strict=True):
            checkout.wait(process).require(0)
        lab.whole[1], lab.seconds[1] = one, one.trained(began)
        other.compare(one)
        say(f"weights, curve and snapshots have the same bytes; {lab.seconds[1]:.1f} s")
    if not lab.whole:
        raise RunError("selftest faults: an uninterrupted run fails; nothing can be compared with it")


def stop(lab: Lab, number: int, code: int) -> Checkout:
    """A checkout whose run was stopped by a signal once it had saved two states; not to be changed, but to be copied."""
    checkout = lab.checkout()
    process, until = checkout.train(), time.monotonic() + LIMIT_S
    while len(checkout.states) < 2 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(number)
    checkout.wait(process).require(code, "is saved")
    if checkout.results.exists() or len(checkout.states) != 2:
        raise Failed(f"{checkout.root}: has results, or {len(checkout.states)} states instead of 2")
    return checkout


def do(lab: Lab, groups: list[Callable[[Lab], Jobs]]) -> None:
    """Do the jobs of these groups, so many at a time as there are cores, beside a run that SIGTERM stops for them to start from."""
    with ThreadPoolExecutor(max(2, min(4, usable_cores()))) as pool:
        try:
            lab.stopped = pool.submit(stop, lab, signal.SIGTERM, 143)
            for job in [pool.submit(job) for group in groups for job in group(lab)]:
                job.result()
        except BaseException:  # Ctrl-C: else the pool would wait for every job
            pool.shutdown(wait=False, cancel_futures=True)
            end_all(lab.folder)
            raise


def require_kept(states: dict[Path, bytes]) -> None:
    """Raise `Failed` unless the files have these bytes."""
    for path, content in states.items():
        if not path.is_file() or path.read_bytes() != content:
            raise Failed(f"{path}: was changed or removed")


def flip(path: Path, at: int, by: int) -> None:
    """Change one byte of a file: exclusive or with `by`."""
    content = bytearray(path.read_bytes())
    content[at] ^= by
    path.write_bytes(content)


def step_of(state: Path) -> int:
    """The step in a state's file name."""
    return int(state.name.split(".")[0].removeprefix("step_"))


def end_all(folder: Path) -> None:
    """SIGKILL to every process that works in this folder or below: torchrun's children lead sessions of their own."""
    found = True
    while found:
        found = False
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        time.sleep(0.02 * found)


def _difference(ours: Path, theirs: Path) -> str:
    from safetensors.torch import load_file

    if ours.suffix != ".safetensors":
        return ""
    with contextlib.suppress(Exception):  # a file that is none any more differs by more than its numbers
        a, b = load_file(ours), load_file(theirs)
        return f", by {max(float((a[name].double() - b[name].double()).abs().max()) for name in b):.3g} at most"
    return ""
