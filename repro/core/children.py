"""Child processes that end with their parent, signals, exit codes, and the output of other programs.

A process that is killed by SIGKILL cannot stop its children. So it gives them its process id in the environment, and
they watch for its end. `python -m repro.core.children MODULE ...` runs a module that does not know this protocol, and
passes its own id on to the processes that the module starts.
"""

import contextlib
import logging
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# environment variable with the id of the process with which this one ends
PARENT = "REPRO_PARENT"


def follow_parent(end: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)) -> None:
    """Start a thread that calls `end` once the process that the environment names in `PARENT` is gone.

    By default `end` sends this process SIGTERM, at which a training saves its state. Without a name, or without Linux's
    pidfd, nothing is started.
    """
    if PARENT not in os.environ or not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(int(os.environ[PARENT]))
    except ProcessLookupError:
        end()
        return
    except OSError:  # an older kernel, or a sandbox
        return

    def wait() -> None:
        select.select([parent], [], [])
        end()

    threading.Thread(target=wait, daemon=True).start()


def leave_with_parent() -> None:
    """End this process of `multiprocessing` once its parent is gone, even in the middle of other work."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def catch_signals(*, twice: bool = False) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the yielded list instead of dying from them; a second signal is not held back.

    With `twice` a second one is held back too: under torchrun a process is signalled by the user and by
    torchrun, which sends SIGKILL to those that do not end.
    """
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        for each in () if twice else signals:
            signal.signal(each, before[each])

    for number in signals:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number in signals:
            signal.signal(number, before[number])


def start_logged(
    module: str, *arguments: str, log: Path, environment: Mapping[str, str], folder: Path
) -> subprocess.Popen:
    """Start `python -m MODULE ARGUMENTS`, which ends with this process if it is `repro` or this module.

    The child leads its own session, so that a Ctrl-C in the terminal reaches it once, and only through this process.
    `pipeline.run_stages` and `_run_module` send signals to its whole group, which must hold no other process.

    Args:
        log: the file of its output.
        environment: environment variables in addition to those of this process.
        folder: its working directory.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment, PARENT: str(os.getpid())},
            start_new_session=True,
        )


def describe_death(code: int) -> str | None:
    """Describe the exit code of a killed process: `killed by signal 9 (out of memory?)`; None for any other process.

    Args:
        code: an exit code of `subprocess`, negative for a signal, or of a shell, such as 137. With 130 and 143 the
            process itself reacted to a signal and ended in order.
    """
    number = -code if code < 0 else code - 128
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) or number not in set(signal.valid_signals()):
        return None
    return f"killed by signal {number:d}{' (out of memory?)' if number == signal.SIGKILL else ''}"


def ask(command: Sequence[str], folder: Path | None = None) -> str | None:
    """Run a program of the system and return its output; None if it is missing, fails, or takes over 20 seconds."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _run_module() -> None:
    """Run the module of the command line.

    If torchrun reports that one of its processes was killed by signal N, exit with a shell's code for that, 128 + N.
    """
    # this process leads its group: all children get the signal of a Ctrl-C, after which they save their states
    follow_parent(lambda: os.killpg(0, signal.SIGINT))
    os.environ[PARENT] = str(os.getpid())  # only now: `follow_parent` has read the parent's id from there
    logging.disable(logging.INFO)  # otherwise DVC's messages about dvc.lock would be the last lines of a log
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        if not hasattr(error, "failures"):  # only torchrun's error has it; naming its class would need to import torch
            raise
        print(error, file=sys.stderr)
        codes = [failure.exitcode for failure in error.failures.values()]
        # after a failure, torchrun sends SIGTERM to the other processes, so that is never the cause
        killed = [code for code in codes if code < 0 and code != -signal.SIGTERM]
        sys.exit(128 - killed[0] if killed else 1)


if __name__ == "__main__":
    _run_module()
