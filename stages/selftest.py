"""`repro selftest faults`: faults of many kinds, done to real training runs of this code; see tests/faults."""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from repro.core.errors import RunError, UserError, did_you_mean
from repro.core.paths import find_root

from . import Stage

app = typer.Typer(help="Prove that this code does what it says.", no_args_is_help=True)

STAGE = Stage(purpose="prove")
GROUPS = ("kill", "two", "signal", "state", "room", "change", "batch", "diverge")  # words in the names of the tests


@app.command()
def faults(
    kills: Annotated[int, typer.Option(min=0, help="Number of kills at random moments; as many with two processes.")] = 20,
    flips: Annotated[int, typer.Option(min=1, help="How many bytes of a saved state to flip, one at a time.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the moments and the bytes.")] = 0,
    only: Annotated[str | None, typer.Option(help=f"Some of {','.join(GROUPS)}.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary checkouts.")] = False,
) -> None:
    """Kill runs, fill the disk, damage files, change the data: a run must end with the same bits, or with one line."""
    root, chosen = find_root().root, only.split(",") if only else []
    if unknown := [word for word in chosen if word not in GROUPS]:
        raise UserError(f"selftest faults: --only {unknown[0]}: no such group{did_you_mean(unknown[0], GROUPS)}")
    if not (root / "tests" / "faults").is_dir():
        raise UserError(f"selftest faults: {root}: has no folder tests/faults; run it in a checkout of the whole repository")
    if find_spec("xdist") is None:
        raise UserError("selftest faults: pytest and pytest-xdist are not installed; pip install -e '.[test]'")
    if not Path("/proc").is_dir():
        raise UserError("selftest faults: the processes of a run are found in /proc, which this system lacks; run it on Linux")
    command = [sys.executable, "-m", "pytest", "-v", "-n", "auto", "--maxprocesses", "4", "tests/faults"]
    command += ["-m", "", "-k", " or ".join(chosen)]  # those that are slow too
    settings = {"FAULT_KILLS": kills, "FAULT_FLIPS": flips, "FAULT_SEED": seed, "FAULT_KEEP": "yes" if keep else ""}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in settings.items()}
    if keep:
        command += ["--basetemp", tempfile.mkdtemp(prefix="repro_faults_")]
        print(f"the checkouts stay in {command[-1]}", flush=True)
    process = subprocess.Popen(command, cwd=root, env=environment)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # it came to pytest too, which ends what it started
        process.wait()
        raise
    if code == 1:
        raise RunError("selftest faults: a run did not survive a fault as it should; the lines above say which fault, and what happened")
    if code:
        raise RunError(f"selftest faults: pytest ended with code {code}; the lines above say why")
