"""`repro plan`: what it prints, that it covers a whole profile, and every time against one by hand."""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest

from repro.bench.params import ComplexityParams
from repro.bench.rows import write_rows
from repro.core.config import load_section, load_yaml, params_hash
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.ranks import Ranks
from repro.core.record import DETAILS_FILE, read_json, write_json, write_record, write_text
from repro.core.runtime import cpu_name
from repro.papers import load_papers
from repro.planning import Planner, PlanRow, plan_rows, print_plan
from repro.report.results import Results
from repro.runs.cells import record_speed
from repro.tasks.classification.spec import SPEC
from stages import load_stages
from tests.conftest import ROOT
from tests.stages.helpers import NANO, edit


def plan(root, params, stage="pretrain", cell="other", gpu="L40S", micro_batch=None) -> PlanRow:
    """The row of a cell, where digits are 1438 images."""
    data = {"digits": SimpleNamespace(kind="digits", expected=SimpleNamespace(classes=10, train=1438))}
    results = Results(Paths(root), load_papers().values(), {})
    return Planner(Paths(root), gpu, results, data, micro_batch).plan(stage, cell, params)


def make_params(transform=None, **changes):
    """A cell of a training stage, of which the plan reads attributes alone."""
    shared = {"model": NANO, "options": {"depth": 1}, "data": "digits", "seeds": (0,), "epochs": 2, "batch_size": 16}
    shared |= {"steps_per_epoch": None, "ema_decay": None, "precision": "auto"}
    return SimpleNamespace(**shared | changes, transform=SimpleNamespace(**(transform or {"image_size": 32})))


def record(root, stage, params, rate, gpu="NVIDIA L40S", processes=1, micro_batch=None, dtype="bf16"):
    """Write the speed of a training as one on a GPU does, with a peak of 2 GiB."""
    cell = SimpleNamespace(params=params, paths=Paths(root), stage=stage, name="nano", where=f"{stage}.nano")
    cell.ranks, cell.runtime = Ranks(world_size=processes), SimpleNamespace(micro_batch=micro_batch)
    params.needs_even_parts = False
    speed = {"peak_memory_mib": 2048.0, "throughput_img_per_s": rate, "throughput_img_per_s_reason": "no step timed"}
    record_speed(cell, [speed], gpu.lower().replace(" ", "_"), {"device": f"cuda: {gpu}", "dtype": dtype}, 1.0)


@pytest.mark.parametrize(
    ("changes", "work", "seconds"),
    [
        # at 100 images per second
        ({}, "1 × 2 × 1,438", 28.76),
        ({"seeds": (0, 1, 2), "epochs": 1}, "3 × 1 × 1,438", 43.14),
        ({"steps_per_epoch": 719}, "1 × 2 × 11,504", 230.08),
        ({"ema_decay": 0.9}, "1 × 2 × 1,438", 28.76),
        ({"precision": "bf16"}, "1 × 2 × 1,438", 28.76),
        # of no such training
        ({"precision": "fp32"}, "1 × 2 × 1,438", None),
        ({"options": {"depth": 2}}, "1 × 2 × 1,438", None),
        ({"model": "deit_tiny_patch16_224"}, "1 × 2 × 1,438", None),
        ({"transform": {"image_size": 64}}, "1 × 2 × 1,438", None),
    ],
)
def test_a_training_is_its_images_over_a_measured_speed(tmp_path, changes, work, seconds):
    record(tmp_path, "pretrain", make_params(), 200.0, processes=2)
    row = plan(tmp_path, make_params(**changes))
    assert row.work == work
    if seconds is None:
        assert (row.hours, row.speed) == (None, None) and "not measured" in row.basis
    else:
        assert row.hours * 3600 == pytest.approx(seconds)
        assert "results/replications/nvidia_l40s/speed/pretrain/nano.json" in row.basis


@pytest.mark.parametrize(
    ("stage", "changes", "micro_batch", "gpu", "rate", "gib"),
    [
        ("pretrain", {}, 8, "L40S", 100.0, 2.0),
        ("pretrain", {}, 8, "l40", 100.0, 2.0),
        ("pretrain", {"batch_size": 8}, None, "L40S", 100.0, 2.0),
        # the peak is of another number of images at once, of other copies of the weights, or of another stage
        ("pretrain", {}, 4, "L40S", 100.0, None),
        ("pretrain", {}, None, "L40S", 100.0, None),
        ("pretrain", {"ema_decay": 0.9}, 8, "L40S", 100.0, None),
        ("pretrain", {"freeze": True}, 8, "L40S", 100.0, None),
        ("pretrain_seeds", {}, 8, "L40S", 100.0, None),
        # another GPU, none, and another task
        ("pretrain", {}, 8, "A100", None, None),
        ("pretrain", {}, 8, None, None, None),
        ("detect", {}, 8, "L40S", None, None),
    ],
)
def test_memory_is_known_of_the_very_training_alone(tmp_path, stage, changes, micro_batch, gpu, rate, gib):
    record(tmp_path, "pretrain", make_params(), 200.0, processes=2, micro_batch=8)
    speed = plan(tmp_path, make_params(**changes), stage, gpu=gpu, micro_batch=micro_batch).speed
    assert (speed and speed.img_per_s, speed and speed.memory_gib) == (rate, gib)


