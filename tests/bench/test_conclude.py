"""Conclusions from rows made by hand: ratios, crossovers and powers known beforehand."""

import json
import math

import pytest

from repro.bench.conclude import compare_at, conclude, crossover, exponent, overlap_percent
from repro.core.host import HOST, UNKNOWN, mark_host

VITTT, DEIT, VIM = "vittt_tiny_patch16_224", "deit_tiny_patch16_224", "vim_tiny_patch16_224"
GATE = {"operator": "selective_scan_bidir", "share_of_copy_percent": 2.0, "at_least_percent": 20, "holds": False}
GATE |= {"family": "vim", "batch_size": 1, "dtype": "fp32"}


def make_row(model, attention, side, latency, memory, *, status="ok", kernel="flash", batch_size=1, run=1):
    row = {"model": model, "attention": attention, "attention_kernel": kernel, "image_size": [side, side]}
    row |= {"batch_size": batch_size, "dtype": "fp32", "mode": "infer", "compile": False, "options": {}}
    row |= {"status": status, "latency_ms": latency, "latency_ms_ci95": None, "peak_memory_mib": memory}
    return row | {"macs_g": side**2 / 1e4, "run": run}


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({1: (2, 3), 2: (2, 3), 3: (2, 3)}, (None, None)),  # three sizes show nothing of the others
        ({1: (2, 3), 2: (2, 3), 3: (2, 3), 4: (1.1, 9)}, ("always", 1)),
        ({1: (0.5, 0.9), 2: (0.1, 0.2), 3: (0.1, 0.9), 4: (0, 0.5)}, ("never", None)),
        # what is wide at the least size is not left out: it could be slower there
        ({1: (0.7, 1.2), 2: (2, 3), 3: (2, 3), 4: (2, 3), 5: (2, 3)}, ("from", 2)),
        ({1: (2, 3), 2: (2, 3), 3: (2, 3), 4: (0.9, 3)}, ("open", None)),
        ({}, (None, None)),
    ],
)
def test_crossover_by_hand(ends, expected):
    assert crossover(ends) == expected


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponent_of_a_power_law(power):
    assert exponent({side: 3 * (side**2) ** power for side in (128, 300, 1280)}) == pytest.approx(power)
    assert exponent({128: 1.0}) is None


def test_overlapping_intervals_by_hand():
    def interval(side, *ends):
        return {**make_row("m", None, side, 1.0, 1.0), "latency_ms_ci95": list(ends) or None}

    first = [interval(1, 1, 2), interval(2, 1, 2), interval(3, 1, 2), interval(4)]
    second = [interval(1, 1.5, 3), interval(2, 2.1, 3), interval(3, 0, 1), interval(5, 0, 9)]
    assert overlap_percent(first, second) == pytest.approx(200 / 3)
    assert overlap_percent(first, []) is None and math.isfinite(overlap_percent(first, first))


def test_conclusions_by_hand():
    """Vittt takes time and memory ~ tokens, DeiT ~ tokens²; at 1280 DeiT ran out of memory, so that 640 is compared."""
    rows = [make_row(VITTT, None, side, (side / 640) ** 2 * 10, (side / 640) ** 2 * 100) for side in (512, 640, 1280)]
    rows += [make_row(DEIT, "unfused", side, (side / 640) ** 4 * 40, (side / 640) ** 4 * 400) for side in (512, 640)]
    rows += [make_row(DEIT, "unfused", 1280, None, None, status="oom")]
    rows += [make_row(VIM, None, 640, 50.0, 100.0), make_row(VITTT, None, 640, 10.0, 100.0, run=2)]
    found = conclude(rows, [GATE])
    unfused, vim = found["compared"]
    assert (unfused["against"], unfused["size"], unfused["image_size"]) == ("deit", "T", 640)
    assert unfused["speedup"] == pytest.approx(4) and unfused["memory_saved_percent"] == pytest.approx(75)
    assert unfused["crossover"] is None and unfused["faster_at"] == [512, 640]  # of two sizes alone
    assert vim["speedup"] is None
    assert vim["reason"].startswith("selective_scan_bidir reaches 2 % of the bandwidth of a copy, 20 % are")
    growth = {each["model"]: each for each in found["growth"]}
    assert growth[VITTT]["image_sizes"] == [512, 640, 1280] and growth[DEIT]["image_sizes"] == [512, 640]
    assert [growth[VITTT][f"{what}_exponent"] for what in ("latency", "memory")] == pytest.approx([1, 1])
    assert growth[DEIT]["latency_exponent"] == pytest.approx(2) and growth[DEIT]["macs_exponent"] == pytest.approx(1)
    assert growth[VITTT]["latency_1280_over_640"] == pytest.approx(4) and growth[DEIT]["latency_1280_over_640"] is None
    assert growth[VIM]["latency_exponent"] is None and growth[VIM]["reason"]
    repeated = found["repeated"]
    assert repeated["rows"] == 1 and repeated["overlap_percent"] is None and repeated["reason"]


