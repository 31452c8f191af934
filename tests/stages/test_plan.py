"""`repro plan`: what it prints, that it covers a whole profile, and every wrong input as one line."""

import re

import pytest

from repro.core.config import load_section, load_yaml, params_hash
from repro.core.paths import Paths
from repro.core.record import DETAILS_FILE, read_json, write_json, write_record, write_text
from repro.core.runtime import cpu_name
from repro.papers.vision_ttt.paper import PAPER as VISION_TTT
from repro.planning.planner import Rates, plan_costs
from repro.tasks.classification.spec import SPEC
from stages import load_stages
from tests.conftest import ROOT
from tests.stages.helpers import NANO, edit

PAPER = ROOT / "profiles" / "paper.yaml"


@pytest.mark.slow
def test_every_cell_of_the_paper_profile_is_charged(tmp_path):
    """By hand as tests/planning has it, where nothing is prepared or measured."""
    paper_plan = plan_costs(load_stages(), PAPER, Paths(tmp_path), [Rates()])[0]
    expected = []
    for stage, section in load_yaml(PAPER).items():
        if stage in ("complexity", "efficiency", "visualize", "resolution"):
            expected.append(f"dvc repro {stage}")
        elif stage == "generate":  # by hand
            expected += [f"repro generate --cell {cell}" for cell in section]
        elif stage not in ("runtime", "tune"):
            expected += [f"dvc repro {stage}@{cell}" for cell in section]
    assert [each.command for each in paper_plan.rows] == expected
    gives = frozenset().union(*(each.gives for each in paper_plan.rows))
    dense = {name for table in VISION_TTT.compared if table.place in ("Table 3", "Table 4") for name in table.rows}
    cells = load_yaml(ROOT / "profiles" / "digits.yaml")["ablate"]
    assert len(VISION_TTT.variants) == 17
    for name in VISION_TTT.variants:
        options = cells[f"{name}_digits_7s"]["options"]
        listed = ",".join(f"{option}={value}" for option, value in sorted(options.items()))
        model = f"vittt_tiny_patch16_224[{listed}]" if options else "vittt_tiny_patch16_224"
        wanted = ("imagenet", "coco", "ade20k") if name in dense else ("imagenet",)
        assert all(("accuracy", data, model) in gives for data in wanted), name
    drawn = [f"dvc repro prepare_data@{name}" for name in ("imagenet_latents", "connect_hard", "scenes_hard")]
    assert {*drawn, "dvc repro visualize", "dvc repro resolution"} <= set(paper_plan.unknown)


def test_registered_trainings_are_charged(tmp_path):
    """And no command is named that would measure them."""
    profile = ROOT / "profiles" / "cifar10.yaml"
    rows = [
        each for each in plan_costs(load_stages(), profile, Paths(tmp_path), [Rates()])[0].rows if each.measure == ""
    ]
    expected = [f"dvc repro pretrain_seeds@{cell}" for cell in load_yaml(profile)["pretrain_seeds"]]
    assert [each.command for each in rows if each.basis == "5 × 6 × 45,000 images"] == expected


def test_the_printed_plan(checkout, repro_cli):
    """2 epochs of 1079 images at 0.01 images per second are 59.9 hours, 0.3 days on 8 GPUs."""
    out = repro_cli.run("plan", "--gpu", "A100", "--gpus", "8", "--img-per-s", f"{NANO}=0.01", silent=True)
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    assert lines[0] == ["planned for: A100, as asked"]
    assert lines[1] == ["dvc repro", "A100 h", "GPU GiB", "disk GB", "basis"]
    data, imagenet, nano, total, days = lines[2:7]
    assert data[:4] == ["prepare_data@digits", "0", "–", "<0.01"]
    assert imagenet == ["prepare_data@imagenet", "0", "–", "150", "CPU; size as published"]
    assert nano[:2] == ["pretrain@nano", "59.9"] and nano[2].startswith("≥") and nano[4] == "1 × 2 × 1,079 images"
    assert total[1:] == ["59.9", "150"] and days[1] == "0.31"
    assert any(line.startswith("without any such number: Table 1, ") for line in out.splitlines())
    assert not list((checkout / "results").glob("pretrain"))  # nothing was started


def test_a_profile_is_planned_before_it_is_used(checkout, repro_cli):
    text = (checkout / "params.yaml").read_text().replace("epochs: 2", "epochs: 6", 1)
    (checkout / "profiles").unlink()
    write_text(checkout / "profiles" / "short.yaml", text)
    out = repro_cli.run("plan", "--profile", "short", "--gpu", "H100")
    assert out.startswith("first: repro profile use short\n") and "1 × 6 × 1,079 images" in out


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
    """The minutes of the cell, its basis, and all that is printed."""
    out = repro_cli.run("plan", silent=True)
    (line,) = (line for line in out.splitlines() if line.startswith("pretrain@nano"))
    _, minutes, _, basis = re.split(r"  +", line)
    return minutes, basis, out


def test_a_cpu_is_planned_by_what_ran_on_one(checkout, trained, repro_cli):
    """A cell of 120 seconds over 2 epochs takes 2 minutes, over 6 epochs 6 minutes; never the hours of a GPU."""
    minutes, basis, out = plan_nano(repro_cli)
    assert (minutes, basis) == ("2.0", "measured on this CPU") and "img/s" not in out and "GPU" not in out
    edit("epochs: 2", "epochs: 6")
    assert plan_nano(repro_cli)[0] == "6.0"
    edit("epochs: 6", "epochs: 2", "batch_size: ", "batch_size: 1")
    minutes, basis, _ = plan_nano(repro_cli)
    assert minutes == "unknown" and basis.startswith("not measured")


def test_a_fresh_clone_plans_by_committed_seconds_and_another_machines_are_an_estimate(checkout, trained, repro_cli):
    (trained / "run.json").unlink()
    file, noted = checkout / "results" / "pipeline.json", read_json(ROOT / "results" / "pipeline.json")
    write_json(file, noted | {"stages": {"pretrain@nano": 60.0}})
    assert plan_nano(repro_cli)[:2] == ("1.0", "measured on this CPU")
    details = read_json(trained / DETAILS_FILE)
    details["identity"]["machine"]["cpu"] = "another CPU"
    write_json(trained / DETAILS_FILE, details)
    minutes, basis, _ = plan_nano(repro_cli)
    assert minutes == "~1.0" and "another CPU" in basis
    write_json(file, noted | {"stages": {}})
    assert plan_nano(repro_cli)[0] == "unknown"


def test_a_profile_for_gpus_is_planned_for_three_of_them_side_by_side(checkout, repro_cli):
    """At one share of their peaks, which are 165.2, 312 and 989.4 TFLOP/s."""
    edit("epochs: 2", "precision: bf16\n    epochs: 3")
    out = repro_cli.run("plan", "--utilisation", "1e-8")
    assert max(map(len, out.splitlines())) <= 120
    header, *lines = [re.split(r"  +", line) for line in out.splitlines()[1:]]
    assert header[:5] == ["dvc repro", "RTX 4090 h", "A100 h", "H100 h", "GPU GiB"]
    (nano,) = (line for line in lines if line[0] == "pretrain@nano")
    hours = [float(cell.removeprefix("~").replace(",", "")) for cell in nano[1:4]]
    assert [hours[0] * 165.2 / peak for peak in (312, 989.4)] == pytest.approx(hours[1:], rel=0.05)
    out = repro_cli.run("plan", "--gpu", "H100", "--gpu", "L40S")
    assert "dvc repro  " in out and "H100 h  L40S h" in out
