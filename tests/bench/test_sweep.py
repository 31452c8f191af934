"""The rows of a sweep, their order, and which of them fit into a time: against counts and seconds known by hand."""

import itertools
from unittest.mock import Mock

import pytest

from repro.bench.speed import RowSpec
from repro.bench.sweep import IMAGE_SIZES, RowSchedule, order_by_importance, row_key


def test_the_order_is_a_permutation_that_begins_with_the_ends_and_the_half():
    assert order_by_importance(IMAGE_SIZES)[:3] == [224, 1280, 640]
    for sides in (IMAGE_SIZES, (64,), (64, 128), (32, 64, 80, 96, 224)):
        assert sorted(order_by_importance(sides)) == sorted(sides)
    # every prefix of three or more leaves no gap untouched while a wider one is split
    order = order_by_importance(IMAGE_SIZES)
    for n in range(3, len(order)):
        pairs = itertools.pairwise(sorted(order[:n]))
        gaps = [(high / low, low, high) for low, high in pairs if any(low < s < high for s in order[n:])]
        assert any(low < order[n] < high for _, low, high in gaps)


def test_a_row_and_its_spec_have_one_key():
    spec = RowSpec(model="m", options={"b": 1, "a": 2}, image_size=(64, 32), batch_size=3)
    row = {**vars(spec), "backend": "triton", "options": {"a": 2, "b": 1}, "image_size": [64, 32]}
    assert row_key(vars(spec)) == row_key(row)
    changes = {"image_size": [32, 64]}, {"batch_size": 4}, {"options": {}}
    assert all(row_key({**row, **change}) != row_key(row) for change in changes)


def make_spec(side, model="m", budget_s=600.0):
    return RowSpec(model=model, image_size=(side, side), budget_s=budget_s)


def make_row(latency_ms, steps=10):
    return {"status": "ok", "latency_ms": latency_ms, "samples_ms": [latency_ms] * steps}


def drive(schedule, clock, seconds, specs, passes=1):
    """Measure what the schedule yields; each row takes `seconds(spec)`, of which all but 1 s are 12 steps, and is stopped
    at its limit.
    """
    taken = []
    for spec, _ in schedule.walk(specs, passes):
        taken.append(spec)
        needed, limit = seconds(spec), schedule.limit(spec).budget_s
        clock.return_value += min(needed, limit)
        row = make_row((needed - 1) / 12 * 1e3) if needed <= limit else {"status": "timeout"}
        schedule.note(spec, row, min(needed, limit))
    return taken


def test_a_schedule_leaves_out_whole_image_sizes_that_do_not_fit():
    """Steps of 1 s at 1 GMAC, 4 s at 4, 2 s at 2: with start-up 13, 49 and 25 s a row; two models at each."""
    gmacs, clock = {16: 1.0, 64: 4.0, 32: 2.0}, Mock(return_value=0.0)
    specs = [make_spec(side, model) for side in (16, 64, 32) for model in "ab"]
    schedule = RowSchedule(lambda spec: gmacs[spec.image_size[0]], 120, clock)
    taken = drive(schedule, clock, lambda spec: 1 + 12 * gmacs[spec.image_size[0]], specs)
    # after 26 s there are 94 left; at 4 GMAC four steps of 1.3 x 4 s and 1 s of start are expected: 2 x 21.8 s fit
    assert [spec.image_size[0] for spec in taken] == [16, 16, 64, 64]
    # 26 + 98 s are gone; at 2 GMAC a step is expected to take 1.3 x 2 s, four of them and 1 s of start
    assert schedule.left_out == specs[4:] and [schedule.expect(spec) for spec in specs[4:]] == 2 * [
        pytest.approx(4 * 1.3 * 2 + 1)
    ]


@pytest.mark.parametrize("limit_s", [5, 60, 400, 3000, 200000])
@pytest.mark.parametrize("growth", [0.5, 1.0, 2.0])
def test_the_limit_is_kept_to_a_quarter(limit_s, growth):
    """Of models whose time grows otherwise than their multiply-adds."""
    sides, clock = (16, 128, 64, 32, 96), Mock(return_value=7.0)

    def seconds(spec):
        return 3 + {"a": 2, "b": 5}[spec.model] * (spec.image_size[0] / 16) ** (2 * growth)

    specs = [make_spec(side, model, budget_s=1e9) for side in sides for model in "ab"]
    schedule = RowSchedule(lambda spec: spec.image_size[0] ** 2 / 256, limit_s, clock, started=2.0)
    taken = drive(schedule, clock, seconds, specs)
    assert clock.return_value - 2 <= max(1.25 * limit_s, 5)  # 5 s were gone before the first row
    assert all((spec in taken) or (spec in schedule.left_out) for spec in specs)
    assert limit_s < 200000 or not schedule.left_out


def test_a_row_under_way_when_the_time_is_over_is_left_out():
    """A row of 10 s, then one of 1000 s that was expected to take 1 + 12 x 1.3 x 0.75 s; the limit is 100 s."""
    specs, clock = [make_spec(16), make_spec(32), make_spec(64)], Mock(return_value=0.0)
    schedule = RowSchedule(lambda spec: 1.0, 100, clock)
    assert drive(schedule, clock, lambda spec: {16: 10, 32: 1000, 64: 1}[spec.image_size[0]], specs) == specs[:2]
    assert schedule.left_out == specs[1:] and clock.return_value == pytest.approx(110)


def test_runs_share_the_time():
    """Two image sizes of 13 s a row, 16.6 s as expected, in 50 s: the last run has what the ones before it left."""
    for passes, expected in ((3, [1, 1, 1]), (2, [1, 2]), (1, [2])):
        clock = Mock(return_value=0.0)
        schedule = RowSchedule(lambda spec: 1.0, 50, clock)
        specs = [make_spec(16), make_spec(32)]
        found = [len(drive(schedule, clock, lambda spec: 13.0, specs, left)) for left in range(passes, 0, -1)]
        assert found == expected


def test_a_model_without_a_row_is_expected_to_be_as_slow_as_the_slowest():
    schedule = RowSchedule(lambda spec: 2.0, 100, Mock(return_value=0.0))
    assert schedule.expect(make_spec(16, "c")) == 6
    for model, ms in (("a", 100.0), ("b", 200.0)):
        schedule.note(make_spec(16, model), make_row(ms))
    assert schedule.expect(make_spec(16, "c")) == pytest.approx(6 + 12 * 1.3 * 0.2)
    schedule.note(make_spec(16, "c"), {"status": "oom"})  # and as it fails early, only its process counts
    assert schedule.expect(make_spec(32, "c")) == 6


def test_rows_of_an_earlier_call_tell_what_is_left():
    """1 s per step and GMAC from an earlier row: 12 steps of 1.3 s, and 6 s to start a process, unmeasured so far."""
    schedule = RowSchedule(lambda spec: 1.0)
    schedule.note(make_spec(16), make_row(1000.0))
    ((_, expected_s),) = list(schedule.walk([make_spec(32)]))
    assert round(expected_s, 6) == 12 * 1.3 + 6