@pytest.mark.parametrize(
    ("stage", "transform"),
    [
        ("detect", {"min_size": (24, 30), "max_size": 32}),
        ("segment", {"crop_size": 32}),
        ("generate", {"shape": (4, 8, 8)}),
    ],
)
def test_other_tasks_take_the_speed_of_inputs_as_large(tmp_path, stage, transform):
    record(tmp_path, stage, make_params(transform), 50.0)
    assert plan(tmp_path, make_params(transform), stage).hours == pytest.approx(2 * 1438 / 50 / 3600)
    other = {name: 2 * value if isinstance(value, int) else (*value[:-1], 99) for name, value in transform.items()}
    assert plan(tmp_path, make_params(other), stage).hours is None


def test_a_training_that_recomputes_is_another_one(tmp_path):
    params, recomputing = make_params(), make_params(recompute_blocks=True)
    record(tmp_path, "segment", params, 50.0)
    assert plan(tmp_path, params, "segment").speed.memory_gib == 2.0
    assert plan(tmp_path, recomputing, "segment").hours is None
    record(tmp_path, "segment", recomputing, 25.0)
    assert plan(tmp_path, recomputing, "segment").hours == pytest.approx(2 * 1438 / 25 / 3600)


def test_the_slowest_record_of_a_gpu_counts(tmp_path):
    params = make_params()
    for stage, rate, gpu in (("pretrain", 3000.0, "NVIDIA L40S"), ("ablate", 1000.0, "NVIDIA L40S")):
        record(tmp_path, stage, params, rate, gpu)
    record(tmp_path, "ablate", params, 1.0, "NVIDIA H200")
    record(tmp_path, "linearize", params, None)
    speed = plan(tmp_path, params).speed
    assert (speed.img_per_s, speed.memory_gib) == (1000.0, 2.0), "the peak is that of its own stage"


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({}, 90.0),
        ({"mode": "infer"}, None),
        ({"status": "oom"}, None),
        ({"batch_size": 8}, None),
        ({"image_size": [32, 64]}, None),
        ({"device": "cuda: NVIDIA A100"}, None),
        ({"model": "deit_tiny_patch16_224"}, None),
        ({"options": {"depth": 2}}, None),
        ({"dtype": "fp32"}, 90.0),  # `auto` takes any
    ],
)
def test_a_row_of_speed_counts_where_it_is_a_training_step_of_the_same(tmp_path, changes, rate):
    row = {"model": NANO, "options": {"depth": 1}, "image_size": [32, 32], "batch_size": 16, "dtype": "bf16"}
    row |= {"mode": "train", "backend": "triton", "device": "cuda: NVIDIA L40S", "status": "ok", "attention": "fused"}
    row |= {"throughput_img_per_s": 90.0, "latency_ms": 16e3 / 90, "peak_memory_mib": 512.0, "run": 1}
    write_rows(tmp_path / "results/speed/a_gpu.csv", [row | {"compile": False, "commit": "c0de"} | changes])
    speed = plan(tmp_path, make_params()).speed
    assert (speed and speed.img_per_s) == (rate and pytest.approx(rate))
    assert speed is None or speed.memory_gib == 0.5


def test_images_come_from_the_manifest_once_it_is_written(tmp_path):
    split = {"images": 100, "bytes": 7_000, "folders": {}}
    content = {"kind": "digits", "classes": {"a": 0, "b": 1, "c": 2}, "splits": {"train": split, "val": split}}
    content |= {"departures": [], "generated": None, "hash": "x"}
    write_text(tmp_path / "results" / "prepare_data" / "digits" / "manifest.json", json.dumps(content))
    assert plan(tmp_path, make_params()).work == "1 × 2 × 100"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "digit"}, "pretrain.other.data: digit: .*'digits'"),
        ({"model": "vittt_nono"}, "pretrain.other: vittt_nono: no such model"),
    ],
)
def test_a_cell_that_cannot_be_trained_is_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=f"^{message}"):
        plan(tmp_path, make_params(**changes))


