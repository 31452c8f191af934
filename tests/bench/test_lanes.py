"""Calls in processes of their own: in order, side by side, each process replaced where it is lost."""

import os
import signal
import subprocess
import sys

import pytest

from repro.bench.lanes import run_in_lanes
from tests.conftest import ROOT


def call(task):
    """A task of 3 loses its process, one of 4 kills it, one of 9 raises."""
    if task == 4:
        os._exit(1)
    if task == 9:
        raise ValueError("nine")
    return (task, os.getpid()), task == 3


def run(tasks, lanes, **options):
    return list(run_in_lanes(tasks, call, lanes, lambda task: (task, None), **options))


def test_every_task_is_answered_in_order():
    found = run([0, 1, 2, 5, 6, 7], 2)
    assert [task for task, _ in found] == [task for _, (task, _) in found] == [0, 1, 2, 5, 6, 7]
    assert len({pid for _, (_, pid) in found}) <= 2


@pytest.mark.slow
def test_a_lost_and_a_killed_process_are_replaced():
    answers = dict(run([1, 3, 5, 4, 6], 1))
    pids = {task: pid for task, (_, pid) in answers.items()}
    assert pids[1] == pids[3] and pids[4] is None and len({pids[3], pids[5], pids[6]}) == 3


def test_nothing_is_begun_once_it_is_late():
    assert run([1, 2], 1, is_late=lambda: True) == []


def test_an_error_ends_the_run_and_loses_no_task_in_silence():
    with pytest.raises(ValueError, match="nine"):
        run([1, 9, 2], 1)


_ORPHAN = """
import os, signal, time
from repro.bench.lanes import run_in_lanes

def call(task):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(99)

if __name__ == "__main__":
    list(run_in_lanes([0], call, 1, None))
"""


def test_a_worker_ends_with_the_process_that_waits_for_it(tmp_path):
    """Its task kills that process and goes on; the pipe that both hold is closed when both are gone."""
    (script := tmp_path / "orphan.py").write_text(_ORPHAN)
    how = {"capture_output": True, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "timeout": 60}
    assert subprocess.run([sys.executable, script], **how).returncode == -signal.SIGTERM
