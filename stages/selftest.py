"""`repro selftest faults`: everything that can happen to a training run, done to real runs of this code in temporary checkouts."""

import errno
import functools
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from repro.core.errors import RunError, UserError

from . import Stage
from .selftest_lab import SAVE_EVERY, TRAIN, Failed, Jobs, Lab, Skipped, do, end_all, flip, prepare, require_kept, step_of, stop

app = typer.Typer(help="Prove that this code does what it says.", no_args_is_help=True)

STAGE = Stage(purpose="prove")


@app.command()
def faults(
    kills: Annotated[int, typer.Option(min=0, help="Random moments of a training at which it is killed; with two processes as many.")] = 20,
    flips: Annotated[int, typer.Option(min=1, help="Bytes of a saved state that are flipped, one at a time.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the moments and the bytes.")] = 0,
    only: Annotated[str | None, typer.Option(help="Some of kill,two,signal,state,room,change,batch,diverge.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the temporary checkouts behind.")] = False,
) -> None:
    """Kill, stop, fill the disk, damage files, change the data: does a run still end with the same bits, or with one line?"""
    if not Path("/proc").is_dir():
        raise UserError("selftest faults: finds the processes of a run in /proc; run it on Linux")
    wanted = only.split(",") if only else list(GROUPS)
    if unknown := set(wanted) - set(GROUPS):
        raise UserError(f"selftest faults: --only {min(unknown)}: no such group; there are {', '.join(GROUPS)}")
    lab = Lab(folder=Path(tempfile.mkdtemp(prefix="repro_faults_")).resolve(), kills=kills, flips=flips, seed=seed)
    print(f"in {lab.folder}{'' if keep else ', removed at the end'}", flush=True)
    try:
        prepare(lab)
        do(lab, [GROUPS[name] for name in GROUPS if name in wanted])
    finally:
        end_all(lab.folder)
        if not keep:
            shutil.rmtree(lab.folder, ignore_errors=True)
    print(f"{len(lab.done)} faults: " + ", ".join(f"{len(lab.having(each))} {each}" for each in ("ok", "FAILED", "skipped")))
    if failed := lab.having("FAILED"):
        raise RunError(f"selftest faults: {len(failed)} of {len(lab.done)} failed: {'; '.join(failed)}")


def _kill(lab: Lab) -> Jobs:
    return [functools.partial(_killed, lab, f"kill {i} of {lab.kills}", share, 1) for i, share in _moments(lab, "kill", lab.kills)]


def _moments(lab: Lab, what: str, many: int) -> list[tuple[int, float]]:
    """Numbered from 1, one at random in each of so many equal parts of a run."""
    chosen = random.Random(f"{lab.seed} {what}")
    return [(i + 1, (i + chosen.random()) / many) for i in range(many)]


def _two(lab: Lab) -> Jobs:
    def one_after_another() -> None:
        checkout, begun = lab.checkout(), lab.checkout()
        with lab.fault("two processes, uninterrupted") as say:
            process, states = checkout.train(2), []
            started = checkout.until_training(process)
            while process.poll() is None and not (states := checkout.states):
                time.sleep(0.005)
            for path in states and (states[0], states[0].with_name("run.json")):
                (copied := begun.root / path.relative_to(checkout.root)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)
            checkout.wait(process).require(0)
            lab.whole[2], lab.seconds[2] = checkout, checkout.trained(started)
            say(f"{lab.seconds[2]:.1f} s")
        if 2 not in lab.whole:
            return
        with lab.fault("a run of two processes continued by one: refused"):
            begun.wait(begun.train()).require(2, "was stopped with 2 process")
        for i, share in _moments(lab, "two", lab.kills):
            _killed(lab, f"kill {i} of {lab.kills}, two processes", share, 2)

    return [one_after_another]


def _killed(lab: Lab, name: str, share: float, processes: int) -> None:
    with lab.fault(name) as say:
        checkout, moment, found = lab.kill(share, processes)
        had = found.step("step")
        # once the results are written the states go, and nothing is lost with them
        ended = (checkout.results / "metrics.json").exists()
        continued = lab.finish(checkout, processes)
        if had - continued > SAVE_EVERY and not ended:
            raise Failed(f"killed after step {had}, continued after step {continued}; {SAVE_EVERY} steps may be lost")
        say(f"at {moment:.2f} s, after {'its end' if ended else f'step {had}'}; continued after step {continued}, same bytes")


def _signal(lab: Lab) -> Jobs:
    def signalled(number: signal.Signals, code: int) -> None:
        with lab.fault(number.name) as say:
            stopped = lab.stopped.result() if number == signal.SIGTERM else stop(lab, number, code)
            say(f"exit {code}; continued after step {lab.finish(lab.checkout(stopped))}, same bytes")

    return [functools.partial(signalled, signal.SIGTERM, 143), functools.partial(signalled, signal.SIGINT, 130)]


