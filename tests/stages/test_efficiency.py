"""`repro efficiency` with options: what it refuses, what it writes, and that a stopped call continues."""

import csv
import json
from pathlib import Path

import pytest

from repro.bench import rows as store_module

COMMAND = ("efficiency", "--res", "32,64", "--families", "vittt,deit_fused", "--sizes", "T")


def test_a_record_that_is_not_a_sweeps_is_refused(checkout, repro_cli, monkeypatch):
    monkeypatch.setattr("repro.bench.efficiency.device_slug", lambda device: "made_up")
    file = Path("results/replications/made_up/efficiency.json")
    file.parent.mkdir(parents=True)
    gate = {"family": "vim", "batch": 1, "dtype": "fp32"}
    for content, says in (
        ({"metrics": {"rows": {}}}, "not the record of a sweep"),
        ({"metrics": {"rows": [{"model": "m"}], "gates": []}}, "rows[0].row: missing"),
        ({"metrics": {"rows": [], "gates": [gate]}}, "gates[0].batch_size: missing"),
    ):
        file.write_text(json.dumps(content))
        err = repro_cli.refuse(*COMMAND, "--device", "cpu")
        assert says in err and "move it away" in err


@pytest.mark.slow
def test_a_sweep_is_stopped_and_continued(checkout, repro_cli, monkeypatch):
    measured, real_measure = [], store_module.measure

    def measure(spec):
        measured.append(spec.row_id)
        if len(measured) == 2:
            raise KeyboardInterrupt
        row, side = real_measure(spec), float(spec.image_size[0])
        # quiet, whatever the machine does
        return {**row, "latency_ms": side, "latency_ms_ci95": [side, side], "load_average": 0.0}

    monkeypatch.setattr(store_module, "measure", measure)
    code, out, err = repro_cli(*COMMAND, "--device", "cpu")
    assert code == 130 and err.count("\n") == err.count("the same command continues") == 1
    assert "1 rows are kept in" in err and out.startswith("[1 of 4] vittt_tiny_patch16_224@32: ")
    (file,) = Path("results/replications").glob("*/efficiency.json")
    before = json.loads(file.read_text())["metrics"]["rows"]
    assert [row["status"] for row in before] == ["ok"]

    out = repro_cli.run(*COMMAND, "--device", "cpu", silent=True)
    assert len(measured) == 2 + 3
    assert "1 of 4 rows are there from an earlier call" in out and "4 rows in " in out
    rows = json.loads(file.read_text())["metrics"]["rows"]
    assert before[0] in rows
    assert {(row["model"], row["attention"], row["image_size"][0]) for row in rows} == {
        (model, attention, side)
        for model, attention in (("vittt_tiny_patch16_224", None), ("deit_tiny_patch16_224", "fused"))
        for side in (32, 64)
    }
    assert all("flash_attention" in row["attention_kernel"] for row in rows if row["attention"] == "fused")
    with open(file.with_suffix(".csv")) as stream:
        assert [line["row"] for line in csv.DictReader(stream)] == [row["row"] for row in rows]
    figures = sorted(path.name for path in Path("artifacts", *file.with_suffix("").parts[1:]).iterdir())
    assert figures == [f"fig{n}_T_batch1_fp32_infer.png" for n in (1, 6)]

    # nothing is left to measure, and the same rows give the same figures
    drawn = {path: path.read_bytes() for path in Path("artifacts", *file.with_suffix("").parts[1:]).iterdir()}
    out = repro_cli.run(*COMMAND, "--device", "cpu")
    assert "4 of 4 rows are there from an earlier call" in out and "@" not in out
    assert drawn == {path: path.read_bytes() for path in drawn} and len(measured) == 5
