"""`repro status` on a real, small DVC project."""

import shutil
import subprocess
import sys

import pytest
from dvc.dependency import param
from dvc.utils.serialize import load_path

from repro.core.config import load_section
from repro.core.paths import Paths
from repro.graph import find_status, join_cells
from repro.runs.job import Cell
from repro.tasks.classification.spec import SPEC
from stages import load_stages

DVC_YAML = """
stages:
  pretrain:
    foreach: ${pretrain}
    do:
      cmd: cp source.txt results/${key}.txt
      deps: [source.txt]
      params: ["pretrain.${key}"]
      outs: [{"results/${key}.txt": {cache: false}}]
  weigh:
    cmd: wc -c results/a.txt > results/weight.txt
    deps: [results/a.txt]
    outs: [{results/weight.txt: {cache: false}}]
"""
NOTHING_TO_DO = "nothing to do; results/tables.md is up to date"
CELL = "{model: m, data: digits, epochs: %d, batch_size: 2, drop_path: 0, optim: {lr: 1}, mix: {}, transform: {image_size: 16}}"


def write_params(project, epochs_a, epochs_b):
    (project / "params.yaml").write_text(f"pretrain:\n  a: {CELL % epochs_a}\n  b: {CELL % epochs_b}\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A project all of whose stages are run; do not change it, copy it."""
    root = tmp_path_factory.mktemp("made")
    (root / "dvc.yaml").write_text(DVC_YAML)
    write_params(root, 1, 2)
    (root / "source.txt").write_text("one\n")
    manifest = root / "results" / "prepare_data" / "digits" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    dvc = [sys.executable, "-m", "dvc"]
    for command in (["git", "init", "-q"], [*dvc, "init", "-q"], [*dvc, "repro", "-q"]):
        subprocess.run(command, cwd=root, check=True)
    return root


@pytest.fixture
def project(made, tmp_path):
    return shutil.copytree(made, tmp_path / "project")


def test_each_state(project):
    paths = Paths(project)

    def find() -> dict[str, str]:
        return {name: state for name, state, _ in find_status(paths, load_stages())}

    assert find() == {"pretrain@a": "fresh", "pretrain@b": "fresh", "weigh": "fresh"}
    params = load_section(SPEC.params, paths.params, "pretrain", "a")
    cell = Cell(stage="pretrain", name="a", params=params, spec=SPEC, paths=paths, runtime=None, record=project)
    for step in (90, 120):
        state = cell.state_folder(0) / f"step_{step:09d}.0123456789abcdef.pt"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.touch()
    write_params(project, 1, 3)
    (project / "results" / "weight.txt").unlink()
    assert find_status(paths, load_stages()) == [
        ("pretrain@a", "interrupted", ["stopped after step 120; it continues from there"]),
        ("pretrain@b", "stale", ["params.yaml"]),
        ("weigh", "missing", ["results/weight.txt"]),
    ]
    write_params(project, 5, 2)  # a run with other parameters would not continue that state
    assert find() == {"pretrain@a": "stale", "pretrain@b": "fresh", "weigh": "missing"}


def test_the_status_reads_each_file_of_params_once_and_says_nothing_of_cells_that_are_not_in_it(project, monkeypatch):
    read = []
    monkeypatch.setattr(param, "load_path", lambda path, *rest: (read.append(path), load_path(path, *rest))[1])
    assert len(find_status(Paths(project), load_stages())) == 3 and len(read) == 1
    (project / "params.yaml").write_text(f"pretrain:\n  b: {CELL % 2}\n")
    assert [name for name, _, _ in find_status(Paths(project), load_stages())] == ["pretrain@b", "weigh"]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"": "stale"}, "stale"),
        ({"a": "missing"}, "1 cell: 1 missing (a)"),
        ({"a": "fresh", "b": "fresh"}, "2 cells: 2 fresh"),
        ({"a": "stale", "b": "stale"}, "2 cells: 2 stale (a, b)"),
        ({"c": "stale", "b": "stale", "a": "stale"}, "3 cells: 3 stale (c, b and 1 more)"),
        ({"a": "stale", "b": "missing", "c": "interrupted"}, "3 cells: 1 interrupted (c), 1 missing (b), 1 stale (a)"),
        ({"a": "fresh", "x": "interrupted"}, "2 cells: 1 fresh, 1 interrupted (x)"),
    ],
)
def test_a_stage_is_one_line(statuses, expected):
    """Between two others, with each reason once and the first of them."""
    rows = [
        (f"train@{cell}" if cell else "train", its, ["code", f"file {cell}", "more"]) for cell, its in statuses.items()
    ]
    before, found, after = join_cells([("before", "fresh", []), *rows, ("zoo@a", "fresh", [])])
    assert found[:2] == ("train", expected) and before == ("before", "fresh", "") and after[0] == "zoo"
    assert found[2].startswith("code, file") and found[2].endswith(f"and {len(statuses)} more")


def test_the_command_says_what_to_run(project, monkeypatch, repro_cli):
    monkeypatch.chdir(project)
    assert repro_cli.run("status", silent=True).splitlines()[-1] == NOTHING_TO_DO
    (project / "source.txt").write_text("two\n")
    assert repro_cli.run("status", silent=True).splitlines()[-1] == "next: dvc repro"
