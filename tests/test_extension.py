"""The house takes in a new stage, a new task and a new family: a copy of the tree gets the code of docs/extending.md and
nothing else, and then passes its own tests of the layout, the graph and the families.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from repro.core.record import read_record
from repro.graph import find_needs
from tests.conftest import ROOT, run_python
from tests.test_docs import fenced
from tests.test_layout import tracked

STAGE, TASK, TASK_STAGE, FAMILY, *_ = fenced("extending.md", "python")
STAGE_IN_THE_GRAPH, STAGE_SECTION, FAMILY_SECTION, *_ = fenced("extending.md", "yaml")
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
HALVE = yaml.safe_load(FAMILY_SECTION)["pretrain"]["toy"] | {"seeds": [0]}
SECTIONS = yaml.safe_load(STAGE_SECTION) | {"halve": {"toy": HALVE}}
# the tests are in the house too
RUN_ALL = """
import sys
from tests.conftest import run_main
for line in sys.argv[1:]:
    sys.argv = ["repro", *line.split()]
    assert run_main() == 0, line
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A copy of the tree with the three rooms added."""
    root = tmp_path_factory.mktemp("house")
    for name in tracked():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{text}\n")
    graph = (root / "dvc.yaml").read_text() + f"\n{STAGE_IN_THE_GRAPH}\n" + HALVE_IN_THE_GRAPH
    shown = "      - results/replications\n"
    (root / "dvc.yaml").write_text(graph.replace(shown, f"{shown}      - results/toy\n      - results/halve\n"))
    for profile in (root / "profiles").iterdir():
        text = profile.read_text().replace("\npretrain:\n", f"\n{FAMILY_SECTION}\n")
        profile.write_text(text + yaml.safe_dump(SECTIONS))
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def said(house) -> str:
    """What the commands of a new stage and a new task print, one after another in one process."""
    commands = ("profile use mini --force", "prepare-data --cell digits", "--help", "toy --cell three")
    return run(house, "-c", RUN_ALL, *commands, "halve --cell toy")


def run(root: Path, *arguments: str) -> str:
    """Run Python in the house."""
    done = run_python(*arguments, cwd=root, PYTHONPATH=str(root))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(root: Path, stage: str, cell: str) -> dict:
    return read_record(root / "results" / stage / cell / "metrics.json")["metrics"]


def test_a_stage_is_its_module_and_its_entry_in_the_graph(house, said):
    assert "Count to a number." in said
    assert metrics(house, "toy", "three") == {"counted": 3}


def test_the_report_runs_after_a_new_stage(house):
    assert {"toy@three", "halve@toy", "pretrain@toy"} <= set(find_needs(house)["report"])


@pytest.mark.slow
def test_the_tests_of_layout_and_graph_pass_with_the_new_rooms(house):
    chosen = "layout or cycles or diagram or backend or graph or settings or belong or report_follows or scores or depends_on"
    files = (f"tests/{name}.py" for name in ("test_layout", "test_docs", "stages/test_dvc"))
    run(house, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", f"({chosen}) and not every_section")


@pytest.mark.slow
def test_a_family_is_one_file_and_its_cell_of_params(house, said):
    run(house, "-m", "repro", "pretrain", "--cell", "toy")
    found = metrics(house, "pretrain", "toy")
    # patches 3·16²·16 + 16, block 16² + 16, norm 2·16, head 16·10 + 10
    assert found["model"] == "toy_nano_patch16_32" and found["num_params"] == 12_304 + 272 + 32 + 170
    assert found["seeds"] == [0, 1] and found["top1_std_percent"] is not None
    built = 'timm.create_model("toy_nano_patch16_32", drop_rate=0.5)'
    run(house, "-c", f"import timm, repro.models; assert {built}.head_drop.p == 0.5")


def test_a_task_is_its_room(house, said):
    """Which half a digit is of is easier than which digit it is: chance is 50 %, and top-2 of two is always right."""
    found = metrics(house, "halve", "toy")
    assert found["kind"] == "digits" and found["top1_percent"] > 40
