"""`repro status` on a real, small DVC project."""

import subprocess
import sys

import pytest

from repro.core.config import load_section
from repro.core.paths import Paths
from repro.graph import find_status
from repro.tasks.classification.spec import SPEC
from repro.training.job import Cell
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
CELL = "{model: m, data: digits, epochs: %d, batch_size: 2, drop_path: 0, optim: {lr: 1}, mix: {}, transform: {image_size: 16}}"


def write_params(project, epochs_a, epochs_b):
    (project / "params.yaml").write_text(f"pretrain:\n  a: {CELL % epochs_a}\n  b: {CELL % epochs_b}\n")


@pytest.fixture
def project(tmp_path):
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    write_params(tmp_path, 1, 2)
    (tmp_path / "source.txt").write_text("one\n")
    (tmp_path / "results" / "prepare_data" / "digits").mkdir(parents=True)
    (tmp_path / "results" / "prepare_data" / "digits" / "manifest.json").write_text("{}")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"], [sys.executable, "-m", "dvc", "repro", "-q"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path


def test_each_state(project):
    paths = Paths(project)
    assert [row[:2] for row in find_status(paths, load_stages())] == [("pretrain@a", "fresh"), ("pretrain@b", "fresh"), ("weigh", "fresh")]
    for step in (90, 120):
        params = load_section(SPEC.params, paths.params, "pretrain", "a")
        cell = Cell(stage="pretrain", name="a", params=params, spec=SPEC, paths=paths, runtime=None, folder=project)
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
    assert [row[:2] for row in find_status(paths, load_stages())][:2] == [("pretrain@a", "stale"), ("pretrain@b", "fresh")]
