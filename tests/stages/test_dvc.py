"""dvc.yaml is true: code dependencies are import closures, sections exist, and nothing depends on raw data."""

import csv
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from repro.core.config import load_yaml
from repro.core.hashing import FIRST_PARTY, import_closure

ROOT = Path(__file__).parents[2]
STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
# what a stage's code reaches beyond its own module's imports: models are chosen by name, so their families are named here
# found by lying in repro.models: no import statement names them
FAMILIES = {
    "pretrain": ["repro.models.vittt"],
    "baselines": [f"repro.models.{family}" for family in ("deit", "resnet", "vim", "vrwkv", "vit3")],
    "complexity": ["repro.models.vim", "repro.models.vrwkv"],
    "detect": ["repro.models.vittt"],
    "segment": ["repro.models.vittt"],
    "ablate": ["repro.models.vittt"],
    "visualize": [f"repro.models.{family}" for family in ("deit", "resnet", "vim", "vittt")],
}
DATA_FILES = {"report": {"repro/report/paper.yaml", "repro/report/template.html"}}


def definition(stage: str) -> dict:
    return STAGES[stage].get("do", STAGES[stage])


@pytest.mark.parametrize("stage", STAGES)
def test_code_dependencies_are_the_import_closure(stage):
    code = [dep for dep in definition(stage)["deps"] if dep.split("/")[0] in FIRST_PARTY]
    expected = set(import_closure(ROOT, [f"stages.{stage}", *FAMILIES.get(stage, [])])) | DATA_FILES.get(stage, set())
    wanted = "\n".join(f"        - {name}" for name in sorted(expected))
    assert set(code) == expected and len(code) == len(set(code)), f"deps of {stage} should be\n{wanted}"


@pytest.mark.parametrize("stage", STAGES)
def test_command_and_sections_belong_to_the_stage(stage):
    stage_definition = definition(stage)
    verb = stage.replace("_", "-")
    per_cell = "foreach" in STAGES[stage]
    assert stage_definition["cmd"] == (f"repro {verb} --cell ${{key}}" if per_cell else f"repro {verb}")
    sections = stage_definition.get("params", [])
    if stage == "report":  # it says which profile the results are of
        assert set(sections) == set(load_yaml(ROOT / "params.yaml")) - {"runtime"}
    else:
        assert sections in ([], [f"{stage}.${{key}}" if per_cell else stage])
    outs = [
        name
        for kind in ("outs", "metrics", "plots")
        for out in stage_definition.get(kind, [])
        for name in ([out] if isinstance(out, str) else out)
    ]
    own = f"results/{stage}/" + ("${key}/" if per_cell else "")
    assert all(name.startswith(own) for name in outs) or stage == "report"


def test_no_stage_depends_on_raw_data_or_on_runtime():
    deps = [dep for stage in STAGES for dep in definition(stage)["deps"]]
    sections = [section for stage in STAGES for section in definition(stage).get("params", [])]
    assert not [dep for dep in deps if re.match(r"(data|\.runs)(/|$)|params.yaml$", dep)]
    assert not [section for section in sections if section.startswith("runtime")]


def test_editing_the_report_restarts_no_training():
    assert not [dep for dep in definition("pretrain")["deps"] if dep.startswith(("repro/report", "repro/measure", "repro/cli"))]


def test_editing_the_report_runs_the_report_alone():
    """But for the curves of Fig. 1 and 6, which the sweep draws itself."""
    drawing = {"repro/report/__init__.py", "repro/report/figures.py"}
    others = {dep for stage in STAGES if stage != "report" for dep in definition(stage)["deps"] if dep.startswith("repro/report/")}
    assert others <= drawing


@pytest.mark.parametrize("stage", [stage for stage in STAGES if "plots" in definition(stage)])
def test_plots_show_columns_that_hold_numbers(stage):
    """`dvc plots show` draws what these columns hold."""
    cells = load_yaml(ROOT / "params.yaml")[stage] if "foreach" in STAGES[stage] else [""]
    for plot, shown in (item for plots in definition(stage)["plots"] for item in plots.items()):
        for cell in cells:
            if (file := ROOT / plot.replace("${key}", cell)).suffix != ".csv" or not file.exists():
                continue  # a picture, or not run yet
            rows = list(csv.DictReader(file.read_text().splitlines()))
            for axis in ("x", "y"):
                values = [row[shown[axis]] for row in rows]
                assert all(re.fullmatch(r"[\d.e+-]*|\d+x\d+", value) for value in values) and any(values), (plot, shown[axis])
