"""dvc.yaml is true: a data-flow diagram, sections that exist, code as import closures, and no raw data."""

import csv
import json
import re
import shutil

import pytest
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from repro.core.config import load_yaml
from repro.core.paths import Paths
from repro.core.record import read_json, read_record
from repro.graph import find_sources, list_units, load_params, write_code_hashes
from stages import load_stages
from tests.conftest import ROOT, link_code

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


@pytest.mark.parametrize(
    "file", ["dvc.yaml", "params.yaml", *(f"profiles/{name}.yaml" for name in ("mini", "night", "paper"))]
)
def test_a_diff_of_the_settings_can_be_read(file):
    long = [number for number, line in enumerate((ROOT / file).read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"{file}: lines {long} have more than 120 columns"


def test_the_graph_has_the_stages_of_the_table():
    assert set(GRAPH) == {name for name, stage in TABLE.items() if stage.purpose == "graph"}


@pytest.mark.parametrize("stage", GRAPH)
def test_command_code_and_sections_belong_to_the_stage(stage):
    found, per_cell = definition(stage), "foreach" in GRAPH[stage]
    key, flag = ("${key}", " --cell ${key}") if per_cell else ("", "")
    assert found["cmd"] == f"repro {stage.replace('_', '-')}{flag}" and per_cell == TABLE[stage].cells
    if found.get("always_changed"):
        assert "deps" not in found
    else:
        assert f"results/code/{stage}{'/' * per_cell}{key}.json" in found["deps"]
    named = TABLE[stage].params and not TABLE[stage].all_sections
    assert found.get("params", []) == ([f"{stage}{'.' * per_cell}{key}"] if named else [])
    own = f"results/{stage}/" + ("${key}/" if per_cell else "")
    assert all(f"{name}/".startswith(own) for name in outs_of(stage)) or stage == "report"


def test_the_report_follows_every_stage_that_it_shows():
    shown = {f"results/{stage}" for stage in GRAPH if "deps" in definition(stage)} - {"results/report"}
    assert {dep for dep in definition("report")["deps"] if (ROOT / dep).suffix == ""} == {*shown, "results/measured"}


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
        details = [name for name in outs_of(stage) if name.endswith("details.json")]
        assert [name.replace("metrics.json", "details.json") for name in files] == details
        for cell in load_yaml(ROOT / "params.yaml")[stage]:
            if (file := ROOT / files[0].replace("${key}", cell)).is_file():
                assert set(read_json(file)) <= set(TABLE[stage].scores)
                assert read_record(file)["identity"]["params_hash"]


def test_no_stage_depends_on_raw_data_on_runtime_or_on_sources_that_are_listed():
    deps = [dep for stage in GRAPH for dep in definition(stage).get("deps", [])]
    sections = [section for stage in GRAPH for section in definition(stage).get("params", [])]
    assert not [dep for dep in deps if re.match(r"(data|\.runs)(/|$)|params.yaml$|.*\.py$", dep)]
    assert not [section for section in sections if section.startswith("runtime")]


@pytest.fixture(scope="module")
def sources() -> dict[str, set[str]]:
    """`stage` or `stage/cell` -> the files on which its results depend, at the committed parameters."""
    paths, found = Paths(ROOT), {}
    for name, cell in list_units(paths, TABLE):
        params = load_params(paths, TABLE, name, cell)
        found[f"{name}/{cell}" if cell else name] = set(find_sources(paths, TABLE, name, params))
    return found


REPORT = {
    "repro/report/results.py": {"report"},
    "repro/report/template.html": {"report"},
    "repro/papers/vit3/paper.yaml": {"report"},
    "repro/papers/vit3/page.md": {"report"},
    # these compare counts with the printed numbers
    "repro/papers/vision_ttt/ledger.yaml": {"report", "readings"},
}


@pytest.mark.parametrize("file", REPORT)
def test_an_edit_in_the_report_restarts_no_training(sources, file):
    assert (ROOT / file).is_file()
    assert {unit.partition("/")[0] for unit, files in sources.items() if file in files} == REPORT[file]


def test_an_edit_in_vittt_restarts_what_begins_from_its_weights(sources):
    users = {unit for unit, files in sources.items() if "repro/models/vittt.py" in files}
    assert {unit for unit in sources if unit.startswith(("pretrain/vittt", "detect/", "segment/", "ablate/"))} <= users


def test_trainings_depend_on_no_measurement_and_no_command_line(sources):
    others = ("repro/bench", "repro/cli", "repro/report", "repro/planning")
    for unit, files in sources.items():
        if unit.startswith(("pretrain/", "detect/", "segment/")):
            assert not [name for name in files if name.startswith(others)], unit
        # the report shows the help of `repro plan`
        assert unit == "report" or not [name for name in files if name.startswith("repro/planning")], unit


def test_an_edit_changes_the_hashes_of_its_users(tmp_path):
    for name in ("repro", "kernels", "stages", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    paths, code = Paths(tmp_path), tmp_path / "results/code"

    def hash_all() -> dict[str, str]:
        write_code_hashes(paths, TABLE)
        return {f.relative_to(code).as_posix(): json.loads(f.read_text())["code_hash"] for f in code.rglob("*.json")}

    before = hash_all()
    assert len(before) == len(list(list_units(paths, TABLE)))
    # the report says whose code has changed
    users = {"pretrain/vim_nano_digits.json", "complexity.json", "resolution.json", "visualize.json", "report.json"}
    for file, old, new, changed in (
        ("repro/models/vim.py", "import math\n", "import math\nedited = 1\n", users),
        ("repro/models/vim.py", "edited = 1\n", "edited = 1  # a comment\n", set()),
        # the report shows the help of the verbs, which is their docstring
        ("stages/pretrain.py", '    """', '    """Edited. ', {"report.json"}),
    ):
        source = tmp_path / file
        assert old in source.read_text()
        source.write_text(source.read_text().replace(old, new))
        after = hash_all()
        assert after.keys() == before.keys() and {name for name in before if before[name] != after[name]} == changed
        before = after


def test_the_report_depends_on_every_section_but_runtime(tmp_path):
    """A new one among them, which no list names."""
    link_code(tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {report: {cmd: repro report}}\n")
    written = []
    for sections in ("", "runtime: {workers: 3}\n", "toy: {three: {times: 3}}\n"):
        (tmp_path / "params.yaml").write_text(f"report: {{}}\n{sections}")
        write_code_hashes(Paths(tmp_path), TABLE)
        written.append((tmp_path / "results/code/report.json").read_text())
    assert written[0] == written[1] != written[2]


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
