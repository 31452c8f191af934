"""`repro efficiency` with options: what it refuses, what it writes, that it continues; and its conclusions from rows made by hand."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.efficiency_sweep import conclude

COMMAND = ["efficiency", "--res", "32,64", "--families", "vittt,deit_fused", "--sizes", "T"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--res", "1280..224"), "efficiency: 1280..224: begins above its end; write 224..1280"),
        (("--res", "225"), "efficiency: 225: not a positive multiple of the patch, 16 pixels; the nearest is 224"),
        (("--families", "deit,vmi"), "efficiency: 'vmi': no such family; did you mean 'vim'?"),
        (("--sizes", "L"), "efficiency: 'L': no such size; there are T, S, B"),
        (("--device", "cuda"), "cuda"),
    ],
)
def test_what_a_sweep_refuses(checkout, repro_cli, options, message):
    code, _, err = repro_cli("efficiency", *options)
    assert code == 2 and err.count("\n") == 1 and message in err
    assert not Path("results/measured").exists()


@pytest.mark.parametrize("options", [("--batch", "0"), ("--minutes", "0"), ("--mode", "test"), ("--runs", "3")])
def test_options_out_of_range_are_the_users_mistake(checkout, repro_cli, options):
    code, _, err = repro_cli("efficiency", *options)
    assert code == 2 and options[0] in err


def test_a_sweep_is_stopped_and_continued(checkout):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(
        [sys.executable, "-m", "repro", *COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # what a shell starts in the background ignores SIGINT, and hands that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first = process.stdout.readline()
    assert "vittt_tiny_patch16_224@32: " in first, first
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.count("\n") == 1 and "rows are kept in" in err and "continues" in err
    (file,) = Path("results/measured").glob("*/efficiency.json")
    before = json.loads(file.read_text())["metrics"]["rows"]
    assert 1 <= len(before) < 4 and all(row["status"] == "ok" for row in before)

    again = [sys.executable, "-m", "repro", *COMMAND]
    done = subprocess.run(again, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert f"{len(before)} of 4 rows are there from an earlier call" in out and "4 rows in " in out
    rows = json.loads(file.read_text())["metrics"]["rows"]
    assert [row for row in rows if row["row"] in {old["row"] for old in before}] == before
    assert {(row["model"], row["attention"], row["resolution"][0]) for row in rows} == {
        (model, attention, side)
        for model, attention in (("vittt_tiny_patch16_224", None), ("deit_tiny_patch16_224", "fused"))
        for side in (32, 64)
    }
    assert all("flash_attention" in row["attention_kernel"] for row in rows if row["attention"] == "fused")
    with open(file.with_suffix(".csv")) as stream:
        assert [line["row"] for line in csv.DictReader(stream)] == [row["row"] for row in rows]
    figures = sorted(path.name for path in (file.parent / "efficiency").iterdir())
    assert figures == [f"fig{n}_T_batch1_fp32_infer.{suffix}" for n in (1, 6) for suffix in ("png", "svg")]
    # nothing is left to measure, and the same rows give the same figures
    drawn = [path.read_bytes() for path in sorted((file.parent / "efficiency").iterdir())]
    out = subprocess.run(again, check=True, capture_output=True, text=True, env=environment).stdout
    assert "4 of 4 rows are there from an earlier call" in out and "@" not in out
    assert drawn == [path.read_bytes() for path in sorted((file.parent / "efficiency").iterdir())]


def row(model, attention, side, latency, memory, *, status="ok", kernel="flash", batch=1, run=1):
    return {
        "model": model,
        "attention": attention,
        "attention_kernel": kernel,
        "resolution": [side, side],
        "batch": batch,
        "dtype": "fp32",
        "mode": "infer",
        "compile": False,
        "options": {},
        "status": status,
        "latency_ms": latency,
        "latency_ms_ci95": None,
        "peak_memory_mib": memory,
        "macs_g": side**2 / 1e4,
        "run": run,
    }


VITTT, DEIT, VIM = "vittt_tiny_patch16_224", "deit_tiny_patch16_224", "vim_tiny_patch16_224"


def test_conclusions_by_hand():
    """Vittt takes time and memory ~ tokens, DeiT ~ tokens²; at 1280 DeiT ran out of memory, so 640 is what is compared."""
    rows = [row(VITTT, None, side, (side / 640) ** 2 * 10, (side / 640) ** 2 * 100) for side in (512, 640, 1280)]
    rows += [row(DEIT, "unfused", side, (side / 640) ** 4 * 40, (side / 640) ** 4 * 400) for side in (512, 640)]
    rows += [row(DEIT, "unfused", 1280, None, None, status="oom")]
    rows += [row(VIM, None, 640, 50.0, 100.0), row(VITTT, None, 640, 1.0, 1.0, run=2)]
    gate = {"operator": "selective_scan_bidir", "share_of_copy_percent": 2.0, "at_least_percent": 20, "holds": False}
    gate |= {"family": "vim", "batch": 1, "dtype": "fp32"}
    found = conclude(rows, [gate])
    unfused, vim = found["compared"]
    assert (unfused["against"], unfused["size"], unfused["side"]) == ("deit", "T", 640)
    assert unfused["speedup"] == pytest.approx(4) and unfused["memory_saved_percent"] == pytest.approx(75)
    assert (unfused["crossover"], unfused["crossover_side"]) == ("always", None)
    assert vim["speedup"] is None and vim["reason"].startswith(
        "selective_scan_bidir reaches 2 % of the bandwidth of a copy, 20 % are asked"
    )
    growth = {each["model"]: each for each in found["growth"]}
    assert growth[VITTT]["latency_exponent"] == pytest.approx(1) and growth[VITTT]["memory_exponent"] == pytest.approx(1)
    assert growth[DEIT]["latency_exponent"] == pytest.approx(2) and growth[DEIT]["macs_exponent"] == pytest.approx(1)
    assert growth[VITTT]["latency_1280_over_640"] == pytest.approx(4) and growth[DEIT]["latency_1280_over_640"] is None
    assert growth[VIM]["latency_exponent"] is None and growth[VIM]["reason"]
    # a ratio against Vim needs its operator's rate at the same batch and dtype
    for other in ({"batch": 2}, {"dtype": "bf16"}, {"family": "vrwkv"}, {"holds": False}):
        (vim,) = conclude([row(VITTT, None, 224, 1.0, 1.0), row(VIM, None, 224, 2.0, 1.0)], [{**gate, "holds": True, **other}])["compared"]
        assert vim["speedup"] is None, other
    (vim,) = conclude([row(VITTT, None, 224, 1.0, 1.0), row(VIM, None, 224, 2.0, 1.0)], [{**gate, "holds": True}])["compared"]
    assert vim["speedup"] == pytest.approx(2)


def test_other_batches_are_never_mixed_and_an_unfused_fusion_is_refused():
    rows = [row(VITTT, None, 224, 1.0, 1.0), row(DEIT, "fused", 224, 2.0, 1.0, batch=2), row(DEIT, "unfused", 224, 3.0, 1.0)]
    assert [each["against"] for each in conclude(rows, [])["compared"]] == ["deit"]
    rows = [row(VITTT, None, 224, 1.0, 1.0), row(DEIT, "fused", 224, 2.0, 1.0, kernel="none")]
    (refused,) = conclude(rows, [])["compared"]
    assert refused["speedup"] is None and "did not take a fused attention kernel" in refused["reason"]
