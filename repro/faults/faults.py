"""The faults in groups. Each group is a function of the lab that returns jobs, and each job reports one or more faults to it."""

import errno
import functools
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..core.errors import RunError, UserError, did_you_mean
from ..training.checkpoint import Checkpointer
from .lab import SAVE_EVERY, TRAIN, Failure, Jobs, Lab, Skip, choose_seed, flip, kill_all_in, require_kept, step_of


def run_faults(*, kills: int, flips: int, seed: int, only: Collection[str] | None = None, keep: bool = False) -> None:
    """Do the faults in temporary checkouts and print a line for each.

    Args:
        kills: random moments of a training at which it is killed, with one process and with two.
        flips: bytes of a saved state that are flipped, one at a time.
        seed: chooses the moments and the bytes.
        only: names of groups; None takes all of `GROUPS`.
        keep: leave the temporary checkouts behind.

    Raises:
        UserError: no such group, or a system without /proc. RunError: a fault was not survived.
    """
    if not Path("/proc").is_dir():
        raise UserError("selftest faults: the processes of a run are found in /proc, which this system lacks; run it on Linux")
    chosen = GROUPS if only is None else only
    if unknown := sorted(set(chosen) - set(GROUPS)):
        raise UserError(f"selftest faults: --only {unknown[0]}: no such group{did_you_mean(unknown[0], GROUPS)}")
    lab = Lab(folder=Path(tempfile.mkdtemp(prefix="repro_faults_")).resolve(), kills=kills, flips=flips, seed=seed)
    print(f"in {lab.folder}{'' if keep else ', removed at the end'}", flush=True)
    try:
        lab.prepare()
        lab.run_jobs(GROUPS[name] for name in GROUPS if name in chosen)
    finally:
        kill_all_in(lab.folder)
        if not keep:
            shutil.rmtree(lab.folder, ignore_errors=True)
    counts = ", ".join(f"{len(lab.with_verdict(verdict))} {verdict}" for verdict in ("ok", "FAILED", "skipped"))
    print(f"{len(lab.verdicts)} faults: {counts}")
    if failed := lab.with_verdict("FAILED"):
        raise RunError(f"selftest faults: {len(failed)} of {len(lab.verdicts)} failed: {'; '.join(failed)}")


def _kill(lab: Lab) -> Jobs:
    moments = _choose_moments(lab, "kill")
    return [functools.partial(_kill_and_finish, lab, f"kill {i} of {lab.kills}", share, 1) for i, share in moments]


def _choose_moments(lab: Lab, purpose: str) -> list[tuple[int, float]]:
    """Numbered from 1: a random moment in each of `kills` equal parts of a run, as a share of its time."""
    chosen = random.Random(f"{lab.seed} {purpose}")
    return [(i + 1, (i + chosen.random()) / lab.kills) for i in range(lab.kills)]


def _kill_and_finish(lab: Lab, name: str, share: float, processes: int) -> None:
    with lab.fault(name) as note:
        checkout, moment, killed = lab.kill_run(share, processes)
        reached = killed.find_step("step")
        # once the results are written the states are removed, and nothing is lost with them
        ended = (checkout.results / "metrics.json").exists()
        continued = lab.finish_run(checkout, processes)
        if reached - continued > SAVE_EVERY and not ended:
            raise Failure(f"killed after step {reached}, continued after step {continued}; {SAVE_EVERY} steps may be lost")
        note(f"at {moment:.2f} s, after {'its end' if ended else f'step {reached}'}; continued after step {continued}, same bytes")


