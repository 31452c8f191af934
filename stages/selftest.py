"""`repro selftest faults`: everything that can happen to a training run, done to real runs of this code in a temporary checkout."""

import contextlib
import copy
import dataclasses
import json
import os
import random
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
from typing import Annotated, Any

import typer

from repro.core.errors import RunError, UserError
from repro.core.record import FIRST_PARTY

app = typer.Typer(help="Prove that this code does what it says.", no_args_is_help=True)

SAVE_EVERY, EPOCHS, CELL = 3, 2, "nano"
LIMIT_S = 180  # of one command; far above what any takes, so that one that hangs is a failure and no halt
PARAMS: dict[str, Any] = {
    "runtime": {
        "device": "cpu", "workers": 0, "threads": 1, "save_every_steps": SAVE_EVERY, "log_every_steps": 1,
        "data_roots": {"digits": "data/digits"},
    },
    "prepare_data": {
        "digits": {
            "kind": "digits", "expected": {"classes": 10, "train": 1438, "val": 359},
            "generate": {"image_size": 32, "val_fraction": 0.2, "seed": 0},
        }
    },
    "pretrain": {
        CELL: {
            "model": "vittt_nano_patch16_144", "options": {"depth": 1}, "data": "digits", "seed": 0, "epochs": EPOCHS, "batch_size": 128,
            "drop_path": 0.1, "snapshot_epochs": [0, 1, EPOCHS], "max_bad_steps": 2,
            "optim": {"lr": 0.003, "lr_batch_size": 128, "warmup_epochs": 0},
            "mix": {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
            "transform": {"image_size": 32, "hflip": 0.0, "crop_pct": 1.0, "re_prob": 0.25},
        }
    },
}  # fmt: skip
RESULTS = Path("results/pretrain") / CELL
# a write that passes the limit fails like one on a full disk, with another errno
SMALL_FILES = "import resource, runpy, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
SMALL_FILES += "runpy.run_module('repro', run_name='__main__', alter_sys=True)"


@app.callback()
def _group() -> None:
    """Prove that this code does what it says."""


@app.command()
def faults(
    kills: Annotated[int, typer.Option(min=0, help="Random moments at which a run is killed; a fifth as many with two processes.")] = 20,
    flips: Annotated[int, typer.Option(min=1, help="Bytes of a saved state that are flipped, one at a time.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the moments and the bytes.")] = 0,
    only: Annotated[str | None, typer.Option(help="Only these groups, e.g. kill,two: " + "kill two signal state full input.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the temporary checkouts behind.")] = False,
) -> None:
    """Kill, stop, fill the disk, damage files, change the data: does a run still end with the same bits, or with one line?"""
    if not Path("/proc").is_dir():
        raise UserError("selftest faults: finds the processes of a run in /proc; run it on Linux")
    groups = {"kill": _kill, "two": _two, "signal": _signals, "state": _state, "full": _full, "input": _input}
    wanted = only.split(",") if only else list(groups)
    if unknown := set(wanted) - set(groups):
        raise UserError(f"selftest faults: --only {min(unknown)}: no such group; there are {', '.join(groups)}")
    folder = Path(tempfile.mkdtemp(prefix="repro_faults_")).resolve()
    lab = Lab(folder=folder, kills=kills, flips=flips, random=random.Random(seed))
    try:
        _examine(lab, [groups[name] for name in groups if name in wanted])
    finally:
        _end_all(folder)
        if keep:
            print(f"the checkouts are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    skipped = f", {len(lab.skipped)} skipped" if lab.skipped else ""
    print(f"{lab.done} faults: {lab.done - len(lab.failed) - len(lab.skipped)} ok, {len(lab.failed)} failed{skipped}")
    if lab.failed:
        raise RunError(f"selftest faults: {len(lab.failed)} of {lab.done} failed: {'; '.join(lab.failed)}")


class Failed(Exception):
    """What was wanted did not happen; the message says what did, and where."""


class Skipped(Exception):
    """This machine cannot show it; the message says why."""


@dataclasses.dataclass(kw_only=True)
class Lab:
    """Where the faults are done, and what came of them. `whole` and `seconds` are of uninterrupted runs, by number of processes."""

    folder: Path
    kills: int
    flips: int
    random: random.Random
    whole: dict[int, Path] = dataclasses.field(default_factory=dict)
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    stopped: Future | None = None
    done: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
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
            self.done += 1
            {"ok": [], "skipped": self.skipped, "FAILED": self.failed}[verdict].append(name)
            print(f"{verdict:7} {name}: {', '.join(said)}", flush=True)

    def checkout(self, like: Path | None = None) -> Path:
        """A new checkout: the copied code, the data that all share, and, with `like`, the results and states of that one."""
        root = Path(tempfile.mkdtemp(prefix="checkout_", dir=self.folder))
        shutil.copytree(like or self.folder / "prepared", root, symlinks=True, dirs_exist_ok=True)
        return root


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def require(self, code: int, *parts: str) -> None:
        """The exit code, and an error of one line that has these parts; no error for 0."""
        lines = self.err.strip().splitlines()
        if self.code != code:
            raise Failed(f"exit code {self.code} instead of {code}: {lines[-1] if lines else 'no message'}")
        if code and (len(lines) != 1 or not lines[0].startswith("repro: ")):
            raise Failed(f"{len(lines)} lines of error instead of one, the last {lines[-1:]}")
        if missing := [part for part in parts if part not in self.err]:
            raise Failed(f"the error says nothing of {missing[0]!r}: {self.err.strip()}")


def _start(root: Path, *args: str, program: tuple[str, ...] = ("-m", "repro")) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPRO_DEBUG")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(root)}
    # a session of its own: a Ctrl-C here must not be one of the faults
    return subprocess.Popen(
        [sys.executable, *program, *args], cwd=root, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _ended(process: subprocess.Popen, root: Path) -> Ended:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        _end_all(root)
        raise Failed(f"{' '.join(process.args[1:])} did not end within {LIMIT_S} s") from None
    return Ended(process.returncode, out, err)


def _run(root: Path, *args: str, **kwargs: Any) -> Ended:
    return _ended(_start(root, *args, **kwargs), root)


def _train(processes: int = 1) -> list[str]:
    return ["pretrain", "--cell", CELL, *(["--gpus", str(processes)] if processes > 1 else [])]


def _end_all(folder: Path) -> None:
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


def _states(root: Path) -> list[Path]:
    """The saved states of a checkout's run, newest first."""
    return sorted(root.glob(f".runs/pretrain/{CELL}-*/step_*.pt"), reverse=True)


def _step(text: str, pattern: str) -> int:
    return max(map(int, re.findall(pattern, text, re.M)), default=0)


def _edit(root: Path, **changed: Any) -> None:
    params = copy.deepcopy(PARAMS)
    params["pretrain"][CELL] |= changed
    (root / "params.yaml").write_text(json.dumps(params))  # JSON is YAML


def _compare(root: Path, whole: Path) -> None:
    """The results of two checkouts are the same bytes."""
    names = ["weights.safetensors", "curve.csv", *sorted(f"snapshots/{path.name}" for path in (whole / RESULTS / "snapshots").iterdir())]
    for name in names:
        path, wanted = root / RESULTS / name, whole / RESULTS / name
        if not path.is_file():
            raise Failed(f"{path}: is missing")
        if path.read_bytes() != wanted.read_bytes():
            raise Failed(f"{path}: differs from the uninterrupted run's{_difference(path, wanted)}")


def _difference(path: Path, wanted: Path) -> str:
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        return ""
    with contextlib.suppress(Exception):  # a file that is none any more differs by more than its numbers
        ours, theirs = load_file(path), load_file(wanted)
        return f", by {max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs):.3g} at most"
    return ""


def _finish(root: Path, lab: Lab, processes: int = 1) -> int:
    """Run to the end, compare; the step after which it continued, 0 for none."""
    ended = _run(root, *_train(processes))
    ended.require(0)
    _compare(root, lab.whole[processes])
    return _step(ended.out, r"^continuing after step (\d+)")


def _examine(lab: Lab, groups: list[Callable[[Lab], list[Callable[[], None]]]]) -> None:
    _prepare(lab)
    # two-process runs are one after another and the others beside them: with all cores taken, moments would say nothing
    with ThreadPoolExecutor(max(2, min(4, len(os.sched_getaffinity(0))))) as pool:
        try:
            lab.stopped = pool.submit(_stop, lab, signal.SIGTERM)
            for job in [pool.submit(job) for group in groups for job in group(lab)]:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _end_all(lab.folder)
            raise


def _prepare(lab: Lab) -> None:
    code, prepared = lab.folder / "code", lab.folder / "prepared"
    prepared.mkdir()
    for package in FIRST_PARTY:  # copied, so that nobody's edit comes between two runs
        shutil.copytree(Path(__file__).resolve().parents[1] / package, code / package)
        (prepared / package).symlink_to(code / package)
    (prepared / "dvc.yaml").write_text("stages: {}\n")
    _edit(prepared)
    (lab.folder / "data").mkdir()
    (prepared / "data").symlink_to(lab.folder / "data")
    _run(prepared, "prepare-data").require(0)
    # two at a time, as the runs that are killed later
    roots, started = [lab.checkout(), lab.checkout()], time.monotonic()
    with lab.fault("the same run twice") as say:
        for process, root in [(_start(root, *_train()), root) for root in roots]:
            _ended(process, root).require(0)
        lab.whole[1], lab.seconds[1] = roots[0], time.monotonic() - started
        _compare(roots[1], roots[0])
        say(f"weights, curve and snapshots byte-identical; {lab.seconds[1]:.1f} s")
    if not lab.whole:
        raise RunError("selftest faults: an uninterrupted run fails; nothing can be compared with it")
