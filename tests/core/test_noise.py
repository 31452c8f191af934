"""Which rows of speed are noisy, on rows made by hand; intervals of means and of shares."""

import math

import pytest
from scipy.stats import binomtest

from repro.core.noise import find_interval, find_noise, find_spread, mark_noise, pool_runs
from repro.core.statistics import clip_share, describe_sample, measure_rise, share_interval


def make_row(side=224, latency=100.0, interval=(95.0, 105.0), **more):
    row = {"model": "m", "options": {}, "attention": None, "batch_size": 1, "dtype": "fp32", "mode": "infer"}
    row |= {"device": "cpu: some processor, 2 threads", "status": "ok", "image_size": [side, side]}
    return {**row, "latency_ms": latency, "latency_ms_ci95": interval, **more}


def test_the_interval_is_the_range_of_the_samples_where_there_are_few():
    assert find_interval(make_row(samples_ms=[1.0, 999.0])) == (95.0, 105.0)
    few = make_row(interval=None, samples_ms=[100.0, 90.0, 120.0])
    assert find_interval(few) == (90.0, 120.0) and find_spread(few) == 0.3
    assert find_interval(make_row(interval=None, samples_ms=[100.0])) is None
    assert find_spread(make_row(interval=None)) is None


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"interval": (90.0, 110.0)}, []),  # 0.2 of the median, and not more
        ({"interval": (89.0, 110.0)}, ["spread"]),
        ({"interval": None, "samples_ms": [99.0, 100.0, 121.0]}, ["spread"]),
        ({"interval": None, "samples_ms": []}, []),
        ({"status": "oom", "latency": None, "interval": None}, []),
        # two threads on four cores leave two free; the row before had two threads as well
        ({"load_average": 4.5, "threads": 2, "cores": 4}, []),
        ({"load_average": 4.6, "threads": 2, "cores": 4}, ["load"]),
        # as many threads as cores leave none
        ({"load_average": 2.5, "threads": 2, "cores": 2}, []),
        ({"load_average": 2.6, "threads": 2, "cores": 2}, ["load"]),
        ({"load_average": 2.6, "threads": 4, "cores": 2}, []),  # more threads than cores: their own load is theirs
        ({"load_average": 9.0, "threads": 2, "cores": 2, "interval": (1.0, 999.0)}, ["load", "spread"]),
        ({"load_average": 9.0, "threads": 2, "cores": 2, "device": "cuda: some GPU"}, []),
    ],
)
def test_a_row_alone(changes, reasons):
    row = make_row(**changes)
    assert find_noise(row) == reasons and [each["noisy"] for each in mark_noise([row])] == [reasons]


def test_a_small_image_that_took_longer_than_a_large_one_is_noisy():
    """At 512 steps took 125 to 135 ms, at 640 115 to 124; 224 and 384 could be equal, by their intervals."""
    found = {224: (95.0, 100.0, 105.0), 384: (92.0, 96.0, 99.0), 512: (125.0, 130.0, 135.0), 640: (115.0, 120.0, 124.0)}
    rows = [make_row(side, latency, (low, high)) for side, (low, latency, high) in found.items()]
    assert [row["noisy"] for row in mark_noise(rows)] == [[], [], ["order"], []]
    assert [{key: row[key] for key in rows[0]} for row in mark_noise(rows)] == rows
    # without an interval, any excess counts
    rows = [make_row(side, latency, None) for side, latency in ((224, 100.0), (384, 99.9))]
    assert [row["noisy"] for row in mark_noise(rows)] == [["order"], []]


@pytest.mark.parametrize(
    ("key", "value"),
    {"model": "n", "attention": "fused", "batch_size": 2, "mode": "train", "run": 2, "device": "cpu: another"}.items(),
)
def test_only_rows_alike_are_set_in_order(key, value):
    rows = [make_row(224, 100.0), make_row(1280, 10.0, (9.9, 10.1), **{key: value})]
    assert [row["noisy"] for row in mark_noise(rows)] == [[], []]
    assert mark_noise([rows[0], make_row(1280, 10.0, (9.9, 10.1))])[0]["noisy"] == ["order"]


def test_rows_that_were_not_measured_are_no_measure_of_order():
    rows = [make_row(224, 100.0), make_row(1280, None, None, status="oom"), {"status": "ok"}]
    assert [row["noisy"] for row in mark_noise(rows)] == [[], [], []]


def make_runs(*latencies, **more):
    by = {"commit": "a", "torch_version": "2", **more}
    pairs = [(run, each, 1e3 / each) for run, each in enumerate(latencies, 1)]
    return [make_row(latency=x, throughput_img_per_s=y, run=n, peak_memory_mib=10.0 * n, **by) for n, x, y in pairs]


def test_few_processes_have_a_range_and_five_an_interval_of_their_mean():
    """By Student's t, in logarithms, as for numbers over seeds."""
    (row,) = pool_runs(make_runs(100.0, 110.0, 90.0))
    pooled = {"processes": 3, "latency_ms": 100.0, "throughput_img_per_s": 10.0, "peak_memory_mib": 20.0}
    assert pooled.items() <= row.items()
    assert row["latency_ms_ci95"] is None and find_interval(row) == (90.0, 110.0)
    logs = [4.5, 4.55, 4.6, 4.65, 4.7, 4.62, 4.58, 4.55, 4.66]
    for count in range(5, 10):
        (row,) = pool_runs(make_runs(*map(math.exp, logs[:count])))
        expected = [math.exp(end) for end in describe_sample(logs[:count]).ci95]
        assert row["latency_ms_ci95"] == pytest.approx(expected, rel=1e-5)


def test_noisy_runs_are_not_pooled_while_there_is_a_quiet_one():
    quiet, noisy = make_runs(100.0, 150.0)
    assert pool_runs([quiet, noisy | {"latency_ms_ci95": (100.0, 200.0)}])[0]["latency_ms"] == 100.0
    # nor are runs of other code
    first, second = make_runs(100.0, 50.0)
    assert [row["latency_ms"] for row in pool_runs([second | {"commit": "b"}, first])] == [100.0]


@pytest.mark.parametrize("values", [(0, 1, 8), (50, 100, 100), (0, 100)])
def test_the_interval_of_a_share_ends_at_0_and_100(values):
    low, high = describe_sample(values).ci95
    assert low < 0 or high > 100
    limits = describe_sample(values, is_share=True).ci95
    assert limits == (max(low, 0), min(high, 100)) == clip_share((low, high))


@pytest.mark.parametrize(("seen", "trials"), [(0, 10), (313, 359), (868, 1000), (1000, 1000)])
def test_the_interval_of_images_is_wilsons(seen, trials):
    stated = binomtest(seen, trials).proportion_ci(method="wilson")
    assert share_interval(100 * seen / trials, trials) == pytest.approx((100 * stated.low, 100 * stated.high))


@pytest.mark.parametrize(
    ("curve", "rise"),
    [
        ({1: 10.0, 2: 50.0, 3: 60.0, 4: 58.0}, -2.0),  # the last quarter is epoch 4
        ({2: 20.0, 4: 40.0, 6: 50.0, 7: 90.0, 8: 55.0}, 40.0),  # 7 and 8 of 8
        ({4: 30.0}, None),
        ({}, None),
    ],
)
def test_a_curve_rises_by_what_its_last_quarter_adds(curve, rise):
    assert measure_rise(curve) == rise