def _two_processes(lab: Lab) -> Jobs:
    def one_after_another() -> None:
        checkout, begun = lab.make_checkout(), lab.make_checkout()
        with lab.fault("two processes, uninterrupted") as note:
            process, states = checkout.start_training(2), []
            began = checkout.wait_for_training(process)
            while process.poll() is None and not (states := checkout.states):
                time.sleep(0.005)
            for path in states and (states[0], states[0].with_name("run.json")):
                (copied := begun.root / path.relative_to(checkout.root)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)
            checkout.wait(process).require(0)
            lab.whole[2], lab.seconds[2] = checkout, checkout.seconds_to_results(began)
            note(f"{lab.seconds[2]:.1f} s")
        if 2 not in lab.whole:
            return
        with lab.fault("a run of two processes continued by one: refused"):
            begun.wait(begun.start_training()).require(2, "was stopped with 2 process")
        for i, share in _choose_moments(lab, "two"):
            _kill_and_finish(lab, f"kill {i} of {lab.kills}, two processes", share, 2)

    return [one_after_another]


def _signal(lab: Lab) -> Jobs:
    def stop_and_finish(number: signal.Signals, code: int) -> None:
        with lab.fault(number.name) as note:
            stopped = lab.stopped.result() if number == signal.SIGTERM else lab.stop_run(number, code)
            note(f"exit {code}; continued after step {lab.finish_run(lab.make_checkout(stopped))}, same bytes")

    return [functools.partial(stop_and_finish, signal.SIGTERM, 143), functools.partial(stop_and_finish, signal.SIGINT, 130)]


