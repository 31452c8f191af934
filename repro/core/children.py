"""Processes that end with the one that started them, signals, exit codes, and the output of other programs.

A SIGKILL cannot be passed on. So a process that starts others gives them its number in the environment, and they wait
for its end. `python -m repro.core.children MODULE ...` runs a module that knows nothing of this, and passes the number
on to what the module starts.
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

# of the environment: the number of the process with which this one ends
PARENT = "REPRO_PARENT"


def end_in_order() -> None:
    """Send this process SIGTERM: a training saves its state."""
    os.kill(os.getpid(), signal.SIGTERM)


def follow_parent(end: Callable[[], None] = end_in_order) -> None:
    """Call `end` once the process that the environment names is gone; without a name, or without Linux's pidfd, do
    nothing.
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

    It leads a session of its own: a Ctrl-C in the terminal reaches it once, and only through this process.

    Args:
        log: takes what it prints.
        environment: its variables besides those of this process. folder: where it works.
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
    """`killed by signal 9 (out of memory?)` for an exit code, a shell's 137 among them; None for a process that ended
    by itself.

    Args:
        code: of `subprocess`, or of a shell. 130 and 143 are those of a process that a signal stopped in order.
    """
    number = -code if code < 0 else code - 128
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) or number not in set(signal.valid_signals()):
        return None
    return f"killed by signal {number:d}{' (out of memory?)' if number == signal.SIGKILL else ''}"


def ask(command: Sequence[str], folder: Path | None = None) -> str | None:
    """Run a program of the system and return its output; None where it is missing, fails, or takes 20 seconds."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _run_module() -> None:
    """Run the module of the command line; where torchrun says that a process of it was killed, end with a shell's code
    for that.
    """
    # it leads its group; its children have the time of a Ctrl-C to save
    follow_parent(lambda: os.killpg(0, signal.SIGINT))
    os.environ[PARENT] = str(os.getpid())
    logging.disable(logging.INFO)  # else the last lines of a log are DVC's, about dvc.lock
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        if not hasattr(error, "failures"):  # not torchrun's, whose class would take an import of torch to name
            raise
        print(error, file=sys.stderr)
        codes = [failure.exitcode for failure in error.failures.values()]
        # which torchrun sends to those that are left
        killed = [code for code in codes if code < 0 and code != -signal.SIGTERM]
        sys.exit(128 - killed[0] if killed else 1)


if __name__ == "__main__":
    _run_module()
