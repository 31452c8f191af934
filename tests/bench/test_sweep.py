"""The rows of a sweep, their order, and which of them fit into a time: against counts and seconds known by hand."""

import itertools
from unittest.mock import Mock

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


def drive(schedule, clock, seconds):
    """Measure what the schedule yields; each row takes `seconds(spec)`, of which all but 1 s are 12 steps."""
    taken = []
    for spec, _ in schedule:
        taken.append(spec)
        clock.return_value += seconds(spec)
        schedule.note(spec, make_row((seconds(spec) - 1) / 12 * 1e3), seconds(spec))
    return taken


def test_a_schedule_leaves_out_whole_image_sizes_that_do_not_fit():
    """Steps of 1 s at 1 GMAC, 4 s at 4, 2 s at 2: with start-up 13, 49 and 25 s a row; two models at each."""
    gmacs, clock = {16: 1.0, 64: 4.0, 32: 2.0}, Mock(return_value=0.0)
    specs = [make_spec(side, model) for side in (16, 64, 32) for model in "ab"]
    schedule = RowSchedule(specs, lambda spec: gmacs[spec.image_size[0]], 100, clock)
    taken = drive(schedule, clock, lambda spec: 1 + 12 * gmacs[spec.image_size[0]])
    # after 26 s there are 74 left; at 4 GMAC four steps of 1.3 x 4 s and 1 s of start are expected: 2 x 21.8 s fit
    assert [spec.image_size[0] for spec in taken] == [16, 16, 64, 64]
    # 26 + 98 s are gone; at 2 GMAC a step is expected to take 1.3 x 2 s, four of them and 1 s of start, for two rows
    assert list(schedule.left_out) == [32] and round(schedule.left_out[32], 6) == 2 * (4 * 1.3 * 2 + 1)


def test_a_schedule_without_a_limit_measures_everything():
    specs, clock = [make_spec(side) for side in (16, 64, 32)], Mock(return_value=0.0)
    schedule = RowSchedule(specs, lambda spec: 1.0, clock=clock)
    assert drive(schedule, clock, lambda spec: 1000.0) == specs and not schedule.left_out


def test_rows_of_an_earlier_call_tell_what_is_left():
    """1 s per step and GMAC from an earlier row: 12 steps of 1.3 s, and 6 s to start a process, unmeasured so far."""
    schedule = RowSchedule([make_spec(32)], lambda spec: 1.0)
    schedule.note(make_spec(16), make_row(1000.0))
    ((_, expected_s),) = list(schedule)
    assert round(expected_s, 6) == 12 * 1.3 + 6
