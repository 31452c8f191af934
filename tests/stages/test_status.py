"""`repro status` on a real, small DVC project."""

import shutil
import subprocess
import sys

import pytest

from repro.core.config import load_section
from repro.core.paths import Paths
from repro.graph import find_status
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
    cell = Cell(stage="pretrain", name="a", params=params, spec=SPEC, paths=paths, runtime=None, folder=project)
    for step in (90, 120):
        state = cell.state_folder(0) / f"step_{step:09d}.0123456789abcdef.pt"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.touch()
    write_params(project, 1, 3)
    (project / "results" / "weight.txt").unlink()
    assert find_status(paths, load_stages()) == [
        ("pretrain@a", "interrupted", "stopped after step 120; it continues from there"),
        ("pretrain@b", "stale", "params.yaml"),
        ("weigh", "missing", "results/weight.txt"),
    ]
    write_params(project, 5, 2)  # a run with other parameters would not continue that state
    assert find() == {"pretrain@a": "stale", "pretrain@b": "fresh", "weigh": "missing"}


def test_the_command_says_what_to_run(project, monkeypatch, repro_cli):
    monkeypatch.chdir(project)
    assert repro_cli.run("status", silent=True).splitlines()[-1] == NOTHING_TO_DO
    (project / "source.txt").write_text("two\n")
    assert repro_cli.run("status", silent=True).splitlines()[-1] == "next: dvc repro"
