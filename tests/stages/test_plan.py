"""`repro plan`: what it prints, that it covers a whole profile, and every wrong input as one line."""

import re
from pathlib import Path

import pytest

from repro.bench.flops import cost
from repro.core.config import load_section, load_yaml, params_hash
from repro.core.hashing import import_closure
from repro.core.paths import Paths
from repro.core.record import read_json, write_json, write_record
from repro.core.runtime import cpu_name
from repro.data.kinds import KINDS
from repro.papers import load_primary
from repro.papers.variants import load_variants
from repro.planning.planner import Rates, plan_costs
from repro.report.demands import demands
from repro.tasks.classification.spec import SPEC
from stages import load_stages
from tests.stages.helpers import NANO, add_params, edit

VARIANTS, TABLES_AND_FIGURES = load_variants("vision_ttt").options, load_variants("vision_ttt").rows
ROOT = Path(__file__).parents[2]

PAPER = load_yaml(ROOT / "profiles" / "paper.yaml")
TRAINING = ("pretrain", "linearize", "ablate")
SECONDS = 300 * 1_281_167 / 1000  # 300 epochs of ImageNet at 1000 images per second


@pytest.fixture(scope="module")
def paper_plan(tmp_path_factory):
    """The plan of the paper's profile where nothing is prepared or measured; every classifier trains 1000 images per
    second.
    """
    given = {cell["model"]: 1000.0 for stage in TRAINING for cell in PAPER[stage].values()}
    empty = Paths(tmp_path_factory.mktemp("empty"))
    return plan_costs(load_stages(), ROOT / "profiles" / "paper.yaml", empty, [Rates(given=given)])[0]


def row(plan, command):
    (found,) = (each for each in plan.rows if each.command == command)
    return found


def test_no_result_depends_on_the_plan():
    """Else an edit of the plan, or of the report, would restart a training."""
    for name, stage in load_stages().items():
        if stage.purpose == "graph":
            assert not [file for file in import_closure(ROOT, [f"stages.{name}"]) if "repro/planning" in file], name


@pytest.mark.slow
def test_every_cell_of_the_paper_profile_is_charged(paper_plan):
    expected = []
    for stage, section in PAPER.items():
        if stage in ("complexity", "efficiency", "visualize", "resolution"):
            expected.append(f"dvc repro {stage}")
        elif stage == "generate":  # by hand
            expected += [f"repro generate --cell {cell}" for cell in section]
        elif stage not in ("runtime", "tune", "report"):
            expected += [f"dvc repro {stage}@{cell}" for cell in section]
    assert [each.command for each in paper_plan.rows] == expected
    gives = frozenset().union(*(each.gives for each in paper_plan.rows))
    dense = {*TABLES_AND_FIGURES["Table 3"], *TABLES_AND_FIGURES["Table 4"]}
    for name, options in VARIANTS.items():
        listed = ",".join(f"{option}={value}" for option, value in sorted(options.items()))
        model = f"vittt_tiny_patch16_224[{listed}]" if options else "vittt_tiny_patch16_224"
        wanted = ("imagenet", "coco", "ade20k") if name in dense else ("imagenet",)
        assert all(("accuracy", data, model) in gives for data in wanted), name


@pytest.mark.slow
def test_hours_and_disk_of_the_paper_profile(paper_plan):
    trained = [(f"dvc repro {stage}@{name}", cell) for stage in TRAINING for name, cell in PAPER[stage].items()]
    disk_gb = sum(KINDS[cell["kind"]].size_gb or 0 for cell in PAPER["prepare_data"].values())
    for command, cell in trained:
        found, seeds = row(paper_plan, command), len(cell.get("seeds", [0]))
        assert found.hours == pytest.approx(seeds * SECONDS * cell["epochs"] / 300 / 3600)
        num_params = cost(cell["model"], cell.get("options", {}), (224, 224)).num_params
        # of each seed two states of the weights, two moments and perhaps an average, the snapshots twice and the
        # weights; one more state, and the results
        snapshots, state = len(cell.get("snapshot_epochs", [])), 4 if "ema_decay" in cell else 3
        cell_gb = (seeds * (2 * state + 2 * snapshots + 1) + state + snapshots + 1) * 4 * num_params / 1e9
        assert found.disk_gb == pytest.approx(cell_gb)
        disk_gb += cell_gb
    for name, cell in PAPER["generate"].items():  # with a moving average of the weights, on latents of 32x32
        found = row(paper_plan, f"repro generate --cell {name}")
        counted = cost(cell["model"], {}, (32, 32))
        images = cell["epochs"] * cell["steps_per_epoch"] * cell["batch_size"]
        assert found.hours == pytest.approx(images * counted.macs * 2 * 3 / (312e12 * 0.3) / 3600)
        assert found.disk_gb == pytest.approx((8 + 1 + 4 + 1) * 4 * counted.num_params / 1e9)
        disk_gb += found.disk_gb
    assert paper_plan.total("disk_gb") == pytest.approx(disk_gb)
    efficiency = PAPER["efficiency"]
    models = 3 * len(efficiency["sizes"]) + len(efficiency["others"])  # Vittt, and DeiT with two kinds of attention
    rows = models * len(efficiency["image_sizes"])
    assert row(paper_plan, "dvc repro efficiency").hours == pytest.approx(rows * efficiency["budget_s"] / 3600)
    unknown = [f"dvc repro {stage}@{name}" for stage in ("detect", "segment") for name in PAPER[stage]]
    drawn = [f"dvc repro prepare_data@{name}" for name in ("imagenet_latents", "connect_hard", "scenes_hard")]
    assert set(paper_plan.unknown) == {*unknown, *drawn, "dvc repro visualize", "dvc repro resolution"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "stage", "scores"), [("Table 2 (left)", "detect", 2), ("Table 2 (right)", "segment", 1)]
)
def test_numbers_of_table_2_that_the_paper_profile_would_give(paper_plan, place, stage, scores):
    """Two counts of every backbone with its adapter, and the scores of the plain models that the profile trains."""
    counts = 2 * len(PAPER["complexity"]["adapters"]["backbones"])
    models = {cell["model"] for cell in PAPER[stage].values() if not cell.get("options") and "patch16" in cell["model"]}
    covered, printed = paper_plan.count_covered()[place]
    assert (covered, printed) == (counts + scores * len(models), len(demands(load_primary().ledger)[place]))


