"""`repro status` on a real, small DVC project."""

import subprocess
import sys

import pytest

from repro.core.paths import Paths
from stages.status import run

DVC_YAML = """
stages:
  train:
    foreach: ${train}
    do:
      cmd: cp source.txt results/${key}.txt
      deps: [source.txt]
      params: ["train.${key}"]
      outs: [{"results/${key}.txt": {cache: false}}]
  weigh:
    cmd: wc -c results/a.txt > results/weight.txt
    deps: [results/a.txt]
    outs: [{results/weight.txt: {cache: false}}]
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / "params.yaml").write_text("train: {a: {n: 1}, b: {n: 2}}\n")
    (tmp_path / "source.txt").write_text("one\n")
    (tmp_path / "results").mkdir()
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"], [sys.executable, "-m", "dvc", "repro", "-q"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path


def test_each_state(project):
    paths = Paths(project)
    assert [row[:2] for row in run(paths)] == [("train@a", "fresh"), ("train@b", "fresh"), ("weigh", "fresh")]
    (project / "params.yaml").write_text("train: {a: {n: 1}, b: {n: 3}}\n")
    (project / "results" / "weight.txt").unlink()
    state = project / ".runs" / "train" / "a-0123456789abcdef" / "step_000000120.0123456789abcdef.pt"
    state.parent.mkdir(parents=True)
    state.touch()
    assert run(paths) == [
        ("train@a", "interrupted", "stopped after step 120; it continues from there"),
        ("train@b", "stale", "params.yaml"),
        ("weigh", "missing", "results/weight.txt"),
    ]
