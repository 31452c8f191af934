"""The house takes in a new stage, a new task and a new family: a copy of the tree gets what docs/extending.md lists and
nothing else, and then passes its own tests of the layout, the graph and the families.
"""

import json
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

from repro.core.record import read_record
from repro.pipeline import read_units
from tests.conftest import ROOT, run_python
from tests.test_layout import tracked

STAGE = '''
"""`repro toy`: count to a number."""

import dataclasses
import time

from repro.core.config import bounded, load_section, section_keys
from repro.core.paths import find_root
from repro.core.record import make_identity, write_record

from . import CellOption, Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyParams:
    """A cell of the `toy:` section.

    Args:
        times: how far to count.
    """

    times: int = bounded(ge=1)


STAGE = Stage(params=ToyParams, cells=True)


def command(cell: CellOption = None) -> None:
    """Count to a number."""
    paths = find_root()
    for name in [cell] if cell else section_keys(paths.params, "toy"):
        started, params = time.monotonic(), load_section(ToyParams, paths.params, "toy", name)
        identity = make_identity(paths.root, ["stages.toy"], params, device="cpu", dtype="none", backend="none")
        write_record(paths.cell("toy", name), {"counted": params.times}, identity, time.monotonic() - started)
'''
STAGE_IN_THE_GRAPH = """
  toy:
    foreach: ${toy}
    do:
      cmd: repro toy --cell ${key}
      deps: ["results/code/toy/${key}.json"]
      params: ["toy.${key}"]
      outs:
        - results/toy/${key}/metrics.json: {cache: false}
"""
FAMILY = '''
"""Toy: patches, one linear block, mean pooling."""

from typing import Any

from timm.models import register_model
from torch import Tensor, nn

from .backbone import Backbone, create, default_cfg
from .image_model import Grid

default_cfgs = {"toy_nano_patch16_32": default_cfg(32)}


class Block(nn.Module):
    """A residual linear layer."""

    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, T, D) -> the same shape."""
        return x + self.linear(x)


class Toy(Backbone):
    """The smallest backbone."""

    def __init__(
        self, img_size: int = 32, patch_size: int = 16, in_chans: int = 3, num_classes: int = 10, **kwargs: Any
    ):
        super().__init__(img_size, patch_size, in_chans, num_classes, 16, 1, pool="mean", drop_rate=0.0)
        self.blocks, self.norm = nn.ModuleList([Block(16)]), nn.LayerNorm(16)

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Images (B, C, H, W) -> tokens and their grid."""
        return self.patches(x)

    def class_feature(self, tokens: Tensor) -> Tensor:
        """The mean of the tokens (B, T, D) -> (B, D)."""
        return tokens.mean(1)


@register_model
def toy_nano_patch16_32(pretrained: bool = False, **kwargs: Any) -> Toy:
    """The only size."""
    return create(Toy, "toy_nano_patch16_32", pretrained, **kwargs)
'''
TASK = '''
"""Which half of the classes an image is of: a task that reuses the classifier's parts."""

from ..classification.spec import Classify


class Halve(Classify):
    """Classification into the first and the second half of the classes."""

    name = "halve"

    def open_datasets(self, data, params, held_out):
        found = super().open_datasets(data, params, held_out)
        for split in (found.train, *found.held_out.values()):
            split.collate = lambda samples, whole=split.collate: _halve(whole(samples), len(found.classes))
        return found


def _halve(batch, classes):
    images, labels = batch
    return images, (labels >= classes // 2).long()


SPEC = Halve()
'''
TASK_STAGE = '''
"""`repro halve`: train the toy task."""

from repro.tasks.halves.spec import SPEC

from . import CellOption, GpusOption, Stage

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC, models=lambda params: [params.model])


def command(cell: CellOption = None, gpus: GpusOption = None) -> None:
    """Train a classifier of halves."""
    from repro.runs.cells import read_cells, train_cells

    train_cells(read_cells("halve", SPEC, cell), gpus)
'''
CELL = {
    "model": "toy_nano_patch16_32",
    "data": "digits",
    "seeds": [0, 1],
    "epochs": 1,
    "batch_size": 128,
    "drop_path": 0.0,
    "optim": {"lr": 0.003, "lr_batch_size": 128, "warmup_epochs": 0},
    "mix": {"mixup": 0.0, "cutmix": 0.0},
    "transform": {"image_size": 32, "hflip": 0.0, "re_prob": 0.0, "crop_pct": 1.0},
}
HALVE_IN_THE_GRAPH = """
  halve:
    foreach: ${halve}
    do:
      <<: *train
      vars: [{stage: halve, score: top1_percent}]
"""


