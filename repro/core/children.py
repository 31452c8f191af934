"""Processes that end with the one that started them, what their exit codes say, and what other programs answer.

Nobody can pass a SIGKILL on. So a process that starts others gives them its number in the environment, and they wait
for its end. `python -m repro.core.children MODULE ...` runs a module that knows nothing of this, and passes the number
on to what the module starts.
"""

import logging
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

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
    """What a program of the system prints; None where it is missing, fails, or says nothing for 20 seconds."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _run_module() -> None:
    """Run the module of the command line; where torchrun says that a process of it was killed, end with a shell's code
    for that.
    """
    # it leads its group, and what it runs has a Ctrl-C's time to save
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
