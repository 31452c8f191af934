"""`repro plan`: costs against numbers worked out by hand, where a throughput comes from, and every wrong input as one line."""

import json
import re
from pathlib import Path

import pytest

from repro.core.paths import Paths
from repro.core.variants import PLACES, VARIANTS
from repro.measure.adapted import adapted_cost
from repro.report.demands import demands
from repro.report.ledger import load_ledger
from repro.report.training import Rates
from stages import plan

NANO = "vittt_nano_patch16_144"
PRETRAIN = "dvc repro pretrain@nano"


def row(rows, command: str) -> plan.Row:
    (found,) = (each for each in rows if each.command == command)
    return found


def write_record(root: Path, cell: str, device: str, rate: float, **metrics) -> None:
    folder = root / "results" / "measured" / device.split()[-1].lower() / "pretrain"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": NANO, "options": {"depth": 1}, "processes": 2, "throughput_img_per_s": 2 * rate, **metrics}
    (folder / f"{cell}.json").write_text(json.dumps({"metrics": about, "identity": {"device": device}}))


def test_hours_and_disk_by_hand(checkout):
    """2 epochs of 1438 images at 7.19 img/s are 400 s. Disk, in units of the weights: 3·3 in checkpoints, 2·2 snapshots, 1."""
    from repro.measure.flops import cost

    found = row(plan.run(Paths(checkout), Rates(given={NANO: 7.19})), PRETRAIN)
    assert found.gpu_hours == pytest.approx(400 / 3600)
    counted = cost(NANO, {"depth": 1, "num_classes": 10}, (32, 32))
    assert found.disk_gb == pytest.approx(counted.num_params * 4 * 14 / 1e9)
    assert found.basis == "2 epochs of 1,438 images at 7 img/s, given" and found.note == ""


def test_an_estimate_is_the_multiply_adds_over_the_rate(checkout):
    from repro.measure.flops import cost

    found = row(plan.run(Paths(checkout), Rates(tflops=1e-3, utilisation=0.5)), PRETRAIN)
    macs = cost(NANO, {"depth": 1, "num_classes": 10}, (32, 32)).macs
    assert found.gpu_hours * 3600 == pytest.approx(2 * 1438 * 3 * 2 * macs / 0.5e9)
    assert found.basis.endswith(", estimated") and "0.001 TFLOP/s and 50 % utilisation" in found.note


def test_paper_profile(checkout):
    """Vittt-T: 300 · 1,281,167 images at 1000 img/s are 106.76 hours; ImageNet's size is the published one until it is there."""
    given = {f"vittt_{size}_patch16_224": 1000.0 for size in ("tiny", "small", "base")}
    rows = plan.run(Paths(checkout), Rates(given=given), profile="paper")
    tiny = row(rows, "dvc repro pretrain@vittt_tiny_imagenet")
    assert tiny.gpu_hours == pytest.approx(300 * 1281167 / 1000 / 3600) == pytest.approx(106.764, abs=1e-3)
    assert tiny.disk_gb == pytest.approx(6.983e6 * 4 * (9 + 6 + 1) / 1e9, rel=1e-3)
    assert row(rows, "dvc repro prepare_data@imagenet").disk_gb == 150
    gives = frozenset().union(*(each.gives for each in rows))
    for name, options in VARIANTS.items():  # a cell for every number of Tables 3 and 4 and Fig. 7
        model = plan.Results(Paths(checkout), load_ledger().default_options, ()).model_key(
            {"model": "vittt_tiny_patch16_224", "options": options}, ""
        )
        wanted = ("imagenet", "coco", "ade20k") if name in (*PLACES["Table 3"], *PLACES["Table 4"]) else ("imagenet",)
        assert all(("accuracy", data, model) in gives for data in wanted), name
    efficiency = row(rows, "dvc repro efficiency")
    assert efficiency.gpu_hours == 3 * 3 * 9 * 600 / 3600 and "at most" in efficiency.basis
    # three forward passes of 2 FLOP per multiply-add, at 30 % of 312 TFLOP/s; 12 passes over COCO, 160,000 steps of 16 images
    for cell, images, size in (
        ("detect@vittt_tiny_coco", 12 * 118_287, (800, 1344)),
        ("segment@vittt_tiny_ade20k", 160_000 * 16, (512, 512)),
    ):
        macs = adapted_cost("vittt_tiny_patch16_224", size).macs
        found = row(rows, f"dvc repro {cell}")
        assert found.gpu_hours == pytest.approx(images * 6 * macs / (0.3 * 312e12) / 3600) and "without the heads" in found.basis


