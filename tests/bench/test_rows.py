"""The measuring loop with a measurement of our own: what is measured, what is reused, and what happens after a failure."""

import csv
import dataclasses
from unittest.mock import Mock

import pytest
import torch

from repro.bench import efficiency
from repro.bench import rows as module
from repro.bench.params import SweepParams
from repro.bench.rows import COLUMNS, Sheet, make_schedule, read_rows, share_finder
from repro.bench.speed import RowSpec
from repro.bench.sweep import RowSchedule
from repro.bench.unfinished import read_clock
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime

VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"


LONG_AGO, NEVER = "2000-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"


@dataclasses.dataclass
class Measurements:
    """Takes the place of `measure`: notes the specs, and gives rows of 10 ms.

    Args:
        fits: model -> the largest batch size that does not run out of memory; 64 without one.
        broken: the models whose process breaks.
    """

    specs: list[RowSpec] = dataclasses.field(default_factory=list)
    fits: dict[str, int] = dataclasses.field(default_factory=dict)
    broken: set[str] = dataclasses.field(default_factory=set)

    def __call__(self, spec):
        self.specs.append(spec)
        if spec.model in self.broken:
            raise RuntimeError(f"{spec.row_id}: signal 6")
        row = vars(spec) | {"image_size": list(spec.image_size), "num_params": 5, "attention_kernel": "none"}
        if spec.batch_size > self.fits.get(spec.model, 64):
            return {**row, "status": "oom", "reason": "too large"}
        row |= {"latency_ms": 10.0, "samples_ms": [10.0] * 10, "throughput_img_per_s": 100.0}
        return {**row, "peak_memory_mib": None, "status": "ok"}


@pytest.fixture
def measured(monkeypatch):
    made = Measurements()
    monkeypatch.setattr(module, "measure", made)
    return made


@pytest.fixture
def open_sheet(tmp_path):
    return lambda device="cpu: made up", began=LONG_AGO: Sheet(tmp_path / "speed" / "x.csv", tmp_path, device, began)


@pytest.fixture
def sheet(open_sheet):
    return open_sheet()


def make_specs(*sides, **changes):
    pairs = [(side, *about) for side in sides for about in ((VITTT, None), (DEIT, "unfused"))]
    return [RowSpec(model=m, attention=a, image_size=(side, side), **changes) for side, m, a in pairs]


def measure_rows(specs, sheet, **how):
    module.measure_rows(specs, sheet, make_schedule(specs), **how)


def measure_pairs(specs, sheet, find_share=lambda family, batch_size: None):
    module.measure_pairs(specs, sheet, make_schedule(specs), find_share=find_share)


def test_rows_of_this_measurement_are_not_measured_again(measured, open_sheet, capsys):
    measure_rows(make_specs(32), open_sheet())
    measure_rows(make_specs(32, 64), open_sheet())
    assert measured.specs == make_specs(32, 64)
    assert "2 of 4 rows are there from the call before" in capsys.readouterr().out


@pytest.mark.parametrize("other", [{"device": "cpu: another"}, {"began": NEVER}])
def test_rows_of_another_device_or_an_earlier_measurement_do_not_count(measured, open_sheet, other):
    measure_rows(make_specs(32), open_sheet())
    assert open_sheet(**other).find(make_specs(32)[0], 1) is None
    measure_rows(make_specs(32), open_sheet(**other))
    assert measured.specs == 2 * make_specs(32)


def test_a_new_measurement_replaces_all_runs_of_the_old_one_and_nothing_else(measured, open_sheet):
    for run in (1, 2):
        measure_rows(make_specs(32, 64), open_sheet(), run=run)
    # as a later measurement sees them
    fresh = open_sheet()
    fresh.rows = [row | {"measured": LONG_AGO} for row in fresh.rows]
    fresh.began = "2000-01-01T00:00:01+00:00"
    measure_rows(make_specs(32), fresh)
    runs = [(row["image_size"][0], row["run"]) for row in read_rows(fresh.path)]
    assert sorted(runs) == [*[(32, 1)] * 2, *[(64, 1)] * 2, *[(64, 2)] * 2]


