"""`repro status`: what is fresh, stale, missing or interrupted, and the next command."""

import json
import subprocess
import sys
from pathlib import Path

from repro.core.config import load_section
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root

from . import Stage
from .ablate import AblateParams, run_name
from .detect import DetectParams
from .pretrain import PretrainParams
from .segment import SegmentParams
from .training import state_folder

TRAINED = {"pretrain": PretrainParams, "baselines": PretrainParams, "detect": DetectParams, "segment": SegmentParams}

STAGE = Stage(purpose="check")


def command() -> None:
    """Show each stage and cell: fresh, stale, missing or interrupted, and the command to run next."""
    from rich.console import Console
    from rich.table import Table

    rows = run(find_root())
    table = Table("stage", "status", "why")
    for name, status, why in rows:
        table.add_row(name, status, why)
    Console().print(table)
    waiting = [name for name, status, _ in rows if status != "fresh"]
    stopped = [name for name, status, _ in rows if status == "interrupted"]
    command_line = f"dvc repro {stopped[0]}" if stopped else "dvc repro" if waiting else None
    print(f"next: {command_line}" if command_line else "next: nothing to do; results/tables.md is up to date")


def run(paths: Paths) -> list[tuple[str, str, str]]:
    """(stage, status, why) per stage and cell of dvc.yaml, in its order.

    `interrupted`: a run was stopped and its saved state waits under .runs; `missing`: an output is not there; `stale`: a
    dependency, a parameter or an output changed since the result was made; else `fresh`.

    Raises:
        RunError: DVC cannot say.
    """
    changed = json.loads(_dvc(paths, "status", "--json"))
    names = _dvc(paths, "stage", "list", "--name-only").split()
    rows = []
    for name in names:
        whys = [why for why in changed.get(name, []) if why != "always changed"]
        outs = {out: how for why in whys if isinstance(why, dict) for out, how in why.get("changed outs", {}).items()}
        deps = [dep for why in whys if isinstance(why, dict) for dep in why.get("changed deps", {})]
        state = _saved_state(paths, name)
        missing = [out for out, how in outs.items() if how == "deleted"]
        if state is not None:
            step = int(state.name.split(".")[0].removeprefix("step_"))
            rows.append((name, "interrupted", f"stopped after step {step}; it continues from there"))
        elif missing:
            rows.append((name, "missing", ", ".join(missing)))
        elif whys:
            others = [why for why in whys if isinstance(why, str)]
            rows.append((name, "stale", ", ".join([*deps, *outs, *others])))
        else:
            rows.append((name, "fresh", ""))
    return rows


def _saved_state(paths: Paths, name: str) -> Path | None:
    """The newest saved state of a training cell, for its parameters and its data as they are now."""
    stage, _, cell = name.partition("@")
    try:
        if stage == "ablate":
            params = load_section(AblateParams, paths.params, stage, cell)
            folders = [state_folder(params.with_seed(seed), paths, stage, run_name(cell, seed)) for seed in params.seeds]
        elif stage in TRAINED:
            folders = [state_folder(load_section(TRAINED[stage], paths.params, stage, cell), paths, stage, cell)]
        else:
            return None
    except (UserError, OSError):  # parameters or data that no run can have started with
        return None
    # of several seeds the last one that was begun
    return next((max(saved) for folder in reversed(folders) if (saved := list(folder.glob("step_*.pt")))), None)


def _dvc(paths: Paths, *args: str) -> str:
    done = subprocess.run([sys.executable, "-m", "dvc", *args], cwd=paths.root, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"dvc {' '.join(args)}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}")
    return done.stdout
