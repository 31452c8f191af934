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
from repro.core.paths import Paths, find_root
from repro.core.record import read_record

from . import Stage

app = typer.Typer(help="Prove that this code does what it says.", no_args_is_help=True)

STAGE = Stage(purpose="prove")
PARAMS_FILES = 10_000  # of `--many`
GROUPS = ("kill", "two", "signal", "state", "room", "change", "batch", "diverge")  # words in the names of the tests


@app.command()
def faults(
    kills: Annotated[
        int | None, typer.Option(min=0, help="Kills: 20 at random moments and as many with two processes.")
    ] = None,
    flips: Annotated[
        int | None, typer.Option(min=1, help="How many bytes of a saved state to flip, one at a time: 100.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the moments and the bytes.")] = 0,
    only: Annotated[str | None, typer.Option(help=f"Some of {','.join(GROUPS)}.")] = None,
    many: Annotated[
        bool, typer.Option("--many", help="1,000 kills and flips of all kinds, 10,000 params files; a record.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary checkouts.")] = False,
) -> None:
    """Kill runs, fill the disk, damage files, change the data: a run must end with the same bits, or with one line."""
    root, chosen = find_root().root, only.split(",") if only else []
    if unknown := [word for word in chosen if word not in GROUPS]:
        raise UserError(f"selftest faults: --only {unknown[0]}: no such group{did_you_mean(unknown[0], GROUPS)}")
    if not (root / "tests" / "faults").is_dir():
        raise UserError(
            f"selftest faults: {root}: has no folder tests/faults; run it in a checkout of the whole repository"
        )
    if find_spec("xdist") is None:
        raise UserError("selftest faults: pytest and pytest-xdist are not installed; pip install -e '.[test]'")
    if not Path("/proc").is_dir():
        raise UserError(
            "selftest faults: the processes of a run are found in /proc, which this system lacks; run it on Linux"
        )
    if many:
        if only or keep or seed:
            raise UserError("selftest faults: --many takes no --only, --keep or --seed; leave them out")
        _run_campaign(root, kills, flips)
        return
    command = [sys.executable, "-m", "pytest", "-v", "-n", "auto", "--maxprocesses", "4", "tests/faults/test_faults.py"]
    command += ["-m", "", "-k", " or ".join(chosen)]  # those that are slow too
    settings = {
        "FAULT_KILLS": 20 if kills is None else kills,
        "FAULT_FLIPS": flips or 100,
        "FAULT_SEED": seed,
        "FAULT_KEEP": "yes" if keep else "",
    }
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
        raise RunError(
            "selftest faults: a run did not survive a fault as it should; the lines above say which fault, and what happened"
        )
    if code:
        raise RunError(f"selftest faults: pytest ended with code {code}; the lines above say why")


def _run_campaign(root: Path, kills: int | None, flips: int | None) -> None:
    """The faults by the thousand, two at a time."""
    # a child of a process with threads would wait for threads that it does not have
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(root))
    from tests.faults.campaign import list_cases, run_campaign

    cases = list_cases(1000 if kills is None else kills, 1000 if flips is None else flips, PARAMS_FILES)
    if not run_campaign(root, cases, jobs=2):
        raise RunError(
            f"selftest faults: some faults did not end as they should; the rows are in {root / '.runs' / 'faults'}"
        )


def describe_faults(paths: Paths) -> str:
    """What the records of `--many` count, for docs/training.md."""
    lines = []
    for file in sorted((paths.results / "measured").glob("*/faults/metrics.json")):
        record = read_record(file)
        counts = {group: list(kinds.values()) for group, kinds in record["metrics"].items()}
        tried, wrong = (
            {group: sum(each[key] for each in kinds) for group, kinds in counts.items()} for key in ("tried", "wrong")
        )
        lines.append(
            f"{record['identity']['device']}, commit {str(record['identity']['parent_commit'])[:8]}: "
            f"{tried['kill']:,} kills in {len(counts['kill'])} stages, {wrong['kill']} wrong; "
            f"{tried['flip']:,} flips, {wrong['flip']} unnoticed; "
            f"{tried['params']:,} altered params files, {wrong['params']} without a short line."
        )
    return "\n".join(lines) or "No campaign is recorded."