def _state(lab: Lab) -> Jobs:
    chosen = random.Random(f"{lab.seed} state")

    def require_loaded(wanted: Path, newest: Path, change: Callable[[], Any]) -> None:
        content, lines = newest.read_bytes(), []
        change()
        loaded = Checkpointer(newest.parent, log=lines.append).restore()["run"]["step"]
        newest.write_bytes(content)
        if loaded != step_of(wanted):
            raise Failure(f"{newest}: the state after step {loaded} was loaded")
        if wanted != newest and not any(newest.name in line and "damaged" in line for line in lines):
            raise Failure(f"{newest}: was passed over without a message")

    def damage_files() -> None:
        with lab.fault(f"{lab.flips} flipped bytes") as note:
            newest, before = lab.copy_stopped()[0].states
            size = newest.stat().st_size
            for at in [0, size - 1, *(chosen.randrange(size) for _ in range(lab.flips - 2))][: lab.flips]:
                require_loaded(before, newest, functools.partial(flip, newest, at, chosen.randrange(1, 256)))
            note(f"of {size:,}: the state was never loaded, the one before always")
        with lab.fault("newest state cut off") as note:
            for length in (chosen.randrange(size), size - 1, 0):
                require_loaded(before, newest, functools.partial(os.truncate, newest, length))
            note("somewhere, by one byte, to nothing: the one before was loaded")
        with lab.fault("temporary file left over") as note:
            require_loaded(newest, newest, lambda: newest.with_name(f".{newest.name}.x.tmp").write_bytes(b"half"))
            note("not taken for a state")

    def damage_both() -> None:
        with lab.fault("both states damaged: refused"):
            checkout, states = lab.copy_stopped()
            for path, content in states.items():
                flip(path, chosen.randrange(len(content)), chosen.randrange(1, 256))
            checkout.wait(checkout.start_training()).require(2, "no undamaged training state")

    def continue_from_the_one_before() -> None:
        with lab.fault("newest state cut off, an empty one and a temporary file beside it") as note:
            checkout, (newest, before) = lab.copy_stopped()
            os.truncate(newest, newest.stat().st_size // 2)
            newest.with_name(f"step_000000999.{'0' * 16}.pt").touch()
            newest.with_name(f".{newest.name}.x.tmp").write_bytes(b"half")
            if (continued := lab.finish_run(checkout)) != step_of(before):
                raise Failure(f"continued after step {continued}, and {before} was the undamaged one")
            if left := [*newest.parent.glob("*")]:
                raise Failure(f"{left[0]}: is left over")
            note(f"continued after step {continued}, same bytes")

    return [damage_files, damage_both, continue_from_the_one_before]


def _room(lab: Lab) -> Jobs:
    def fill_disk() -> None:
        with lab.fault("no room to save") as note:
            checkout, states = lab.copy_stopped()
            process = checkout.start_training(largest_file=min(map(len, states.values())) // 2)
            checkout.wait(process).require(1, os.strerror(errno.EFBIG))
            require_kept(states)
            if left := [*checkout.root.glob(".runs/**/*.tmp")]:
                raise Failure(f"{left[0]}: is left over")
            note(f"exit 1, states intact; with room continued after step {lab.finish_run(checkout)}, same bytes")

    def protect_results() -> None:
        with lab.fault("read-only results") as note:
            checkout, _ = lab.copy_stopped()
            (checkout.root / "results").chmod(0o555)
            if os.access(checkout.root / "results", os.W_OK):
                raise Skip("permissions do not bind root; run it as another user")
            result = checkout.wait(checkout.start_training())
            (checkout.root / "results").chmod(0o755)
            result.require(result.code or 1, "results")
            note(f"exit {result.code}; when writable continued after step {lab.finish_run(checkout)}, same bytes")

    return [fill_disk, protect_results]


def _change(lab: Lab) -> Jobs:
    def change_data() -> None:
        with lab.fault("data changed under a stopped run: refused"):
            checkout, states = lab.copy_stopped()
            (checkout.root / "data").unlink()
            checkout.edit(generate={"seed": 1})
            checkout.wait(checkout.start("prepare-data")).require(0)
            checkout.wait(checkout.start_training()).require(2, "changed since this run began")
            require_kept(states)

    def change_params() -> None:
        with lab.fault("parameters changed under a stopped run") as note:
            checkout, states = lab.copy_stopped()
            checkout.edit(**choose_seed(1), epochs=1, snapshot_epochs=[])
            result = checkout.wait(checkout.start_training())
            result.require(0)
            if continued := result.find_step("continuing after step"):
                raise Failure(f"continued after step {continued} with the other parameters")
            require_kept(states)
            note("started from the beginning")

    def change_processes() -> None:
        with lab.fault("a run of one process continued by two: refused"):
            checkout, states = lab.copy_stopped()
            checkout.wait(checkout.start_training(2)).require(2, "was stopped with 1 process")
            require_kept(states)

    return [change_data, change_params, change_processes]


def _batch(lab: Lab) -> Jobs:
    def refuse(name: str, size: int, processes: int, part: str) -> None:
        with lab.fault(f"{name}: refused"):
            (checkout := lab.make_checkout()).edit(batch_size=size)
            checkout.wait(checkout.start_training(processes)).require(2, part)

    return [
        functools.partial(refuse, "batch that the processes do not divide", 128, 3, "does not divide by 3 processes"),
        functools.partial(refuse, "batch larger than the data", 4096, 1, "only 1438 training images"),
        functools.partial(refuse, "batch larger than the data, two processes", 4096, 2, "only 1438 training images"),
    ]


def _diverge(lab: Lab) -> Jobs:
    def diverge() -> None:
        with lab.fault("a run that diverges") as note:
            checkout = lab.make_checkout()
            checkout.edit(optim={"lr": 1e30, "lr_batch_size": 128, "warmup_epochs": 0, "clip_grad_norm": None})
            checkout.wait(checkout.start_training()).require(1, "2 steps in a row")
            (dump,) = checkout.root.glob(".runs/**/bad_step_*.pt")
            again = checkout.wait(checkout.start(*TRAIN, "--replay-bad-step", str(dump)))
            again.require(0)
            if "first output that is not finite: none" in again.out:
                raise Failure(f"{dump}: replayed, and every output is finite")
            note("exit 1 with a dump; replayed, exit 0")

    return [diverge]


GROUPS: dict[str, Callable[[Lab], Jobs]] = {
    "kill": _kill,
    "two": _two_processes,
    "signal": _signal,
    "state": _state,
    "room": _room,
    "change": _change,
    "batch": _batch,
    "diverge": _diverge,
}
