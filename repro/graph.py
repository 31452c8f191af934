"""The graph of dvc.yaml: dependencies of the stages, and their status (fresh, stale, missing or interrupted).

The argument `table` is always the table of stages, name -> `stages.Stage`.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from .core.config import load_section
from .core.errors import RunError, UserError
from .core.paths import Paths

_STATUSES = ("fresh", "interrupted", "missing", "stale")
_MOST_SHOWN = 2  # cell names of a status, or reasons, on a line; the others are only counted


@contextlib.contextmanager
def _open_dvc(root: Path) -> Iterator[Any]:
    """Open DVC's `Repo` of a work tree, which is the working directory meanwhile; a DVC error becomes a RunError."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with contextlib.chdir(root), Repo(str(root)) as repo:  # DVC names files relative to the working directory
            yield repo
    except DvcException as error:
        raise RunError(f"{root / 'dvc.yaml'}: {' '.join(str(error).split())}") from None


def find_needs(root: Path) -> dict[str, tuple[str, ...]]:
    """Return each stage or cell by DVC's name, e.g. `pretrain@vittt_nano_digits` -> the stages whose outputs it reads.

    Stages with the longest chain of dependants come first.

    Raises:
        RunError: DVC cannot read dvc.yaml.
    """
    import networkx

    with _open_dvc(root) as repo:
        graph = repo.index.graph  # networkx's, with an edge from each stage to those that it needs
        # the number of a stage's generation is the length of its longest chain of dependants
        generations = enumerate(networkx.topological_generations(graph))
        depths = {stage: depth for depth, generation in generations for stage in generation}
        stages = sorted(repo.index.stages, key=lambda stage: -depths[stage])
        return {stage.name: tuple(sorted(needed.name for needed in graph.successors(stage))) for stage in stages}


def find_status(paths: Paths, table: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Return (stage, status, reasons) of every stage and cell of dvc.yaml, in its order.

    `interrupted`: a run was stopped, and its saved state under .runs can be continued. `missing`: an output does not
    exist. `stale`: a dependency, a parameter or an output changed since the result was made. `fresh`: none of these.

    Raises:
        RunError: DVC fails.
        UserError: wrong parameters.
    """
    from dvc.dependency import param
    from dvc.repo import lock_repo

    # cached, because DVC would parse params.yaml again for each cell, and dvc.yaml and dvc.lock twice
    once = mock.patch.object(param, "load_path", functools.cache(param.load_path))
    with _open_dvc(paths.root) as repo, lock_repo(repo), once:
        names, changed = [stage.name for stage in repo.index.stages], repo.status()
    rows: list[tuple[str, str, list[str]]] = []
    for name in names:
        # a reason is a sentence, or the changed files by what they are to the stage
        # the stage `environment`, which always runs, also has the sentence "always changed": it is fresh nevertheless
        whys = [why for why in changed.get(name, []) if why != "always changed"]
        files = [why for why in whys if isinstance(why, dict)]
        outs, deps = ([file for why in files for file in why.get(f"changed {kind}", ())] for kind in ("outs", "deps"))
        state = _find_saved_state(paths, table, name)
        missing = [out for out in outs if not (paths.root / out).exists()]
        if state is not None:
            step = int(state.name.split(".")[0].removeprefix("step_"))
            rows.append((name, "interrupted", [f"stopped after step {step}; it continues from there"]))
        elif missing:
            rows.append((name, "missing", missing))
        elif whys:
            rows.append((name, "stale", [*deps, *outs, *(why for why in whys if isinstance(why, str))]))
        else:
            rows.append((name, "fresh", []))
    return rows


def join_cells(rows: Sequence[tuple[str, str, Sequence[str]]]) -> list[tuple[str, str, str]]:
    """Join the rows of `find_status` into one (stage, status, reasons) for all cells of a stage.

    The status counts the fresh cells, and counts and names the others.
    """
    joined = []
    for stage, group in itertools.groupby(rows, key=lambda row: row[0].partition("@")[0]):
        of_stage = list(group)
        status, whys = of_stage[0][1], dict.fromkeys(why for row in of_stage for why in row[2])
        if "@" in of_stage[0][0]:
            cells = {each: [name.partition("@")[2] for name, its, _ in of_stage if its == each] for each in _STATUSES}
            parts = [
                f"{len(names)} {each}{f' ({_shorten(names)})' if each != 'fresh' else ''}"
                for each, names in cells.items()
                if names
            ]
            status = f"{len(of_stage)} cell{'s' if len(of_stage) > 1 else ''}: {', '.join(parts)}"
        joined.append((stage, status, _shorten(list(whys))))
    return joined


def _shorten(texts: Sequence[str]) -> str:
    """Join the first texts, and count the others."""
    shown = ", ".join(texts[:_MOST_SHOWN])
    return shown if len(texts) <= _MOST_SHOWN else f"{shown} and {len(texts) - _MOST_SHOWN} more"


def _find_saved_state(paths: Paths, table: Mapping[str, Any], name: str) -> Path | None:
    """Find the newest saved state of a training cell under its present parameters, of the last seed that was begun.

    The newest is the last by name, because `training.checkpoint` pads the step with zeros.
    """
    stage, _, cell = name.partition("@")
    row = table.get(stage)
    if row is None or row.task is None or not any(paths.run_state(stage, cell, "").glob("seed_*/step_*.pt")):
        return None
    try:
        params = load_section(row.params, paths.params, stage, cell)
    except (UserError, OSError):  # no run can start with invalid parameters, so none has a state
        return None
    folders = [paths.run_state(stage, cell, params.state_key(seed)) for seed in reversed(params.seeds)]
    return next((max(saved) for folder in folders if (saved := list(folder.glob("step_*.pt")))), None)
