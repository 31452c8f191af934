"""`repro selftest faults`: all of it, at its smallest, passes, and code that is broken does not."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = [
    "the same run twice: weights, curve and snapshots have the same bytes",
    "kill 1 of 1: at ",
    "two processes, uninterrupted: ",
    "a run of two processes continued by one: refused",
    "kill 1 of 1, two processes: at ",
    "SIGTERM: exit 143; continued after step ",
    "SIGINT: exit 130; continued after step ",
    "5 flipped bytes: ",
    "newest state cut off: ",
    "temporary file left over: not taken for a state",
    "both states damaged: refused",
    "newest state cut off, an empty one and a temporary file beside it: continued after step ",
    "no room to save: exit 1, states intact",
    "read-only results: ",
    "data changed under a stopped run: refused",
    "parameters changed under a stopped run: started from the beginning",
    "a run of one process continued by two: refused",
    "batch that the processes do not divide: refused",
    "batch larger than the data: refused",
    "batch larger than the data, two processes: refused",
    "a run that diverges: exit 1 with a dump; replayed, exit 0",
]


def run_selftest(root: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "repro", "selftest", "faults", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400)


def test_every_fault_is_survived():
    done = run_selftest(ROOT, "--kills", "1", "--flips", "5")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    for name in FAULTS:
        assert re.search(f"^(ok     |skipped) {re.escape(name)}", done.stdout, re.M), f"{name}\n{done.stdout}"
    assert re.search(rf"^{len(FAULTS)} faults: \d+ ok, 0 FAILED, [01] skipped$", done.stdout, re.M)


PLANTED = """
import os

_honest = save_weights

def save_weights(path, *args, **kwargs):
    _honest(path, *args, **kwargs)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1 + os.getpid() % 255
    path.write_bytes(content)
"""


def test_code_whose_runs_differ_fails(tmp_path):
    for package in ("repro", "kernels", "stages"):
        shutil.copytree(ROOT / package, tmp_path / package)
    with open(tmp_path / "repro/models/weights.py", "a") as stream:
        stream.write(PLANTED)
    done = run_selftest(tmp_path, "--only", "kill", "--kills", "0")
    assert done.returncode == 1
    assert re.search(r"^FAILED  the same run twice: .*weights\.safetensors: differs from the uninterrupted", done.stdout, re.M)
    assert done.stderr == "repro: selftest faults: 1 of 1 failed: the same run twice\n"
    assert "1 faults: 0 ok, 1 FAILED, 0 skipped" in done.stdout


def test_an_unknown_group_is_one_line(repro_cli):
    code, _, err = repro_cli("selftest", "faults", "--only", "kill,flood")
    assert code == 2 and err.count("\n") == 1 and "--only flood: no such group; known: kill, two, " in err
