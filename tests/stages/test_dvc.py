"""dvc.yaml is true: a data-flow diagram, sections that exist, golden losses in place of code, and no raw data."""

import csv
import dataclasses
import json
import re

import pytest
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from repro.core.config import load_yaml
from repro.core.record import DETAILS_FILE, read_json, read_record
from repro.models.registry import family_module
from repro.runs.golden import list_lines, read_cases
from stages import load_stages
from stages.report import load_scores
from tests.conftest import ROOT
from tests.imports import import_closure

GRAPH = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
TABLE = load_stages()


def definition(stage: str) -> dict:
    found = GRAPH[stage].get("do", GRAPH[stage])
    text = json.dumps(found)
    for name, value in (item for given in found.get("vars", ()) for item in given.items()):
        text = text.replace(f"${{{name}}}", value)
    return json.loads(text)


def outs_of(stage: str) -> list[str]:
    """The files and folders that a stage, or each of its cells, writes."""
    kinds = (definition(stage).get(kind, []) for kind in ("outs", "metrics", "plots"))
    return [name for outs in kinds for out in outs for name in ([out] if isinstance(out, str) else out)]


def list_required(params: type) -> set[str]:
    """The fields of a section that have no default."""
    has_none = dataclasses.MISSING
    return {
        field.name
        for field in dataclasses.fields(params)
        if field.default is has_none and field.default_factory is has_none
    }


def list_code(stage: str) -> tuple[str, ...]:
    """How the names of the files begin on which a stage depends."""
    return tuple(dep if dep.endswith(".py") else f"{dep}/" for dep in definition(stage)["deps"])