def test_what_is_given_goes_before_what_is_measured_before_an_estimate(checkout):
    paths = Paths(checkout)
    write_record(checkout, "on_cpu", "cpu: AMD EPYC, 2 threads", 1.0)
    write_record(checkout, "other_model", "cuda: NVIDIA L40S", 1.0, options={"depth": 2})
    assert row(plan.run(paths, Rates()), PRETRAIN).basis.endswith("estimated")
    write_record(checkout, "nano", "cuda: NVIDIA L40S", 1438.0)
    write_record(checkout, "again", "cuda: NVIDIA H200", 2000.0)
    found = row(plan.run(paths, Rates()), PRETRAIN)
    assert found.gpu_hours == pytest.approx(2 / 3600)
    assert "NVIDIA L40S" in found.note and "results/measured/l40s/pretrain/nano.json" in found.note
    for name in (NANO, f"{NANO}[depth=1]"):
        assert row(plan.run(paths, Rates(given={name: 719.0})), PRETRAIN).gpu_hours == pytest.approx(4 / 3600)


def test_the_printed_plan(checkout, repro_cli):
    code, out, err = repro_cli(
        "plan",
        "--profile",
        "paper",
        "--gpus",
        "8",
        *(argument for size in ("tiny", "small", "base") for argument in ("--img-per-s", f"vittt_{size}_patch16_224=1000")),
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "first: repro profile use paper" and "days on 8" in lines[1]
    (tiny,) = (text for text in lines if text.startswith("dvc repro pretrain@vittt_tiny_imagenet"))
    assert re.split(r"  +", tiny)[1:] == [
        "Table 1 (1), Table 3 (1), Table 4 (1), Fig. 1 (1), Fig. 7a (1), Fig. 7b (1)",
        "106.8",
        "0.6",
        "0.4",
        "300 epochs of 1,281,167 images at 1,000 img/s, given",
    ]
    dense = [re.split(r"  +", text) for text in lines if text.startswith(("dvc repro detect@", "dvc repro segment@"))]
    total = (3 + 16) * 106.764 + 13.5 + sum(float(row[2]) for row in dense)  # 3 of pretrain, 16 of ablate; the benchmark's rows at most
    found = next(text for text in lines if text.startswith("total: "))
    assert float(found.split()[1].replace(",", "")) == pytest.approx(total, abs=1.5) and len(dense) == 9 + 18
    assert "days if 8 GPUs are 8 times as fast as one; disk 183.9 GB" in found
    last = lines[-1].partition(": ")[2].split(", ")
    # Table 2's counts of 15 models, and the scores of three
    assert "Table 2 (left) 36 of 60" in last and "Table 2 (right) 33 of 45" in last and "Fig. 7a 1 of 1" in last
    assert not list((checkout / "results").glob("pretrain"))  # nothing was started


def test_what_the_ledger_asks_for():
    wanted = demands(load_ledger())
    assert list(wanted)[:5] == ["Table 1", "Table 2 (left)", "Table 2 (right)", "Table 3", "Table 4"]
    assert len(wanted["Table 3"]) == 6 * 7 and ("fps", "vittt_tiny_patch16_224[design=dual]", "") in set().union(*wanted["Table 3"])
    (pareto,) = wanted["Fig. 1"]  # speaks of numbers of the tables
    assert ("accuracy", "coco", "vittt_base_patch16_224") in pareto
    assert wanted["Fig. 8"] == [set()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--img-per-s", "vittt_nano_patch16=5"], f"did you mean '{NANO}'"),
        (["--img-per-s", f"{NANO}=fast"], "expected MODEL=NUMBER"),
        (["--img-per-s", f"{NANO}=0"], "with a number above 0"),
        (["--img-per-s", f"{NANO}=nan"], "with a number above 0"),
        (["--img-per-s", "5"], "expected MODEL=NUMBER"),
        (["--tflops", "0"], "--tflops 0.0: expected a number above 0"),
        (["--tflops", "nan"], "--tflops nan"),
        (["--utilisation", "30"], "at most 1"),
        (["--gpus", "0"], "expected 1 or more"),
        (["--profile", "papr"], "there are mini, paper"),
    ],
)
def test_wrong_input_is_one_line(checkout, repro_cli, arguments, says):
    code, out, err = repro_cli("plan", *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and says in err


def test_cells_that_do_not_fit_together(checkout, repro_cli):
    params = checkout / "params.yaml"
    text = params.read_text()
    for old, new, says in (
        (f"model: {NANO}", "model: vittt_nono", "pretrain.nano: vittt_nono: no such model"),
        ("data: digits\n", "data: digit\n", "pretrain.nano.data: digit is no cell of prepare_data"),
    ):
        params.write_text(text.replace(old, new, 1))
        code, _, err = repro_cli("plan")
        assert code == 2 and says in err
    params.write_text(text + "some_stage:\n  some_cell: {}\n")
    code, out, _ = repro_cli("plan")
    assert code == 0 and "unknown and not in the total: dvc repro some_stage" in out