@pytest.mark.parametrize("other", [{"batch_size": 2}, {"dtype": "bf16"}, {"family": "vrwkv"}, {"holds": False}, {}])
def test_a_ratio_needs_a_gate_that_holds_at_the_same_batch_size_and_dtype(other):
    rows = [make_row(VITTT, None, 224, 1.0, 1.0), make_row(VIM, None, 224, 2.0, 1.0)]
    (vim,) = conclude(rows, [{**GATE, "holds": True, **other}])["compared"]
    assert vim["speedup"] == (None if other else 2.0) and bool(vim.get("reason")) == bool(other)


def test_other_batches_are_never_mixed_and_an_unfused_fusion_is_refused():
    rows = [make_row(VITTT, None, 224, 1.0, 1.0), make_row(DEIT, "fused", 224, 2.0, 1.0, batch_size=2)]
    rows += [make_row(DEIT, "unfused", 224, 3.0, 1.0)]
    assert [each["against"] for each in conclude(rows, [])["compared"]] == ["deit"]
    rows = [make_row(VITTT, None, 224, 1.0, 1.0), make_row(DEIT, "fused", 224, 2.0, 1.0, kernel="none")]
    (refused,) = conclude(rows, [])["compared"]
    assert refused["speedup"] is None and "no fused attention kernel" in refused["reason"]


def noisy(row):
    """The same row with an interval that is half as wide as its median is long."""
    return {**row, "latency_ms_ci95": [0.75 * row["latency_ms"], 1.25 * row["latency_ms"]]}


def test_a_comparison_is_of_one_image_size():
    """What has no number says why; a noisy row gives no time, and its memory all the same."""
    rows = [make_row("v", None, *sizes) for sizes in ((224, 1.0, 1.0), (1280, 2.0, 30.0))]
    rows += [make_row("d", "fused", 1280, 3.0, None), make_row("d", "unfused", 1280, None, None, status="oom")]
    rows += [make_row("w", None, 1280, 2.0, 30.0), make_row("e", "fused", 1280, 3.0, 40.0)]
    rows += [noisy(make_row("e", "unfused", 1280, 3.0, 60.0))]
    unfused = {"vs_deit_unfused": None, "vs_deit_unfused_reason": "at 1280: v ok, d oom"}
    fused = {"vs_deit_fused": None, "vs_deit_fused_reason": "at 1280: v ok, d without peak_memory_mib"}
    disturbed = {"vs_deit_unfused": None, "vs_deit_unfused_reason": "at 1280: w ok, e noisy: spread"}
    assert compare_at(1280, {"T": ("v", "d"), "S": ("w", "e")}, rows) == {
        "speedup_at_1280": {"T": unfused | {"vs_deit_fused": 1.5}, "S": disturbed | {"vs_deit_fused": 1.5}},
        "memory_saved_at_1280_percent": {"T": unfused | fused, "S": {"vs_deit_unfused": 50.0, "vs_deit_fused": 25.0}},
    }
    found = compare_at(224, {"T": ("v", "d")}, rows)["speedup_at_224"]["T"]
    assert found["vs_deit_fused_reason"] == "at 224: v ok, d not in params"