@pytest.mark.parametrize(
    "file", ["dvc.yaml", "params.yaml", *(f"profiles/{file.name}" for file in sorted((ROOT / "profiles").iterdir()))]
)
def test_a_diff_of_the_settings_can_be_read(file):
    long = [number for number, line in enumerate((ROOT / file).read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"{file}: lines {long} have more than 120 columns"


def test_the_graph_has_the_stages_of_the_table():
    """`generate`, which draws as well, is listed elsewhere."""
    assert set(GRAPH) == {name for name, stage in TABLE.items() if stage.purpose == "graph" or stage.cells}


@pytest.mark.parametrize("stage", GRAPH)
def test_command_code_and_sections_belong_to_the_stage(stage):
    found, per_cell = definition(stage), "foreach" in GRAPH[stage]
    key, flag = ("${key}", " --cell ${key}") if per_cell else ("", "")
    if stage.partition("_")[0] == "ablate":  # two of its sections may have cells of one name
        assert found["cmd"] == f"repro ablate --cell {stage}.{key}"
    elif stage == "pretrain_seeds":
        assert found["cmd"] == f"repro seeds --cell {key}"
    else:
        assert found["cmd"] == f"repro {stage.replace('_', '-')}{flag}"
    assert per_cell == TABLE[stage].cells
    assert bool(found.get("always_changed")) != ("deps" in found)
    section = [f"{stage}{'.' * per_cell}{key}"] if TABLE[stage].params else []
    # what every training has to say, but for the data, which a search names as well, and for what it chooses
    required = set.intersection(*(list_required(each.params) for each in TABLE.values() if each.task))
    searched = {f"${{item.cell}}.{name}" for name in required - {"data", "optim"}}
    assert {*found.get("params", ())} == {*section, *(searched if stage == "tune" else ())}
    own = tuple(f"{root}/{stage}/" + ("${key}/" if per_cell else "") for root in ("results", "artifacts"))
    assert all(f"{name}/".startswith(own) for name in outs_of(stage)) or stage == "report"


def test_the_report_follows_every_stage_that_it_shows():
    """And `pretrain_seeds`, which writes results/seeds: its records, which no page shows, put it before the report."""
    assert set(load_scores()) == set(GRAPH) - {"pretrain_seeds"}
    shown = {f"results/{stage}" for stage in GRAPH if "deps" in definition(stage)} - {
        "results/report",
        "results/golden",
    }
    assert {dep for dep in definition("report")["deps"] if dep.startswith("results/")} == {
        *shown,
        "results/replications",
        "results/seeds",
        "results/speed",
    }


def test_a_value_of_a_cell_is_changed_by_dvc_in_this_cell_alone(tmp_path):
    """`dvc exp run -S` goes over the cells one after another: in a mapping that two share, the last one's values win."""
    file = tmp_path / "params.yaml"
    file.write_bytes((ROOT / "params.yaml").read_bytes())
    before, changed = load_yaml(file), {}
    for stage in (stage for stage in GRAPH if TABLE[stage].task):
        for cell, params in before[stage].items():
            for key in (key for key, value in params.items() if isinstance(value, dict)):
                changed[stage, cell, key, next(iter(params[key]))] = f"new{len(changed)}"
    apply_overrides(file, [f"{'.'.join(path)}={value}" for path, value in changed.items()])
    for (stage, cell, key, name), value in changed.items():
        before[stage][cell][key] = before[stage][cell][key] | {name: value}
    assert len(changed) > 30 and load_yaml(file) == before


def test_dvc_shows_the_scores_of_trainings_and_nothing_else():
    """`dvc metrics show` prints everything that a metrics file holds."""
    with_metrics = {stage: definition(stage)["metrics"] for stage in GRAPH if "metrics" in definition(stage)}
    assert set(with_metrics) == {name for name in GRAPH if TABLE[name].scores}
    for stage, entries in with_metrics.items():
        files = [name for entry in entries for name in entry]
        rest = [name for name in outs_of(stage) if name.endswith(DETAILS_FILE)]
        assert [name.replace("metrics.json", DETAILS_FILE) for name in files] == rest
        for cell in load_yaml(ROOT / "params.yaml")[stage]:
            if (file := ROOT / files[0].replace("${key}", cell)).is_file():
                assert set(read_json(file)) <= set(TABLE[stage].scores)
                assert read_record(file)["identity"]["params_hash"]


def test_no_stage_depends_on_raw_data_or_on_runtime():
    deps = [dep for stage in GRAPH for dep in definition(stage).get("deps", [])]
    sections = [section for stage in GRAPH for section in definition(stage).get("params", [])]
    assert not [dep for dep in deps if re.match(r"(data|\.runs)(/|$)", dep)]
    assert not [section for section in sections if section.startswith("runtime")]


@pytest.mark.parametrize(
    ("stage", "modules", "free"),
    [
        ("complexity", "repro/bench/complexity.py", ("repro/core/",)),
        # closed forms run no kernel; the paper's recipe belongs to trainings
        (
            "readings",
            "repro/papers/vision_ttt/readings.py",
            ("kernels/", "repro/core/", "repro/data/", "repro/papers/rec"),
        ),
        ("theory", "repro/papers/vision_ttt/theorems.py", ("repro/core/", "repro/data/")),
        ("efficiency", "repro/bench/efficiency.py", ("repro/core/",)),
        # `repro measure` trains, whose parts are in the module of which the report takes a page
        ("report", "repro/papers/**/*.py repro/report/*.py", ("repro/runs/", "repro/tasks/", "repro/training/")),
    ],
)
def test_a_stage_that_computes_depends_on_the_code_that_it_imports(stage, modules, free):
    """But for what has no part in its numbers, `free`."""
    found = [file.relative_to(ROOT) for pattern in modules.split() for file in ROOT.glob(pattern)]
    names = [".".join(file.with_suffix("").parts) for file in found]
    assert names
    files = [file for file in import_closure(ROOT, names) if not file.endswith("/__init__.py")]
    assert [file for file in files if not file.startswith((*list_code(stage), *free))] == []


@pytest.mark.parametrize("stage", [stage for stage in GRAPH if TABLE[stage].alone])
def test_times_are_measured_again_by_other_code_and_on_another_machine(stage):
    """A committed time would else stay valid where nobody measured it."""
    needed = {"kernels", "repro/bench", "repro/models", "results/environment/metrics.json"}
    assert needed <= set(definition(stage)["deps"])


@pytest.mark.parametrize("stage", [stage for stage in GRAPH if TABLE[stage].task])
def test_a_training_depends_on_golden_losses_in_place_of_code(stage):
    deps = definition(stage)["deps"]
    assert "results/golden/${item.family}.json" in deps
    assert not [dep for dep in deps if not dep.startswith(("results/", "${item.init", "${item.judge"))]


def test_the_golden_losses_are_made_anew_when_any_code_of_a_training_changes():
    """What the trainings of ten steps import and read, and none of repro/runs that they do not."""
    covered = list_code("golden")
    tasks = sorted(file.parent.name for file in (ROOT / "repro" / "tasks").glob("*/spec.py"))
    files = import_closure(ROOT, ["repro.runs.golden", *(f"repro.tasks.{task}.spec" for task in tasks)])
    assert len(files) > 60 and [name for name in files if not name.startswith(covered)] == [
        "repro/__init__.py",
        "repro/runs/__init__.py",
    ]
    assert "repro/runs/golden.yaml" in definition("golden")["deps"]
    runs = {f"repro/runs/{file.name}" for file in (ROOT / "repro/runs").glob("*.py")}
    assert {name for name in runs if name.startswith(covered)} == runs & {*files} - {"repro/runs/__init__.py"}
    assert set(outs_of("golden")) == {f"results/golden/{family}.json" for family in read_cases()["families"]}


@pytest.mark.parametrize("profile", sorted(file.stem for file in (ROOT / "profiles").iterdir()))
def test_every_cell_names_the_golden_losses_of_its_family(profile):
    """Detectors and segmenters those of their task; timm's own models ResNet's; ladders those of the learner."""
    sections, known = load_yaml(ROOT / f"profiles/{profile}.yaml"), set(read_cases()["families"])
    trained = {stage: cells for stage, cells in sections.items() if stage in TABLE and TABLE[stage].task}
    named = ((stage.removeprefix("ablate_"), cell) for stage, cells in trained.items() for cell in cells.values())
    for stage, cell in named:
        words = cell["model"].split("_")
        word = words[1] if words[0] == "ladder" else words[0]
        family = re.sub(r"\d$", "", word) if word.startswith("dit") else word
        family = {"detect": "detection", "segment": "segmentation"}.get(
            stage if stage in ("detect", "segment") else family, family
        )
        assert cell["family"] == (family if family in known else "resnet"), cell["model"]


@pytest.mark.parametrize("profile", sorted(file.stem for file in (ROOT / "profiles").iterdir()))
def test_a_cell_from_random_weights_depends_on_golden_losses_of_its_model(profile):
    """Detectors and segmenters too, whose task's losses are of few backbones; a ladder of Vittt has Vittt's steps."""
    cases, sections = read_cases(), load_yaml(ROOT / f"profiles/{profile}.yaml")
    models = {
        f"results/golden/{family}.json": {
            family_module(section["model"]) for _, section in list_lines(cases, family).values()
        }
        for family in cases["families"]
    }
    for stage in (stage for stage in sections if stage in GRAPH and TABLE[stage].task):
        for name, cell in sections[stage].items():
            deps = [dep.replace("${item.family}", cell["family"]) for dep in definition(stage)["deps"]]
            seen = set().union(*(models.get(dep, ()) for dep in deps))
            module = family_module(cell["model"]).replace("ladder_vittt", "vittt")
            assert module in seen or module.startswith("timm.") or cell.get("init"), f"{stage}.{name}"


@pytest.mark.parametrize("profile", sorted(file.stem for file in (ROOT / "profiles").iterdir()))
def test_a_stage_depends_on_all_weights_that_its_cells_name(profile):
    sections = load_yaml(ROOT / f"profiles/{profile}.yaml")
    for stage in (stage for stage in sections if stage in GRAPH and TABLE[stage].task):
        graph = {dep for dep in definition(stage)["deps"] if dep.endswith(".weights}")}
        for name, cell in sections[stage].items():
            named = [key for key, value in cell.items() if isinstance(value, dict) and value.get("weights")]
            assert graph == {f"${{item.{key}.weights}}" for key in named}, f"{stage}.{name}"


@pytest.mark.parametrize("stage", [stage for stage in GRAPH if "plots" in definition(stage)])
def test_plots_show_columns_that_hold_numbers(stage):
    """`dvc plots show` draws what these columns hold."""
    cells = load_yaml(ROOT / "params.yaml")[stage] if "foreach" in GRAPH[stage] else [""]
    plots = [item for entry in definition(stage)["plots"] for item in entry.items() if item[0].endswith(".csv")]
    for plot, shown in plots:
        for file in (ROOT / plot.replace("${key}", cell) for cell in cells):
            if file.exists():  # else it is not run yet
                rows = list(csv.DictReader(file.read_text().splitlines()))
                for axis in ("x", "y"):
                    values = [row[shown[axis]] for row in rows]
                    assert all(re.fullmatch(r"[\d.e+-]*|\d+x\d+", value) for value in values), (file, axis)
                    assert any(values), (file, axis)