def _state(lab: Lab) -> Jobs:
    chosen = random.Random(f"{lab.seed} state")

    def require_loaded(wanted: Path, newest: Path, change: Callable[[], Any]) -> None:
        from repro.training.checkpoint import Checkpointer

        content, lines = newest.read_bytes(), []
        change()
        loaded = Checkpointer(newest.parent, log=lines.append).restore()["run"]["step"]
        newest.write_bytes(content)
        if loaded != step_of(wanted):
            raise Failed(f"{newest}: the state after step {loaded} was loaded")
        if wanted != newest and not any(newest.name in line and "damaged" in line for line in lines):
            raise Failed(f"{newest}: was passed over, and nothing was said")

    def files() -> None:
        with lab.fault(f"{lab.flips} flipped bytes") as say:
            newest, before = lab.copy_of_stopped()[0].states
            size = newest.stat().st_size
            for at in [0, size - 1, *(chosen.randrange(size) for _ in range(lab.flips - 2))][: lab.flips]:
                require_loaded(before, newest, functools.partial(flip, newest, at, chosen.randrange(1, 256)))
            say(f"of {size:,}: the state was never loaded, the one before always")
        with lab.fault("newest state cut off") as say:
            for length in (chosen.randrange(size), size - 1, 0):
                require_loaded(before, newest, functools.partial(os.truncate, newest, length))
            say("somewhere, by one byte, to nothing: the one before was loaded")
        with lab.fault("temporary file left over") as say:
            require_loaded(newest, newest, lambda: newest.with_name(f".{newest.name}.x.tmp").write_bytes(b"half"))
            say("not taken for a state")

    def all_damaged() -> None:
        with lab.fault("both states damaged: refused"):
            checkout, states = lab.copy_of_stopped()
            for path, content in states.items():
                flip(path, chosen.randrange(len(content)), chosen.randrange(1, 256))
            checkout.wait(checkout.train()).require(2, "no undamaged training state")

    def goes_on() -> None:
        with lab.fault("newest state cut off, an empty one and a temporary file beside it") as say:
            checkout, (newest, before) = lab.copy_of_stopped()
            os.truncate(newest, newest.stat().st_size // 2)
            newest.with_name(f"step_000000999.{'0' * 16}.pt").touch()
            newest.with_name(f".{newest.name}.x.tmp").write_bytes(b"half")
            if (continued := lab.finish(checkout)) != step_of(before):
                raise Failed(f"continued after step {continued}, and {before} was the undamaged one")
            if left := [*newest.parent.glob("*")]:
                raise Failed(f"{left[0]}: is left over")
            say(f"continued after step {continued}, same bytes")

    return [files, all_damaged, goes_on]


def _room(lab: Lab) -> Jobs:
    def disk() -> None:
        with lab.fault("no room to save") as say:
            checkout, states = lab.copy_of_stopped()
            process = checkout.train(largest_file=min(map(len, states.values())) // 2)
            checkout.wait(process).require(1, os.strerror(errno.EFBIG))
            require_kept(states)
            if left := [*checkout.root.glob(".runs/**/*.tmp")]:
                raise Failed(f"{left[0]}: is left over")
            say(f"exit 1, states intact; with room continued after step {lab.finish(checkout)}, same bytes")

    def read_only() -> None:
        with lab.fault("read-only results") as say:
            checkout, _ = lab.copy_of_stopped()
            (checkout.root / "results").chmod(0o555)
            if os.access(checkout.root / "results", os.W_OK):
                raise Skipped("permissions do not bind root; run it as another user")
            ended = checkout.wait(checkout.train())
            (checkout.root / "results").chmod(0o755)
            ended.require(ended.code or 1, "results")
            say(f"exit {ended.code}; when writable continued after step {lab.finish(checkout)}, same bytes")

    return [disk, read_only]


def _change(lab: Lab) -> Jobs:
    def data() -> None:
        with lab.fault("data changed under a stopped run: refused"):
            checkout, states = lab.copy_of_stopped()
            (checkout.root / "data").unlink()
            checkout.edit(generate={"seed": 1})
            checkout.wait(checkout.start("prepare-data")).require(0)
            checkout.wait(checkout.train()).require(2, "changed since this run began")
            require_kept(states)

    def params() -> None:
        with lab.fault("parameters changed under a stopped run") as say:
            checkout, states = lab.copy_of_stopped()
            checkout.edit(seed=1, epochs=1, snapshot_epochs=[])
            ended = checkout.wait(checkout.train())
            ended.require(0)
            if continued := ended.step("continuing after step"):
                raise Failed(f"continued after step {continued} with the other parameters")
            require_kept(states)
            say("started anew")

    def processes() -> None:
        with lab.fault("a run of one process continued by two: refused"):
            checkout, states = lab.copy_of_stopped()
            checkout.wait(checkout.train(2)).require(2, "was stopped with 1 process")
            require_kept(states)

    return [data, params, processes]


def _batch(lab: Lab) -> Jobs:
    def refused(name: str, size: int, processes: int, part: str) -> None:
        with lab.fault(f"{name}: refused"):
            (checkout := lab.checkout()).edit(batch_size=size)
            checkout.wait(checkout.train(processes)).require(2, part)

    return [
        functools.partial(refused, "batch that the processes do not divide", 128, 3, "does not divide by 3 processes"),
        functools.partial(refused, "batch larger than the data", 4096, 1, "only 1438 training images"),
        functools.partial(refused, "batch larger than the data, two processes", 4096, 2, "only 1438 training images"),
    ]


def _diverge(lab: Lab) -> Jobs:
    def diverges() -> None:
        with lab.fault("a run that diverges") as say:
            checkout = lab.checkout()
            checkout.edit(optim={"lr": 1e30, "lr_batch_size": 128, "warmup_epochs": 0, "clip_grad_norm": None})
            checkout.wait(checkout.train()).require(1, "2 steps in a row")
            (dump,) = checkout.root.glob(".runs/**/bad_step_*.pt")
            again = checkout.wait(checkout.start(*TRAIN, "--replay-bad-step", str(dump)))
            again.require(0)
            if "first output that is not finite: none" in again.out:
                raise Failed(f"{dump}: replayed, and every output is finite")
            say("exit 1 with a dump; replayed, exit 0")

    return [diverges]


GROUPS = {"kill": _kill, "two": _two, "signal": _signal, "state": _state}
GROUPS |= {"room": _room, "change": _change, "batch": _batch, "diverge": _diverge}