FILES = {
    "stages/toy.py": STAGE,
    "stages/halve.py": TASK_STAGE,
    "repro/models/toy.py": FAMILY,
    "repro/tasks/halves/__init__.py": '"""Halves of the classes."""',
    "repro/tasks/halves/spec.py": TASK,
}
SECTIONS = {"toy": {"three": {"times": 3}}, "halve": {"toy": CELL}}


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A copy of the tree with the three rooms added."""
    root = tmp_path_factory.mktemp("house")
    for name in tracked():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{text.strip()}\n")
    graph = (root / "dvc.yaml").read_text() + STAGE_IN_THE_GRAPH + HALVE_IN_THE_GRAPH
    shown = "      - results/measured\n"
    (root / "dvc.yaml").write_text(graph.replace(shown, f"{shown}      - results/toy\n      - results/halve\n"))
    for profile in (root / "profiles").iterdir():
        cell = textwrap.indent(yaml.safe_dump({"toy": CELL}), "  ")
        profile.write_text(
            profile.read_text().replace("\npretrain:\n", f"\npretrain:\n{cell}") + yaml.safe_dump(SECTIONS)
        )
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    run(root, "profile", "use", "mini", "--force")
    run(root, "prepare-data", "--cell", "digits")
    return root


def run(root: Path, *arguments: str, module: str = "repro") -> str:
    done = run_python("-m", module, *arguments, cwd=root, PYTHONPATH=str(root))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(root: Path, stage: str, cell: str) -> dict:
    return read_record(root / "results" / stage / cell / "metrics.json")["metrics"]


def test_a_stage_is_its_module_and_its_entry_in_the_graph(house):
    assert "Count to a number." in run(house, "--help")
    run(house, "toy", "--cell", "three")
    assert metrics(house, "toy", "three") == {"counted": 3}
    run(house, "code")
    assert len(json.loads((house / "results/code/toy/three.json").read_text())["code_hash"]) == 16


def test_the_report_runs_after_a_new_stage(house):
    (report,) = [unit for unit in read_units(house) if unit.stage == "report"]
    assert {"toy@three", "halve@toy", "pretrain@toy"} <= set(report.needs)


def test_the_tests_of_layout_and_graph_pass_with_the_new_rooms(house):
    chosen = "layout or cycles or diagram or backend or graph or settings or belong or report_follows or scores or depends_on"
    files = (f"tests/{name}.py" for name in ("test_layout", "test_docs", "stages/test_dvc", "stages/test_profile"))
    run(house, "-q", "-p", "no:cacheprovider", *files, "-k", f"({chosen}) and not every_section", module="pytest")


@pytest.mark.slow
def test_a_family_is_one_file_and_its_cell_of_params(house):
    run(house, "pretrain", "--cell", "toy")
    found = metrics(house, "pretrain", "toy")
    # patches 3·16²·16 + 16, block 16² + 16, norm 2·16, head 16·10 + 10
    assert found["model"] == "toy_nano_patch16_32" and found["num_params"] == 12_304 + 272 + 32 + 170
    assert found["seeds"] == [0, 1] and found["top1_std_percent"] is not None


def test_a_task_is_its_room(house):
    """Which half a digit is of is easier than which digit it is: chance is 50 %, and top-2 of two is always right."""
    run(house, "code")
    assert (house / "results/code/halve/toy.json").is_file()
    run(house, "halve", "--cell", "toy")
    found = metrics(house, "halve", "toy")
    assert found["kind"] == "digits" and found["top1_percent"] > 40
