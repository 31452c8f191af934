"""The graph of dvc.yaml: which sources each stage depends on, what is fresh, stale, missing or interrupted, and which
records are old.

`table` is everywhere the table of stages, name -> `stages.Stage`.
"""

import contextlib
import graphlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .core.config import load_section, load_sections, load_yaml
from .core.errors import RunError, UserError
from .core.freshness import FOLLOWED, OLDER_VERSION, OTHER_CODE, RENEWED, STALE, find_old
from .core.hashing import hash_sources, import_closure, short_hash
from .core.paths import Paths
from .core.record import DETAILS_FILE, read_record, write_json


class OldRecord(NamedTuple):
    """A record that the code here would not give: its file, relative to the checkout, and the command that made it,
    where it names one.
    """

    path: str
    command: str | None


def find_sources(paths: Paths, table: Mapping[str, Any], name: str, params: Any) -> list[str]:
    """The files on which the results of a stage, with the params of its section or of a cell, depend, relative to the
    checkout's root.

    These are the first-party modules that the stage's module and its models' families import, and the files that the
    stage names.
    """
    stage = table[name]
    # a family's module begins the names of its models; timm's own models have none here
    families = {f"repro.models.{model.partition('_')[0]}" for model in stage.models(params)}
    modules = [f"stages.{name}", *families, *stage.modules(params)]
    return sorted({*import_closure(paths.root, modules), *_find_named_files(paths, stage)})


def _find_named_files(paths: Paths, stage: Any) -> list[str]:
    """The files that a stage names in its row of the table, relative to the checkout's root."""
    return [
        file.relative_to(paths.root).as_posix()
        for pattern in stage.files
        for file in paths.root.glob(pattern)
        if file.is_file()
    ]


def write_code_hashes(paths: Paths, table: Mapping[str, Any]) -> None:
    """Write results/code/<stage>.json, or <stage>/<cell>.json, for every stage of the graph but the ones that always
    run.

    Raises:
        UserError: wrong parameters in a section; the files of the other stages are written.
    """
    wrong = None
    for name, cell in list_units(paths, table):
        try:
            params = load_params(paths, table, name, cell)
        except UserError as error:
            wrong = error
            continue
        file = paths.results / "code" / (f"{name}/{cell}.json" if cell else f"{name}.json")
        sources = find_sources(paths, table, name, params)
        # what a stage names itself it reads as text: the report shows the docstrings of the verbs
        code_hash = hash_sources(paths.root, sources, whole=_find_named_files(paths, table[name]))
        written = {"code_hash": code_hash, "files": len(sources)}
        if table[name].all_sections:
            sections = {key: each for key, each in load_sections(paths.params).items() if key != "runtime"}
            written["params_hash"] = short_hash(json.dumps(sections, sort_keys=True, default=str))
        write_json(file, written)
    if wrong is not None:
        raise wrong


def list_units(paths: Paths, table: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(stage, cell or None) for each unit of dvc.yaml that depends on code hashes, in its order; sections may be
    absent.
    """
    sections = load_sections(paths.params)
    for name, definition in load_yaml(paths.root / "dvc.yaml")["stages"].items():
        if definition.get("always_changed"):
            continue
        if "foreach" in definition:
            yield from ((name, str(cell)) for cell in sections.get(name) or {})
        elif table[name].params is None or name in sections:
            yield name, None


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
    if "code" in load_yaml(paths.root / "dvc.yaml")["stages"]:
        write_code_hashes(paths, table)  # else an edit would be seen only after `code` ran
    with open_dvc(paths.root) as repo:
        names, changed = [stage.name for stage in repo.index.stages], repo.status()
    rows = []
    for name in names:
        if name == "code":
            continue
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
            named = ["its code" if dep.startswith("results/code/") else dep for dep in deps]
            others = [why for why in whys if isinstance(why, str)]
            rows.append((name, "stale", ", ".join([*named, *outs, *others])))
        else:
            rows.append((name, "fresh", ""))
    return rows


def find_old_records(paths: Paths) -> dict[str, list[OldRecord]]:
    """Why records are old -> those records under results/, with those measured outside the pipeline, in the order
    of their paths.

    See `repro.core.freshness.find_old`.

    Raises:
        UserError: a damaged record.
    """
    records = {}
    for file in sorted(paths.results.rglob("*.json")):
        content = {} if file.name == DETAILS_FILE else read_record(file)
        if isinstance(content, dict) and isinstance(content.get("identity"), dict):
            records[file.relative_to(paths.root).as_posix()] = {"metrics": None, **content}
    found: dict[str, list[OldRecord]] = {why: [] for why in (OTHER_CODE, FOLLOWED, RENEWED, OLDER_VERSION)}
    for name, why in find_old(paths.root, records).items():
        found[why].append(OldRecord(name, records[name]["identity"].get("command")))
    return {why: listed for why, listed in found.items() if listed}


def list_stale_records(paths: Paths) -> list[OldRecord]:
    """The old records that are to be made again, see `find_old_records`."""
    found = find_old_records(paths)
    return [record for why in STALE for record in found.get(why, ())]


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