def test_every_section_has_rows_in_the_order_of_the_file(tmp_path):
    """By a table of made-up stages; `runtime` is none."""
    make_stage = partial(SimpleNamespace, params=ComplexityParams, scores={})
    stages = {name: make_stage(cells=True, purpose="graph") for name in ("many", "none")}
    stages["complexity"] = make_stage(cells=False, purpose="graph")
    empty = {"sizes": {}, "groups": []}
    sections = {"runtime": {}, "other": {}, "many": {"a": empty}}
    file = tmp_path / "params.yaml"
    file.write_text(json.dumps(sections | {"none": None, "complexity": empty}))
    rows = plan_rows(stages, file, Paths(tmp_path), None)
    expected = ["other", "many@a", "complexity"]
    assert [row.unit for row in rows] == expected and all(row.hours is None for row in rows)
    for wrong, message in (
        ("many: [1]", "many: expected a mapping of cells"),
        ("many: {a: {odd: 1}}", "many.a.odd: unknown key"),
    ):
        file.write_text(f"{wrong}\n")
        with pytest.raises(UserError, match=f"^{message}"):
            plan_rows(stages, file, Paths(tmp_path), None)


@pytest.mark.parametrize("name", [file.stem for file in sorted((ROOT / "profiles").glob("*.yaml"))])
def test_every_cell_of_a_profile_has_a_row(tmp_path, name):
    file, expected = ROOT / "profiles" / f"{name}.yaml", []
    for stage, section in load_yaml(file).items():
        if stage in ("complexity", "efficiency", "visualize", "resolution"):
            expected.append(stage)
        elif stage != "runtime":
            expected += [f"{stage}@{cell}" for cell in section]
    assert [row.unit for row in plan_rows(load_stages(), file, Paths(tmp_path), None)] == expected


def test_the_printed_table_is_narrow_and_sums(tmp_path, capsys):
    rows = [PlanRow(unit=f"a@{hours}", hours=hours) for hours in (0.5, 1.25, None)]
    for gpu, total in (("A100", "1.8"), (None, "105")):
        print_plan(rows, gpu, Paths(tmp_path))
        out = capsys.readouterr().out.splitlines()
        assert out[4].split()[-1] == total and "1 of 3" in out[5] and max(map(len, out)) <= 120
        assert ("GPU GiB" in out[0]) == (gpu is not None)


def test_a_profile_is_planned_before_it_is_used(checkout, repro_cli):
    text = (checkout / "params.yaml").read_text().replace("epochs: 2", "epochs: 6", 1)
    (checkout / "profiles").unlink()
    write_text(checkout / "profiles" / "short.yaml", text)
    out = repro_cli.run("plan", "--profile", "short", silent=True)
    assert out.startswith("first: repro profile use short\n") and "1 × 6 × 1,079" in out
    assert not (checkout / "results" / "pretrain").exists(), "nothing was started"


@pytest.fixture
def trained(checkout):
    """The folder of the record, in a checkout on this CPU, of a cell that was trained in 120 seconds, over 2 epochs."""
    folder, params = checkout / "results" / "pretrain" / "nano", checkout / "params.yaml"
    identity = {"device": "cpu: X, 1 thread", "machine": {"cpu": cpu_name()}}
    identity["params_hash"] = params_hash(load_section(SPEC.params, params, "pretrain", "nano"))
    metrics = {"model": NANO, "seeds": [0], "epochs": 2, "by_seed": [{"seed": 0}], "top1_percent": 9.0}
    write_record(folder / "metrics.json", metrics, identity, 120.0, scores=SPEC.scores)
    return folder


def plan_nano(repro_cli):
    """The images per second and the minutes of the cell, what they were measured on, and all that is printed."""
    out = repro_cli.run("plan", silent=True)
    (line,) = (line for line in out.splitlines() if line.startswith("pretrain@nano"))
    _, _, rate, minutes, basis = re.split(r"  +", line)
    return rate, minutes, basis, out


def test_a_cpu_is_planned_by_what_ran_on_one(checkout, trained, repro_cli):
    """2158 images in 120 seconds are 18.0 a second, and three times the epochs take three times the minutes."""
    rate, minutes, basis, out = plan_nano(repro_cli)
    assert (rate, minutes, basis) == ("18.0", "2.0", "this CPU") and "GPU" not in out
    edit("epochs: 2", "epochs: 6")
    assert plan_nano(repro_cli)[:2] == ("18.0", "6.0")
    edit("epochs: 6", "epochs: 2", "batch_size: ", "batch_size: 1")
    rate, minutes, basis, _ = plan_nano(repro_cli)
    assert (rate, minutes) == ("–", "–") and basis.startswith("not measured")


def test_a_fresh_clone_plans_by_committed_seconds_and_names_another_machine(checkout, trained, repro_cli):
    (trained / "run.json").unlink()
    file, noted = checkout / "results" / "pipeline.json", read_json(ROOT / "results" / "pipeline.json")
    write_json(file, noted | {"stages": {"pretrain@nano": 60.0}})
    assert plan_nano(repro_cli)[1:3] == ("1.0", "this CPU")
    details = read_json(trained / DETAILS_FILE)
    details["identity"]["machine"]["cpu"] = "another CPU"
    write_json(trained / DETAILS_FILE, details)
    assert plan_nano(repro_cli)[1:3] == ("1.0", "another CPU: another CPU")
    write_json(file, noted | {"stages": {}})
    assert plan_nano(repro_cli)[1] == "–"