def test_a_row_that_was_stopped_is_no_row(measured, sheet, monkeypatch):
    """The second of two takes all the time there is."""
    clock = Mock(return_value=0.0)
    schedule = RowSchedule(lambda spec: 1.0, 100, clock)

    def measure(spec):
        clock.return_value += 10 if spec.model == VITTT else spec.budget_s
        return measured(spec) if spec.model == VITTT else {"status": "timeout", "reason": "over its budget"}

    monkeypatch.setattr(module, "measure", measure)
    specs = make_specs(32, budget_s=600.0)
    module.measure_rows(specs, sheet, schedule)
    assert [row["model"] for row in read_rows(sheet.path)] == [VITTT] and schedule.left_out == specs[1:]
    assert clock.return_value == pytest.approx(110)


def test_a_baseline_out_of_memory_is_paired_at_the_largest_batch_size_that_fits_both(measured, sheet):
    measured.fits, wanted = {DEIT: 16, VITTT: 32}, make_specs(32, batch_size=64)
    measure_rows(wanted, sheet)
    measure_pairs(wanted, sheet)
    # 32 fits Vittt alone
    assert [(spec.model, spec.batch_size) for spec in measured.specs] == [
        (m, n) for n, models in ((64, (VITTT, DEIT)), (32, (DEIT, VITTT)), (16, (DEIT, VITTT))) for m in models
    ]
    measured.fits[DEIT] = 0
    # nothing was measured there, so that nothing is to be paired
    measure_pairs(make_specs(32, batch_size=2), sheet)
    assert len(measured.specs) == 6


def test_a_broken_process_is_a_row_or_the_end(measured, sheet):
    measured.broken = {VITTT, DEIT}
    with pytest.raises(RunError, match=f"^efficiency: {VITTT}@32: signal 6"):
        measure_rows(make_specs(32), sheet, keep_failures=False)
    measure_rows(make_specs(32), sheet)
    # counted all the same: DeiT-T's parameters less the positions of 14² - 2² patches
    assert [row["status"] for row in sheet.rows] == ["failed"] * 2
    assert {row["num_params"] for row in sheet.rows if row["model"] == DEIT} == {5_717_416 - 192 * 192}
    assert {row["reason"] for row in sheet.rows} == {"signal 6"}


