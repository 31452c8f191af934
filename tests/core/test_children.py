"""Processes that end with the one that started them, real ones, and what exit codes say."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repro.core.children import PARENT, describe_death
from tests.conftest import ROOT, run_python

CHILD = """
import signal, sys, time
from repro.core.children import follow_parent
signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').close(), sys.exit()))
follow_parent()
open('began', 'w').close()
time.sleep(60)
"""


def wait_for(file: Path) -> None:
    until = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} did not come"
        time.sleep(0.02)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
def test_a_process_ends_in_order_when_the_one_that_started_it_is_killed(tmp_path):
    """With a shell between them, as under DVC."""
    (tmp_path / "child.py").write_text(CHILD)
    parent = f"{PARENT}=$$ sh -c {shlex.quote(f'{sys.executable} child.py; true')}; true"
    process = subprocess.Popen(["sh", "-c", parent], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    wait_for(tmp_path / "began")
    assert not (tmp_path / "saved").exists()
    process.kill()
    wait_for(tmp_path / "saved")
    process.wait()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd")
def test_a_process_whose_parent_is_gone_before_it_begins_ends_at_once():
    (gone := subprocess.Popen(["true"])).wait()
    program = "from repro.core.children import follow_parent; follow_parent(); import time; time.sleep(60)"
    assert run_python("-c", program, **{PARENT: str(gone.pid)}).returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "number"), [(-9, 9), (137, 9), (-15, 15), (139, 11), (143, None), (130, None), (1, None), (255, None)]
)
def test_which_exit_codes_are_deaths(code, number):
    """143 and 130 are what this project's own processes end with when a signal stopped them."""
    said = describe_death(code)
    assert (said is None) if number is None else (f"signal {number}" in said and ("memory" in said) == (number == 9))
