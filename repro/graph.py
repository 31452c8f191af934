"""The graph of dvc.yaml: what needs what, and what is fresh, stale, missing or interrupted.

`table` is everywhere the table of stages, name -> `stages.Stage`.
"""

import contextlib
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .core.config import load_section
from .core.errors import RunError, UserError
from .core.paths import Paths


def load_params(paths: Paths, table: Mapping[str, Any], name: str, cell: str | None) -> Any:
    """The parameters of a stage or of one of its cells; None for a stage without a section. Raises UserError."""
    params = table[name].params
    return None if params is None else load_section(params, paths.params, name, *([cell] if cell else []))


@contextlib.contextmanager
def open_dvc(root: Path) -> Iterator[Any]:
    """DVC's `Repo` of a checkout, meanwhile the working directory; what DVC cannot do is a RunError of one line."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with contextlib.chdir(root), Repo(str(root)) as repo:  # DVC names files as the working directory sees them
            yield repo
    except DvcException as error:
        raise RunError(f"{root / 'dvc.yaml'}: {' '.join(str(error).split())}") from None


def find_needs(root: Path) -> dict[str, tuple[str, ...]]:
    """Each stage, or cell of one, as DVC calls it, e.g. `pretrain@vittt_nano_digits` -> those whose output it reads.

    Those with the longest chain behind them come first. Raises RunError.
    """
    with open_dvc(root) as repo:
        graph = repo.index.graph  # from each stage to those that it needs
        needs = {each.name: tuple(sorted(other.name for other in graph.successors(each))) for each in repo.index.stages}
    depths = dict.fromkeys(needs, 0)  # how many follow it, one after another
    for name in reversed([*graphlib.TopologicalSorter(needs).static_order()]):
        for needed in needs[name]:
            depths[needed] = max(depths[needed], depths[name] + 1)
    return {name: needs[name] for name in sorted(needs, key=lambda name: -depths[name])}


def find_status(paths: Paths, table: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(stage, status, why) per stage and cell of dvc.yaml, in its order.

    `interrupted`: a run was stopped and its saved state waits under .runs; `missing`: an output is not there; `stale`:
    a dependency, a parameter or an output changed since the result was made; else `fresh`.

    Raises:
        RunError: DVC cannot say. UserError: wrong parameters.
    """
    with open_dvc(paths.root) as repo:
        names, changed = [stage.name for stage in repo.index.stages], repo.status()
    rows = []
    for name in names:
        whys = [why for why in changed.get(name, []) if why != "always changed"]
        outs = {out: how for why in whys if isinstance(why, dict) for out, how in why.get("changed outs", {}).items()}
        deps = [dep for why in whys if isinstance(why, dict) for dep in why.get("changed deps", {})]
        state = _find_saved_state(paths, table, name)
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


def _find_saved_state(paths: Paths, table: Mapping[str, Any], name: str) -> Path | None:
    """The newest saved state of a training cell, for its parameters as they are now; of several seeds the last one
    begun.
    """
    stage, _, cell = name.partition("@")
    row = table.get(stage)
    if row is None or row.task is None:
        return None
    from .runs.job import Cell

    try:
        params = load_params(paths, table, stage, cell)
    except (UserError, OSError):  # no run can have started with these
        return None
    of_cell = Cell(
        stage=stage, name=cell, params=params, spec=row.task, paths=paths, runtime=None, folder=paths.cell(stage, cell)
    )
    folders = [of_cell.state_folder(seed) for seed in reversed(params.seeds)]
    return next((max(saved) for folder in folders if (saved := list(folder.glob("step_*.pt")))), None)
