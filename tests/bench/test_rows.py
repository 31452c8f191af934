"""The measuring loop with a measurement of our own: what is measured, what is reused, and what happens after a failure."""

import dataclasses

import pytest

from repro.bench import rows as store_module
from repro.bench.rows import COLUMNS, find_row, open_model_rows, write_rows
from repro.bench.speed import RowSpec
from repro.core.csvfile import read_csv
from repro.core.errors import RunError, UserError

VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"


@dataclasses.dataclass
class Measurements:
    """Takes the place of `measure`: notes the specs, and gives rows of which the time is the middle of the interval.

    Args:
        fits: model -> the largest batch size that does not run out of memory; 64 without one.
        intervals: model -> those of its next rows, in place of 9 to 11 ms; a text is the end of a process that breaks.
    """

    specs: list[RowSpec] = dataclasses.field(default_factory=list)
    fits: dict[str, int] = dataclasses.field(default_factory=dict)
    intervals: dict[str, list] = dataclasses.field(default_factory=dict)

    def __call__(self, spec):
        self.specs.append(spec)
        interval = self.intervals[spec.model].pop(0) if self.intervals.get(spec.model) else [9.0, 11.0]
        if isinstance(interval, str):
            raise RuntimeError(f"{spec.row_id}: {interval}")
        row = vars(spec) | {"image_size": list(spec.image_size), "latency_ms_ci95": interval, "num_params": 5}
        if spec.batch_size > self.fits.get(spec.model, 64):
            return {**row, "status": "oom", "reason": "too large"}
        latency = sum(interval) / 2
        row |= {"latency_ms": latency, "samples_ms": [latency] * 10, "throughput_img_per_s": 1e3 / latency}
        return {**row, "peak_memory_mib": None, "status": "ok"}


@pytest.fixture
def measured(monkeypatch):
    made = Measurements()
    monkeypatch.setattr(store_module, "measure", made)
    return made


@pytest.fixture
def store(tmp_path):
    return open_model_rows(tmp_path, "cpu: made up")


def make_specs(*sides, **changes):
    pairs = [(side, *about) for side in sides for about in ((VITTT, None), (DEIT, "unfused"))]
    return [RowSpec(model=m, attention=a, image_size=(side, side), **changes) for side, m, a in pairs]


def test_rows_are_reused_by_the_same_code_device_and_run(measured, tmp_path, capsys):
    specs, saved = measured.specs, []
    store = open_model_rows(tmp_path, "cpu: made up", save=lambda store: saved.append(len(store.rows)))
    assert store_module.measure_rows(make_specs(32), store) == {}
    assert specs == make_specs(32) and saved == [1, 2]
    store_module.measure_rows(make_specs(32, 64), store)
    assert specs == make_specs(32, 64) and "2 of 4 rows are there from an earlier call" in capsys.readouterr().out
    store_module.measure_rows(make_specs(32), store, run=2)
    assert len(specs) == 6 and [row["run"] for row in store.rows] == [1, 1, 1, 1, 2, 2]
    assert {row["device"] for row in store.rows} == {"cpu: made up"}
    assert store.rows[1]["row"] == f"{DEIT}[attention=unfused]@32"
    # the rows as a later call reads them
    spec = make_specs(32)[0]
    assert find_row(open_model_rows(tmp_path, "cpu: made up", store.rows), spec, 1) == store.rows[0]
    assert find_row(open_model_rows(tmp_path, "cpu: another", store.rows), spec, 1) is None
    assert find_row(store, spec, 3) is None
    assert find_row(store, dataclasses.replace(spec, batch_size=2), 1) is None
    for name in ("commit", "torch_version"):
        assert find_row(open_model_rows(tmp_path, "cpu: made up", [{**store.rows[0], name: "old"}]), spec, 1) is None


def test_what_does_not_fit_is_left_out(measured, store):
    """Starting a process is assumed to take 6 s, so that two rows never fit into a second, the first image size aside."""
    left_out = store_module.measure_rows(make_specs(32, 64), store, budget_s=1e-3)
    assert measured.specs == make_specs(32) and list(left_out) == [64]


def test_a_baseline_out_of_memory_is_paired_at_the_largest_batch_size_that_fits_both(measured, store):
    measured.fits, wanted = {DEIT: 16, VITTT: 32}, make_specs(32, batch_size=64)
    store_module.measure_rows(wanted, store)
    store_module.measure_pairs(wanted, store)
    # 32 fits Vittt alone
    assert [(spec.model, spec.batch_size) for spec in measured.specs] == [
        (m, n) for n, models in ((64, (VITTT, DEIT)), (32, (DEIT, VITTT)), (16, (DEIT, VITTT))) for m in models
    ]
    measured.fits[DEIT] = 0
    # nothing was measured there, so that nothing is to be paired
    store_module.measure_pairs(make_specs(32, batch_size=2), store)
    assert len(measured.specs) == 6