def test_a_sweep_whose_rows_all_fail_is_an_error_and_is_measured_again(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(efficiency, "_open_device", lambda runtime: (torch.device("cpu"), "cpu: made up"))
    params, began = SweepParams(image_sizes=(32,), families=("vittt",), sizes=("T",)), read_clock()

    def sweep():
        return efficiency.run_sweep(params, Paths(tmp_path), Runtime(data_roots={}), began=began)

    measured.broken = {VITTT}
    with pytest.raises(RunError):
        sweep()
    measured.broken = set()
    assert sweep() and sweep() and len(measured.specs) == 2
    (file,) = tmp_path.glob("results/speed/*.csv")
    assert [row["status"] for row in read_rows(file)] == ["ok"]


def test_a_row_that_cannot_run_is_found_before_any_is_measured(measured, sheet):
    specs = [*make_specs(32), RowSpec(model="vittt_gigantic", image_size=(32, 32))]
    with pytest.raises(UserError, match="^efficiency: vittt_gigantic: "):
        measure_rows(specs, sheet)
    assert not measured.specs


def test_the_share_of_a_copy_is_measured_once_of_a_family_with_an_operator_and_stands_in_its_rows(
    measured, sheet, monkeypatch
):
    asked = []
    monkeypatch.setattr(module, "measure_share", lambda family, **about: asked.append(family) or 7.0)
    find_share = share_finder(dtype="fp32", device="cpu")
    models = [(side, f"{name}_tiny_patch16_224") for side in (32, 64) for name in ("vim", "vittt")]
    specs = [RowSpec(model=model, image_size=(side, side)) for side, model in models]
    measure_rows(specs, sheet, find_share=find_share)
    assert [row["op_share_of_copy_percent"] for row in read_rows(sheet.path)] == [7.0, None, 7.0, None]
    assert asked == ["vim"]


def test_a_pair_at_a_smaller_batch_has_the_share_at_this_batch(measured, sheet):
    """Without it, no ratio is given against the family."""
    vim = "vim_tiny_patch16_224"
    measured.fits, specs = {vim: 4}, [RowSpec(model=m, image_size=(32, 32), batch_size=8) for m in (vim, VITTT)]
    measure_rows(specs, sheet)
    measure_pairs(specs, sheet, lambda family, batch_size: batch_size if family == "vim" else None)
    shares = {
        row["batch_size"]: row["op_share_of_copy_percent"] for row in read_rows(sheet.path) if row["model"] == vim
    }
    assert shares == {8: None, 4: 4}


def test_a_share_that_cannot_be_measured_is_a_line_and_costs_no_row(measured, sheet, monkeypatch, capsys):
    def refuse(family, **about):
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(module, "measure_share", refuse)
    specs = [RowSpec(model="vim_tiny_patch16_224", image_size=(32, 32))]
    measure_rows(specs, sheet, find_share=share_finder(dtype="fp32", device="cpu"))
    assert [(row["status"], row["op_share_of_copy_percent"]) for row in read_rows(sheet.path)] == [("ok", None)]
    assert "the operator of vim at batch 1: not measured: CUDA out of memory\n" in capsys.readouterr().out


def test_the_file_says_what_was_measured(measured, sheet):
    specs = [*make_specs(32, compile="graphs"), RowSpec(model=VITTT, options={"chunk_size": 0}, image_size=(32, 64))]
    measure_rows(specs, sheet)
    assert sheet.path.read_text().splitlines()[0] == ",".join(COLUMNS)
    found = read_rows(sheet.path)
    assert found == [{name: row.get(name) for name in COLUMNS} for row in sheet.rows]
    tall = next(row for row in found if row["options"])
    assert (tall["image_size"], tall["options"], tall["compile"]) == ([32, 64], {"chunk_size": 0}, False)
    assert (tall["row"], tall["latency_ms"]) == (f"{VITTT}[chunk_size=0]@32x64", 10.0)


@pytest.mark.parametrize(
    ("column", "value"),
    [("image_size", "32"), ("options", "{"), ("compile", "yes"), ("run", "one"), ("latency_ms", "ten"), ("model", "")],
)
def test_a_damaged_file_is_named_with_line_and_column(measured, sheet, column, value):
    measure_rows(make_specs(32)[:1], sheet)
    header, line = sheet.path.read_text().splitlines()
    values = dict(zip(header.split(","), next(csv.reader([line])), strict=True)) | {column: value}
    with open(sheet.path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, values)
        writer.writeheader()
        writer.writerow(values)
    with pytest.raises(UserError, match=f"x.csv: line 2: {column}"):
        read_rows(sheet.path)


def test_a_commit_of_digits_stays_text(measured, sheet):
    measure_rows(make_specs(32)[:1], sheet)
    sheet.path.write_text(sheet.path.read_text().replace("not in Git", "012345678901"))
    assert read_rows(sheet.path)[0]["commit"] == "012345678901"


def test_an_emulated_dtype_is_a_row_without_a_time(measured, sheet, monkeypatch):
    monkeypatch.setattr(module, "explain_emulation", {"bf16": "no units", "fp32": None}.get)
    measure_rows([*make_specs(32, dtype="bf16"), *make_specs(32), *make_specs(48, dtype="bf16", device="cuda")], sheet)
    assert [(spec.dtype, spec.device) for spec in measured.specs] == [("fp32", "cpu")] * 2 + [("bf16", "cuda")] * 2
    rows = [row for row in sheet.rows if row["status"] != "ok"]
    assert [(row["status"], row["reason"], row["latency_ms"]) for row in rows] == [("emulated", "no units", None)] * 2
