"""`repro efficiency` with options: what it refuses, what it writes, and that a stopped call continues."""

from pathlib import Path

import pytest

from repro.bench import rows as rows_module
from repro.bench.rows import read_rows

COMMAND = ("efficiency", "--res", "32,64", "--families", "vittt,deit_fused", "--sizes", "T")


def test_a_file_that_is_not_a_sweeps_is_refused(checkout, repro_cli, monkeypatch):
    monkeypatch.setattr("repro.bench.efficiency.device_slug", lambda device: "made_up")
    file = Path("results/speed/made_up.csv")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("model,image_size\nm,224\n")
    assert "made_up.csv: line 2: image_size" in repro_cli.refuse(*COMMAND, "--device", "cpu")


@pytest.mark.slow
def test_a_sweep_is_stopped_and_continued_and_then_measured_anew(checkout, repro_cli, monkeypatch):
    measured, real_measure = [], rows_module.measure

    def measure(spec):
        measured.append(spec.row_id)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real_measure(spec)

    monkeypatch.setattr("repro.bench.efficiency.device_slug", lambda device: "made_up")
    monkeypatch.setattr(rows_module, "measure", measure)
    code, out, err = repro_cli(*COMMAND, "--device", "cpu")
    assert code == 130 and err.count("\n") == err.count("the same command continues") == 1
    assert "1 rows are kept in" in err and out.startswith("[1 of 4] vittt_tiny_patch16_224@32: ")
    file = Path("results/speed/made_up.csv")
    (before,) = read_rows(file)

    out = repro_cli.run(*COMMAND, "--device", "cpu", silent=True)
    assert len(measured) == 2 + 3
    assert "1 of 4 rows are there from the call before" in out and "4 rows in " in out
    rows = read_rows(file)
    assert before in rows
    assert {(row["model"], row["attention"], row["image_size"][0]) for row in rows} == {
        (model, attention, side)
        for model, attention in (("vittt_tiny_patch16_224", None), ("deit_tiny_patch16_224", "fused"))
        for side in (32, 64)
    }
    assert all("flash_attention" in row["attention_kernel"] for row in rows if row["attention"] == "fused")
    figures = sorted(path.name for path in Path("artifacts/speed/made_up").iterdir())
    assert figures == [f"fig{n}_T_batch1_fp32_infer.png" for n in (1, 6)]

    out = repro_cli.run(*COMMAND, "--device", "cpu")  # that one is complete
    assert len(measured) == 2 + 3 + 4 and len(read_rows(file)) == 4