def test_a_broken_process_is_a_row_or_the_end(measured, store):
    measured.intervals = {VITTT: ["signal 6"] * 2, DEIT: ["signal 6"]}
    with pytest.raises(RunError, match=f"^efficiency: {VITTT}@32: signal 6"):
        store_module.measure_rows(make_specs(32), store, keep_failures=False)
    store_module.measure_rows(make_specs(32), store)
    # counted all the same: DeiT-T's parameters less the positions of 14² - 2² patches
    assert [row["status"] for row in store.rows] == ["failed"] * 2
    assert store.rows[1]["num_params"] == 5_717_416 - 192 * 192
    assert {row["reason"] for row in store.rows} == {"signal 6"}


def test_a_row_that_cannot_run_is_found_before_any_is_measured(measured, store):
    specs = [*make_specs(32), RowSpec(model="vittt_gigantic", image_size=(32, 32))]
    with pytest.raises(UserError, match="^efficiency: vittt_gigantic: "):
        store_module.measure_rows(specs, store)
    assert not measured.specs


def test_a_gate_is_measured_for_families_with_an_operator(monkeypatch, capsys):
    def measure_gate(family, **about):
        peer = {"operator": "op", "share_of_copy_percent": 7.0, "at_least_percent": 20}
        return {"family": family, **about, **peer, "holds": family == "vim"}

    monkeypatch.setattr(store_module, "measure_gate", measure_gate)
    gates = store_module.measure_gates(["vrwkv", "deit", "vim"], batch_size=2, dtype="fp32", device="cpu")
    assert [gate["family"] for gate in gates] == ["vim", "vrwkv"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("copy") and said[1].endswith("below 20 %, no ratio against vrwkv will be given")


@pytest.mark.parametrize(("seconds", "text"), [(None, ""), (59.4, ", 59 s left"), (150.0, ", at most 2 min left")])
def test_remaining_time(seconds, text):
    assert store_module.format_remaining(seconds) == text


def test_the_table_of_rows(measured, store, tmp_path):
    store_module.measure_rows(make_specs(32), store)
    write_rows(tmp_path / "rows.csv", store.rows)
    assert (tmp_path / "rows.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    first, second = read_csv(tmp_path / "rows.csv")
    assert (first["image_size"], first["latency_ms_low"], first["latency_ms_high"]) == (32, 9.0, 11.0)
    assert "attention" not in first and second["attention"] == "unfused" and "peak_memory_mib" not in first


NOISY, QUIETER, QUIET = [5.0, 15.0], [7.0, 13.0], [9.5, 10.5]


@pytest.mark.parametrize(
    ("intervals", "budget_s", "reasons", "attempts", "kept"),
    [
        ([NOISY, QUIET, [1.0, 99.0]], 600.0, [], 2, QUIET),
        # of three that are noisy the quietest stays
        ([QUIETER, NOISY, NOISY, QUIET], 600.0, ["spread"], 3, QUIETER),
        ([NOISY, QUIETER, NOISY, QUIET], 600.0, ["spread"], 3, QUIETER),
        ([NOISY, NOISY, QUIETER, QUIET], 600.0, ["spread"], 3, QUIETER),
        ([NOISY, "broken", "broken"], 600.0, ["spread"], 3, NOISY),
        ([NOISY, QUIET], 0.5, ["spread"], 1, NOISY),  # starting a process is assumed to take 6 s
    ],
)
def test_a_noisy_row_is_measured_again(measured, store, tmp_path, capsys, intervals, budget_s, reasons, attempts, kept):
    """After all others, until it is quiet, three times at most, within its own budget; a later call leaves it."""
    measured.intervals[VITTT] = list(intervals)
    specs = make_specs(32, budget_s=budget_s)
    store_module.measure_rows(specs, store)
    row = store.rows[0]
    found = row["status"], row["noisy"], row["attempts"], row["latency_ms_ci95"]
    assert found == ("ok", reasons, attempts, kept)
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(" img/s; noisy: spread")
    assert [spec.model for spec in measured.specs] == [VITTT, DEIT, *[VITTT] * (attempts - 1)]
    if attempts > 1:  # else a later call has time for another
        assert said[2].startswith(f"[again, 2 of at most 3] {VITTT}@32: ")
        again = open_model_rows(tmp_path, "cpu: made up", [row])
        store_module.measure_rows(specs[:1], again)
        assert again.rows == [row] and len(measured.specs) == attempts + 1


def test_a_row_out_of_order_is_measured_again(measured, store):
    """The row at 32 first takes 30 ms and the one at 64 takes 10, so that the former was slowed."""
    measured.intervals[VITTT] = [[30.0, 30.0], [10.0, 10.0], [5.0, 5.0]]
    store_module.measure_rows([spec for spec in make_specs(32, 64) if spec.model == VITTT], store)
    assert [(row["latency_ms"], row["noisy"], row["attempts"]) for row in store.rows] == [(5.0, [], 2), (10.0, [], 1)]