def test_the_printed_plan(checkout, repro_cli):
    """2 epochs of 1079 images at 0.01 images per second are 59.9 hours, 0.3 days on 8 GPUs."""
    code, out, err = repro_cli("plan", "--gpu", "A100", "--gpus", "8", "--img-per-s", f"{NANO}=0.01")
    assert (code, err) == (0, "")
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
    (checkout / "profiles").mkdir()
    (checkout / "profiles" / "short.yaml").write_text(text)
    code, out, _ = repro_cli("plan", "--profile", "short", "--gpu", "H100")
    assert code == 0 and out.startswith("first: repro profile use short\n") and "1 × 6 × 1,079 images" in out


@pytest.fixture
def trained(checkout):
    """A checkout on this CPU whose cell was trained in 120 seconds, over 2 epochs; and its record's folder."""
    folder, params = checkout / "results" / "pretrain" / "nano", checkout / "params.yaml"
    identity = {"device": "cpu: X, 1 thread", "machine": {"cpu": cpu_name()}}
    identity["params_hash"] = params_hash(load_section(SPEC.params, params, "pretrain", "nano"))
    metrics = {"model": NANO, "seeds": [0], "epochs": 2, "by_seed": [{"seed": 0}], "top1_percent": 9.0}
    write_record(folder, metrics, identity, 120.0, scores=SPEC.scores)
    return folder


def plan_nano(repro_cli):
    """The minutes of the cell, its basis, and all that is printed."""
    code, out, err = repro_cli("plan")
    assert (code, err) == (0, "")
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


def test_a_fresh_clone_plans_by_the_committed_seconds_and_another_machines_are_an_estimate(
    checkout, trained, repro_cli
):
    (trained / "run.json").unlink()
    file, noted = checkout / "results" / "pipeline.json", read_json(ROOT / "results" / "pipeline.json")
    write_json(file, noted | {"stages": {"pretrain@nano": 60.0}})
    assert plan_nano(repro_cli)[:2] == ("1.0", "measured on this CPU")
    details = read_json(trained / "details.json")
    details["identity"]["machine"]["cpu"] = "another CPU"
    write_json(trained / "details.json", details)
    minutes, basis, _ = plan_nano(repro_cli)
    assert minutes == "~1.0" and "another CPU" in basis
    write_json(file, noted | {"stages": {}})
    assert plan_nano(repro_cli)[0] == "unknown"


def test_a_profile_for_gpus_is_planned_for_three_of_them_side_by_side(checkout, repro_cli):
    """At one share of their peaks, which are 165.2, 312 and 989.4 TFLOP/s."""
    edit("epochs: 2", "precision: bf16\n    epochs: 3")
    code, out, _ = repro_cli("plan", "--utilisation", "1e-8")
    assert code == 0 and max(map(len, out.splitlines())) <= 120
    header, *lines = [re.split(r"  +", line) for line in out.splitlines()[1:]]
    assert header[:5] == ["dvc repro", "RTX 4090 h", "A100 h", "H100 h", "GPU GiB"]
    (nano,) = (line for line in lines if line[0] == "pretrain@nano")
    hours = [float(cell.removeprefix("~").replace(",", "")) for cell in nano[1:4]]
    assert [hours[0] * 165.2 / peak for peak in (312, 989.4)] == pytest.approx(hours[1:], rel=0.05)
    code, out, _ = repro_cli("plan", "--gpu", "H100", "--gpu", "L40S")
    assert code == 0 and "dvc repro  " in out and "H100 h  L40S h" in out


def test_a_section_of_no_known_stage_is_left_out(checkout, repro_cli):
    add_params(checkout, "some_stage:\n  some_cell: {}\n")
    code, out, _ = repro_cli("plan", "--gpu", "A100")
    assert code == 0 and "of unknown time or disk, not in the total: some_stage" in out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (f"model: {NANO}", "model: vittt_nono", "pretrain.nano: vittt_nono: no such model"),
        ("data: digits\n", "data: digit\n", "pretrain.nano.data: digit: prepare_data has no such cell; did you mean"),
    ],
)
def test_cells_that_do_not_fit_together(checkout, repro_cli, old, new, says):
    edit(old, new)
    code, _, err = repro_cli("plan")
    assert code == 2 and says in err
