"""Planning a sweep and reading it, against counts and slopes known by hand."""

import itertools
import math

import pytest

from repro.measure.speed import RowSpec
from repro.measure.sweep import (
    FAMILIES,
    GRID,
    Plan,
    crossover,
    exponent,
    importance,
    overlap_percent,
    parse_names,
    parse_resolutions,
    specs_of,
)


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("224..1280", GRID),
        ("384..800", (384, 512, 640, 768)),
        ("224..1280:128", (224, 352, 480, 608, 736, 864, 992, 1120, 1248)),
        ("512, 224", (224, 512)),
        ("32,64..96:16,224", (32, 64, 80, 96, 224)),
    ],
)
def test_resolutions(text, sides):
    assert parse_resolutions(text) == sides


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1280..224", "1280..224: begins above its end; write 224..1280"),
        ("225", "225: not a positive multiple of the patch, 16 pixels; the nearest is 224"),
        ("0", "0: not a positive multiple of the patch, 16 pixels; the nearest is 16"),
        ("230..300", "230..300: holds none of 224, "),
        ("224..300:0", "a step of 0 leads nowhere"),
        ("big", "'big': no resolution; write 224, "),
        ("224,", "'': no resolution"),
    ],
)
def test_what_is_no_resolution(text, message):
    with pytest.raises(ValueError) as error:
        parse_resolutions(text)
    assert message in str(error.value)


def test_names_keep_our_order_and_unknown_ones_are_guessed_at():
    assert parse_names("vim,vittt", FAMILIES, "family") == ("vittt", "vim")
    with pytest.raises(ValueError, match="'vitt': no such family; did you mean 'vittt'"):
        parse_names("vitt", FAMILIES, "family")
    with pytest.raises(ValueError, match="'XL': no such size; there are T, S, B"):
        parse_names("XL", ("T", "S", "B"), "size")


def test_importance_is_a_permutation_that_begins_with_the_ends_and_the_half():
    assert importance(GRID)[:3] == [224, 1280, 640]
    for sides in (GRID, (64,), (64, 128), (32, 64, 80, 96, 224)):
        assert sorted(importance(sides)) == sorted(sides)
    # every prefix of three or more leaves no gap untouched while a wider one is split
    order = importance(GRID)
    for n in range(3, len(order)):
        gaps = [(high / low, low, high) for low, high in itertools.pairwise(sorted(order[:n])) if any(low < s < high for s in order[n:])]
        assert any(low < order[n] < high for _, low, high in gaps)


def spec_of(side, model="m", budget_s=600.0):
    return RowSpec(model=model, resolution=(side, side), budget_s=budget_s)


def row_of(latency_ms, steps=10):
    return {"status": "ok", "latency_ms": latency_ms, "samples_ms": [latency_ms] * steps}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def drive(plan, clock, seconds):
    """Measure what the plan asks for; each row takes `seconds(spec)`, of which all but 1 s are 12 steps."""
    taken = []
    for spec, _ in plan:
        taken.append(spec)
        clock.now += seconds(spec)
        plan.note(spec, row_of((seconds(spec) - 1) / 12 * 1e3), seconds(spec))
    return taken


def test_a_plan_leaves_out_whole_resolutions_that_do_not_fit():
    """Steps of 1 s at 1 GMAC, 4 s at 4, 2 s at 2: with start-up 13, 49 and 25 s a row; two models at each."""
    gmacs, clock = {16: 1.0, 64: 4.0, 32: 2.0}, Clock()
    specs = [spec_of(side, model) for side in (16, 64, 32) for model in "ab"]
    plan = Plan(specs, lambda spec: gmacs[spec.resolution[0]], 100, clock)
    taken = drive(plan, clock, lambda spec: 1 + 12 * gmacs[spec.resolution[0]])
    # after 26 s there are 74 left; at 4 GMAC a step is expected to take 1.3 x 4 s, four of them and 1 s of start: 2 x 21.8 s fit
    assert [spec.resolution[0] for spec in taken] == [16, 16, 64, 64]
    # 26 + 98 s are gone
    assert {spec.resolution[0] for spec, _ in plan.left_out} == {32}


def test_a_plan_without_a_limit_measures_everything():
    specs, clock = [spec_of(side) for side in (16, 64, 32)], Clock()
    plan = Plan(specs, lambda spec: 1.0, None, clock)
    assert drive(plan, clock, lambda spec: 1000.0) == specs and not plan.left_out


def test_a_plan_takes_the_first_resolution_whatever_it_takes():
    specs, clock = [spec_of(16), spec_of(32)], Clock()
    plan = Plan(specs, lambda spec: 1.0, 5, clock)
    assert drive(plan, clock, lambda spec: 60.0) == specs[:1]


def test_specs_cover_families_sizes_and_resolutions_once():
    specs = specs_of(("vittt", "deit", "deit_fused"), ("T", "S"), (224, 512), batch=2)
    assert len({(spec.row_id, spec.attention) for spec in specs}) == len(specs) == 12
    assert {spec.model for spec in specs} == {f"{f}_{s}_patch16_224" for f in ("vittt", "deit") for s in ("tiny", "small")}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({224: 2.0, 512: 2.0}, {224: 3.0, 512: 3.0}, ("always", None)),
        ({224: 2.0, 512: 2.0}, {224: 1.0, 512: 2.0}, ("never", None)),
        ({100: 2.0, 400: 8.0}, {100: 1.0, 400: 16.0}, ("from", 200.0)),  # log ratios -log 2 and log 2: the geometric middle
        ({100: 1.0, 400: 16.0}, {100: 2.0, 400: 8.0}, ("until", 200.0)),
        ({1: 1.0, 2: 1.0, 3: 1.0}, {1: 2.0, 2: 0.5, 3: 2.0}, ("several", None)),
        ({}, {224: 1.0}, ("never", None)),
    ],
)
def test_crossover_by_hand(ours, theirs, expected):
    relation, side = crossover(ours, theirs)
    assert relation == expected[0] and (side == expected[1] or side == pytest.approx(expected[1]))


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponent_of_a_power_law(power):
    assert exponent({side: 3 * (side**2) ** power for side in (128, 300, 1280)}) == pytest.approx(power)
    assert exponent({128: 1.0}) is None


def test_overlapping_intervals_by_hand():
    def row(side, low, high):
        about = {"model": "m", "attention": None, "batch": 1, "dtype": "fp32", "mode": "infer", "compile": False, "options": {}}
        return {**about, "resolution": [side, side], "latency_ms_ci95": [low, high]}

    first = [row(1, 1, 2), row(2, 1, 2), row(3, 1, 2), {**row(4, 0, 0), "latency_ms_ci95": None}]
    second = [row(1, 1.5, 3), row(2, 2.1, 3), row(3, 0, 1), row(5, 0, 9)]
    assert overlap_percent(first, second) == pytest.approx(200 / 3)
    assert overlap_percent(first, []) is None and math.isfinite(overlap_percent(first, first))