def test_a_noisy_row_widens_a_ratio_and_is_not_left_out():
    """Vittt takes time ~ tokens and DeiT ~ tokens², equal at 320; what is off by far is wide, and so decides nothing."""
    sides = (160, 512, 640, 1024, 1280)
    ours = {side: make_row(VITTT, None, side, (side / 320) ** 2, 1.0) for side in sides}
    theirs = {side: make_row(DEIT, "unfused", side, (side / 320) ** 4, 2.0) for side in sides}
    theirs[1280] = noisy(theirs[1280])
    (compared,) = conclude([*ours.values(), *theirs.values()], [])["compared"]
    assert compared["image_size"] == 1280 and compared["memory_saved_percent"] == 50.0
    assert compared["speedup"] == pytest.approx(16) and compared["speedup_ends"] == pytest.approx([12, 20])
    assert (compared["crossover"], compared["crossover_image_size"]) == ("from", 512)
    assert (compared["slower_at"], compared["faster_at"]) == ([160], [512, 640, 1024, 1280])
    growth = {each["model"]: each for each in conclude([*ours.values(), *theirs.values()], [])["growth"]}
    assert growth[DEIT]["left_out_image_sizes"] == [1280] and growth[DEIT]["latency_exponent"] == pytest.approx(2)
    assert growth[DEIT]["latency_1280_over_640"] is None and growth[DEIT]["reason"]
    # slower by a quarter at the median, and by its interval perhaps faster: open, and no "from 640²" without it
    theirs[1280] = noisy(make_row(DEIT, "unfused", 1280, 0.8 * ours[1280]["latency_ms"], 2.0))
    (compared,) = conclude([*ours.values(), *theirs.values()], [])["compared"]
    assert compared["crossover"] == "open" and compared["faster_at"] == [512, 640] and 1280 in compared["open_at"]
    # the load of the machine can only slow a step, so that theirs is known from above alone
    busy = {"device": "cpu", "load_average": 9.0, "cores": 2, "threads": 1}
    (compared,) = conclude([ours[512], {**make_row(DEIT, "unfused", 512, 99.0, 2.0), **busy}], [])["compared"]
    assert compared["open_at"] == [512] and compared["speedup"] == pytest.approx(99 / 2.56)


def test_a_time_that_does_not_grow_with_the_work_is_the_hosts():
    """Of a batch of 64 at 1280², one time is 3.4 times as long as at 224²; the other rows have a partner."""
    gpu = {"device": "cuda: a GPU"}
    times = {(1, 224): (11.2, 3.0), (1, 1280): (12.2, 3.4), (64, 224): (11.4, 2.8), (64, 1280): (39.2, 96.0)}
    rows = []
    for (batch, side), (ours, theirs) in times.items():
        rows.append({**make_row(VITTT, None, side, ours, 3.0, batch_size=batch), **gpu})
        rows.append({**make_row(DEIT, "fused", side, theirs, 2.0, batch_size=batch), **gpu})
    hosts = {(row["model"], row["batch_size"], *row["image_size"][:1]): row["host"] for row in mark_host(rows)}
    assert {key[1:] for key, host in hosts.items() if host == HOST} == {(1, 224), (1, 1280), (64, 224)}
    assert hosts[VITTT, 64, 1280] == hosts[DEIT, 64, 1280] == UNKNOWN
    one, many = conclude(rows, [])["compared"]
    assert one["speedup"] is None and HOST in one["speedup_reason"] and one["memory_saved_percent"] == -50.0
    assert many["speedup"] == pytest.approx(96 / 39.2)
    assert not any(each[key] for each in (one, many) for key in ("crossover", "faster_at", "slower_at", "open_at"))
    json.dumps([one, many], allow_nan=False)  # a record has no infinite number
    # a CPU has no host, and neither has what runs through CUDA graphs; a pair that differs less shows nothing
    for changes in ({"device": "cpu: b"}, {"compile": "graphs"}):
        assert not any(row["host"] for row in mark_host({**row, **changes} for row in rows))
    near = [{**row, "image_size": [224, 224], "batch_size": batch} for row, batch in zip(rows[:2], (1, 7), strict=True)]
    assert {row["host"] for row in mark_host([{**row, "model": VITTT, "attention": None} for row in near])} == {UNKNOWN}
