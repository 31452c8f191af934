"""Rows of speed made by hand: processes pooled, ratios with their ends, and whose time a step is."""

import pytest

from repro.bench.pooling import HOST, UNKNOWN, bound_ratio, find_slow_operator, mark_host, pool_runs


def make_row(latency, side=224, **more):
    row = {"model": "m", "options": {}, "attention": None, "batch_size": 1, "dtype": "fp32", "mode": "infer"}
    row |= {"compile": False, "backend": "torch", "device": "cpu: some processor, 2 threads", "status": "ok", "run": 1}
    row |= {"commit": "a", "torch_version": "2", "peak_memory_mib": 10.0, "image_size": [side, side]}
    return row | {"latency_ms": latency, "throughput_img_per_s": 1e3 / latency if latency else None} | more


def make_runs(*latencies, **more):
    return [make_row(each, run=run, peak_memory_mib=10.0 * run, **more) for run, each in enumerate(latencies, 1)]


def test_a_measurement_is_the_median_of_its_processes_with_their_range():
    (row,) = pool_runs(make_runs(100.0, 110.0, 90.0))
    pooled = {"processes": 3, "latency_ms": 100.0, "throughput_img_per_s": 10.0, "peak_memory_mib": 20.0}
    assert pooled.items() <= row.items()
    assert row["latency_range_ms"] == (90.0, 110.0) and row["peak_memory_range_mib"] == (10.0, 30.0)


def test_a_process_that_failed_counts_where_none_measured():
    failed = make_row(None, status="oom", run=2)
    (row,) = pool_runs([*make_runs(100.0), failed])
    assert (row["processes"], row["latency_ms"], row["latency_range_ms"]) == (1, 100.0, None)
    (row,) = pool_runs([failed])
    assert (row["status"], row["latency_ms"], row["latency_range_ms"]) == ("oom", None, None)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {"commit": "b"}, 100.0),  # the commit with more processes
        ({}, {"torch_version": "3"}, 100.0),
        ({"commit": "b"}, {"commit": "b"}, 80.0),  # one commit: all three
    ],
)
def test_rows_of_other_code_are_not_pooled(first, second, expected):
    rows = [*make_runs(100.0, 100.0, **first), make_row(50.0, run=3, **second)]
    rows[0]["latency_ms"] = 80.0 if first else 100.0
    assert [row["latency_ms"] for row in pool_runs(rows)] == [expected]


def test_of_two_commits_with_as_many_processes_the_later_one_counts():
    rows = [make_row(100.0, measured="2026-01-02"), make_row(50.0, commit="b", measured="2026-01-01")]
    assert [row["latency_ms"] for row in pool_runs(rows)] == [100.0]


@pytest.mark.parametrize(
    ("key", "value"),
    {"model": "n", "attention": "fused", "batch_size": 2, "mode": "train", "device": "cpu: another"}.items(),
)
def test_other_measurements_stay_apart(key, value):
    assert len(pool_runs([make_row(1.0), make_row(2.0, **{key: value})])) == 2
    assert len(pool_runs([make_row(1.0), make_row(2.0, side=384)])) == 2


def test_the_ends_of_a_ratio_are_those_of_both_ranges():
    """Ours takes 8 to 12 ms, theirs 20 to 30: at least 20 / 12 and at most 30 / 8 times as fast."""
    ours, theirs = mark_host(pool_runs([*make_runs(8.0, 10.0, 12.0), *make_runs(20.0, 25.0, 30.0, model="n")]))
    ratio = bound_ratio(ours, theirs)
    assert ratio.times == 2.5 and ratio.ends == (20 / 12, 30 / 8)


def test_a_ratio_of_peaks_has_the_ends_of_theirs_whoever_has_the_time():
    """Ours takes 10 to 30 MiB, theirs 10 to 20, on a GPU that waits for its host."""
    gpu = {"device": "cuda: some GPU"}
    rows = [*make_runs(8.0, 8.0, 8.0, **gpu), *make_runs(8.0, 8.0, model="n", **gpu)]
    ours, theirs = ({**row, "host": HOST} for row in pool_runs(rows))
    assert bound_ratio(ours, theirs) is None
    assert bound_ratio(ours, theirs, "peak_memory_mib") == (15 / 20, (10 / 30, 20 / 10))
    assert bound_ratio(ours, theirs | {"peak_memory_mib": None}, "peak_memory_mib") is None


def test_a_ratio_with_one_process_on_a_side_has_no_ends_and_one_without_a_time_is_none():
    ours, theirs = mark_host(pool_runs([*make_runs(8.0, 10.0, 12.0), *make_runs(25.0, model="n")]))
    assert bound_ratio(ours, theirs) == (2.5, None)
    ours, theirs = mark_host(pool_runs([make_row(1.0), make_row(None, status="oom", model="n")]))
    assert bound_ratio(ours, theirs) is None


GPU = {"device": "cuda: a GPU"}
# (batch, side) -> ms: the second grows with the work from (64, 224) on, all others take as long as their host
TIMES = {(1, 224): 11.2, (1, 1280): 12.2, (64, 224): 11.4, (64, 1280): 39.2}


def mark(times, **more):
    rows = [make_row(ms, side, batch_size=batch, **GPU | more) for (batch, side), ms in times.items()]
    return {(row["batch_size"], row["image_size"][0]): row["host"] for row in mark_host(rows)}


def test_a_time_that_does_not_grow_with_the_work_is_the_hosts():
    hosts = dict.fromkeys(TIMES, HOST) | {(64, 1280): UNKNOWN}
    assert mark(TIMES) == hosts


@pytest.mark.parametrize("more", [{"device": "cpu: b"}, {"compile": "graphs"}])
def test_a_cpu_and_cuda_graphs_have_no_host(more):
    assert set(mark(TIMES, **more).values()) == {""}


def test_a_pair_whose_work_differs_little_shows_nothing():
    assert set(mark({(1, 224): 11.2, (7, 224): 11.2}).values()) == {UNKNOWN}


@pytest.mark.parametrize(
    ("device", "share", "is_slow"),
    [
        ("cpu: x", 19.9, True),
        ("cpu: x", 20.0, False),
        ("cuda: x", 29.9, True),
        ("cuda: x", 30.0, False),
        ("cpu: x", None, False),
    ],
)
def test_an_operator_far_below_a_copy_gives_no_ratio(device, share, is_slow):
    assert bool(find_slow_operator({"device": device, "op_share_of_copy_percent": share})) == is_slow
