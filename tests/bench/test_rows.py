"""The measuring loop with a measurement of our own: what is measured, what is reused, and what happens after a failure."""

import dataclasses

import pytest

from repro.bench import rows as store_module
from repro.bench.rows import COLUMNS, find_row, open_model_rows, write_rows
from repro.bench.speed import RowSpec
from repro.core.csvfile import read_csv
from repro.core.errors import RunError, UserError

VITTT, DEIT = "vittt_tiny_patch16_224", "deit_tiny_patch16_224"


class Specs(list):
    """The specs that were measured, in order; `intervals`: model -> those of its next rows, in place of a quiet one."""

    intervals: dict


@pytest.fixture
def measured(monkeypatch):
    """The specs that were measured; a model's row is `ok` up to the batch size that stands for it in `fits`."""
    specs, fits, intervals = Specs(), {}, {}
    specs.intervals = intervals

    def measure(spec):
        specs.append(spec)
        own = ("model", "options", "attention", "batch_size", "dtype", "mode", "compile")
        row = {name: getattr(spec, name) for name in own}
        row |= {"image_size": list(spec.image_size), "device": spec.device}
        row |= {"latency_ms_ci95": [9.0, 11.0], "num_params": 5}
        if spec.batch_size > fits.get(spec.model, 64):
            return {**row, "status": "oom", "reason": "too large"}
        row |= {"latency_ms": 10.0, "samples_ms": [10.0] * 10, "throughput_img_per_s": 100.0, "peak_memory_mib": None}
        if intervals.get(spec.model):
            row["latency_ms_ci95"] = intervals[spec.model].pop(0)
        return {**row, "status": "ok"}

    monkeypatch.setattr(store_module, "measure", measure)
    return specs, fits


def make_specs(*sides, **changes):
    pairs = [(side, *about) for side in sides for about in ((VITTT, None), (DEIT, "unfused"))]
    return [RowSpec(model=m, attention=a, image_size=(side, side), **changes) for side, m, a in pairs]


def test_rows_are_reused_by_the_same_code_device_and_run(measured, tmp_path, capsys, monkeypatch):
    specs, saved = measured[0], []
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
    for name in ("code_hash", "torch_version"):
        assert find_row(open_model_rows(tmp_path, "cpu: made up", [{**store.rows[0], name: "old"}]), spec, 1) is None
    # an edit of the family's source makes its rows stale, and no other's
    family = tmp_path / "repro" / "models" / "vittt.py"
    family.parent.mkdir(parents=True)
    family.write_text("")
    later = open_model_rows(tmp_path, "cpu: made up", store.rows)
    assert [find_row(later, spec, 1) is None for spec in make_specs(32)] == [True, False]


def test_what_does_not_fit_is_left_out(measured, tmp_path):
    """Starting a process is assumed to take 6 s, so that two rows never fit into a second, the first image size aside."""
    left_out = store_module.measure_rows(make_specs(32, 64), open_model_rows(tmp_path, "cpu: made up"), budget_s=1e-3)
    assert measured[0] == make_specs(32) and list(left_out) == [64]


def test_a_baseline_out_of_memory_is_paired_at_the_largest_batch_size_that_fits_both(measured, tmp_path):
    specs, fits = measured
    fits |= {DEIT: 16, VITTT: 32}
    store, wanted = open_model_rows(tmp_path, "cpu: made up"), make_specs(32, batch_size=64)
    store_module.measure_rows(wanted, store)
    store_module.measure_pairs(wanted, store)
    # 32 fits Vittt alone
    assert [(spec.model, spec.batch_size) for spec in specs] == [
        (m, n) for n, models in ((64, (VITTT, DEIT)), (32, (DEIT, VITTT)), (16, (DEIT, VITTT))) for m in models
    ]
    fits[DEIT] = 0
    # nothing was measured there, so that nothing is to be paired
    store_module.measure_pairs(make_specs(32, batch_size=2), store)
    assert len(specs) == 6


@pytest.mark.parametrize("keep", [True, False])
def test_a_broken_process_is_a_row_or_the_end(measured, tmp_path, monkeypatch, keep):
    def measure(spec):
        raise RuntimeError(f"{spec.row_id}: the measuring process ended with signal 6: no message")

    monkeypatch.setattr(store_module, "measure", measure)
    store = open_model_rows(tmp_path, "cpu: made up")
    if not keep:
        with pytest.raises(RunError, match=f"^efficiency: {VITTT}@32: .* signal 6"):
            store_module.measure_rows(make_specs(32), store, keep_failures=False)
        return
    store_module.measure_rows(make_specs(32), store)
    # counted all the same: DeiT-T's parameters less the positions of 14² - 2² patches
    assert [row["status"] for row in store.rows] == ["failed"] * 2
    assert store.rows[1]["num_params"] == 5_717_416 - 192 * 192
    assert {row["reason"] for row in store.rows} == {"the measuring process ended with signal 6: no message"}


def test_a_row_that_cannot_run_is_found_before_any_is_measured(measured, tmp_path):
    specs = [*make_specs(32), RowSpec(model="vittt_gigantic", image_size=(32, 32))]
    with pytest.raises(UserError, match="^efficiency: vittt_gigantic: "):
        store_module.measure_rows(specs, open_model_rows(tmp_path, "cpu: made up"))
    assert not measured[0]


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


def test_the_table_of_rows(measured, tmp_path):
    store = open_model_rows(tmp_path, "cpu: made up")
    store_module.measure_rows(make_specs(32), store)
    write_rows(tmp_path / "rows.csv", store.rows)
    assert (tmp_path / "rows.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    first, second = read_csv(tmp_path / "rows.csv")
    assert (first["image_size"], first["latency_ms_low"], first["latency_ms_high"]) == (32, 9.0, 11.0)
    assert "attention" not in first and second["attention"] == "unfused" and "peak_memory_mib" not in first


def measure_noisy(measured, root, *intervals, **changes):
    """Measure a row whose measurements have these intervals, and return it as it is stored."""
    measured[0].intervals[VITTT] = list(intervals)
    store = open_model_rows(root, "cpu: made up")
    store_module.measure_rows(make_specs(32, **changes), store)
    return store.rows[0]


def test_a_noisy_row_is_measured_again_until_it_is_quiet(measured, tmp_path, capsys):
    row = measure_noisy(measured, tmp_path, [5.0, 15.0], [9.5, 10.5], [1.0, 99.0])
    assert (row["noisy"], row["attempts"], row["latency_ms_ci95"]) == ([], 2, [9.5, 10.5])
    assert [spec.model for spec in measured[0]] == [VITTT, DEIT, VITTT]
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("100.00 img/s; noisy: spread")
    assert said[2].startswith(f"[again, 2 of at most 3] {VITTT}@32: 10.0 ms")


@pytest.mark.parametrize("quietest", [0, 1, 2])
def test_of_noisy_measurements_the_quietest_stays(measured, tmp_path, quietest):
    intervals = [[5.0, 15.0] for _ in range(3)]
    intervals[quietest] = [7.0, 13.0]
    row = measure_noisy(measured, tmp_path, *intervals, [9.9, 10.1])
    assert (row["noisy"], row["attempts"], row["status"]) == (["spread"], 3, "ok")
    assert row["latency_ms_ci95"] == [7.0, 13.0]
    again = open_model_rows(tmp_path, "cpu: made up", [row])
    store_module.measure_rows(make_specs(32)[:1], again)  # a later call measures it no more
    assert again.rows == [row] and len(measured[0]) == 4


def test_a_row_that_fails_when_measured_again_stays_as_it_was(measured, tmp_path, monkeypatch):
    def measure(spec):
        if spec in measured[0]:
            raise RuntimeError("broken")
        return once(spec)

    once = store_module.measure
    monkeypatch.setattr(store_module, "measure", measure)
    monkeypatch.setattr(store_module, "replace", lambda spec, **changes: spec)
    row = measure_noisy(measured, tmp_path, [5.0, 15.0])
    assert (row["status"], row["noisy"], row["attempts"]) == ("ok", ["spread"], 3)


def test_a_noisy_row_is_not_measured_again_beyond_its_own_budget(measured, tmp_path):
    """Starting a process is assumed to take 6 s."""
    row = measure_noisy(measured, tmp_path, [5.0, 15.0], [9.5, 10.5], budget_s=0.5)
    assert (row["noisy"], row["attempts"]) == (["spread"], 1) and len(measured[0]) == 2


def test_a_row_out_of_order_is_measured_again(measured, tmp_path, monkeypatch):
    """The row at 32 first takes 30 ms and the one at 64 takes 10, so that the former was slowed."""
    latencies = {32: [30.0, 5.0], 64: [10.0]}
    once = store_module.measure

    def measure(spec):
        latency = latencies[spec.image_size[0]].pop(0)
        return {**once(spec), "latency_ms": latency, "latency_ms_ci95": [latency, latency]}

    monkeypatch.setattr(store_module, "measure", measure)
    store = open_model_rows(tmp_path, "cpu: made up")
    store_module.measure_rows([spec for spec in make_specs(32, 64) if spec.model == VITTT], store)
    assert [(row["latency_ms"], row["noisy"], row["attempts"]) for row in store.rows] == [(5.0, [], 2), (10.0, [], 1)]
