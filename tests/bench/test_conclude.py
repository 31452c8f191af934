"""Conclusions from rows made by hand: ratios, crossovers and powers known beforehand."""

import json

import pytest

from repro.bench.conclude import conclude, crossover, exponent
from repro.bench.pooling import HOST, ONE_PROCESS

VITTT, DEIT, VIM = "vittt_tiny_patch16_224", "deit_tiny_patch16_224", "vim_tiny_patch16_224"


def make_row(model, attention, side, latency, memory, *, status="ok", kernel="flash", batch_size=1, run=1, **more):
    row = {"model": model, "attention": attention, "attention_kernel": kernel, "image_size": [side, side]}
    row |= {"batch_size": batch_size, "dtype": "fp32", "mode": "infer", "compile": False, "options": {}}
    row |= {"status": status, "latency_ms": latency, "peak_memory_mib": memory, "device": "cpu: x"}
    return row | {"macs_g": side**2 / 1e4, "run": run} | more


def make_pair(model, attention, side, latency, memory, spread=0.1):
    """Two processes, whose latencies lie by this share of their median below and above it."""
    return [
        make_row(model, attention, side, latency * (1 + sign * spread), memory, run=run)
        for run, sign in ((1, -1), (2, 1))
    ]


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


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_exponent_of_a_power_law(power):
    assert exponent({side: 3 * (side**2) ** power for side in (128, 300, 1280)}) == pytest.approx(power)
    assert exponent({128: 1.0}) is None


def test_conclusions_by_hand():
    """Vittt takes time and memory ~ tokens, DeiT ~ tokens²; at 1280 DeiT ran out of memory, so that 640 is compared."""
    rows = [make_row(VITTT, None, side, (side / 640) ** 2 * 10, (side / 640) ** 2 * 100) for side in (512, 640, 1280)]
    rows += [make_row(DEIT, "unfused", side, (side / 640) ** 4 * 40, (side / 640) ** 4 * 400) for side in (512, 640)]
    rows += [make_row(DEIT, "unfused", 1280, None, None, status="oom")]
    rows += [make_row(VIM, None, 640, 50.0, 100.0, op_share_of_copy_percent=2.0)]
    found = conclude(rows)
    unfused, vim = found["compared"]
    assert (unfused["against"], unfused["size"], unfused["image_size"]) == ("deit", "T", 640)
    assert unfused["speedup"] == pytest.approx(4) and unfused["memory_saved_percent"] == pytest.approx(75)
    assert (unfused["speedup_ends"], unfused["speedup_ends_reason"]) == (None, ONE_PROCESS)
    assert unfused["crossover"] is None and unfused["faster_at"] == []  # nothing is known of other processes
    assert vim["speedup"] is None and "2 % of the bandwidth of a copy" in vim["reason"]
    growth = {each["model"]: each for each in found["growth"]}
    assert growth[VITTT]["image_sizes"] == [512, 640, 1280] and growth[DEIT]["image_sizes"] == [512, 640]
    assert [growth[VITTT][f"{what}_exponent"] for what in ("latency", "memory")] == pytest.approx([1, 1])
    assert growth[DEIT]["latency_exponent"] == pytest.approx(2) and growth[DEIT]["macs_exponent"] == pytest.approx(1)
    assert growth[VITTT]["latency_1280_over_640"] == pytest.approx(4) and growth[DEIT]["latency_1280_over_640"] is None
    assert growth[VIM]["latency_exponent"] is None and growth[VIM]["reason"]


@pytest.mark.parametrize(("share", "speedup"), [(19.0, None), (None, None), (21.0, 2.0)])
def test_a_ratio_needs_an_operator_that_is_known_to_be_fast(share, speedup):
    rows = [make_row(VITTT, None, 224, 1.0, 1.0), make_row(VIM, None, 224, 2.0, 1.0, op_share_of_copy_percent=share)]
    (vim,) = conclude(rows)["compared"]
    assert vim["speedup"] == speedup and bool(vim.get("reason")) == (speedup is None)


def test_other_batches_are_never_mixed_and_an_unfused_fusion_is_refused():
    rows = [make_row(VITTT, None, 224, 1.0, 1.0), make_row(DEIT, "fused", 224, 2.0, 1.0, batch_size=2)]
    rows += [make_row(DEIT, "unfused", 224, 3.0, 1.0)]
    assert [each["against"] for each in conclude(rows)["compared"]] == ["deit"]
    rows = [make_row(VITTT, None, 224, 1.0, 1.0), make_row(DEIT, "fused", 224, 2.0, 1.0, kernel="none")]
    (refused,) = conclude(rows)["compared"]
    assert refused["speedup"] is None and "no fused attention kernel" in refused["reason"]


def test_a_wide_range_decides_nothing():
    """Vittt takes time ~ tokens and DeiT ~ tokens², equal at 320."""
    sides = (160, 512, 640, 1024, 1280)
    ours = {side: make_pair(VITTT, None, side, (side / 320) ** 2, 1.0, 0.0) for side in sides}
    theirs = {side: make_pair(DEIT, "unfused", side, (side / 320) ** 4, 2.0, 0.0) for side in sides}

    def compare():
        rows = [row for pairs in (ours, theirs) for pair in pairs.values() for row in pair]
        (compared,) = conclude(rows)["compared"]
        return compared

    theirs[1280] = make_pair(DEIT, "unfused", 1280, 256.0, 2.0, 0.25)
    theirs[1280] = [row | {"macs_g": 3.4 * row["macs_g"]} for row in theirs[1280]]
    compared = compare()
    assert compared["macs_times"] == pytest.approx(3.4)
    assert compared["image_size"] == 1280 and compared["memory_saved_percent"] == 50.0
    assert compared["speedup"] == pytest.approx(16) and compared["speedup_ends"] == pytest.approx([12, 20])
    assert (compared["crossover"], compared["crossover_image_size"]) == ("from", 512)
    assert (compared["slower_at"], compared["faster_at"]) == ([160], [512, 640, 1024, 1280])
    # slower by a fifth at the median, and by its range perhaps faster: open, and no "from 512²" without it
    theirs[1280] = make_pair(DEIT, "unfused", 1280, 0.8 * 16, 2.0, 0.5)
    compared = compare()
    assert (
        compared["crossover"] == "open" and compared["faster_at"] == [512, 640, 1024] and compared["open_at"] == [1280]
    )
    theirs[1280] = theirs[1280][:1]
    compared = compare()
    assert (compared["crossover"], compared["crossover_reason"]) == (None, ONE_PROCESS)


def test_a_time_that_is_the_hosts_gives_no_ratio_and_its_memory_all_the_same():
    """Of a batch of 64 at 1280², one time is 3.4 times as long as at 224²; the other rows have a partner."""
    gpu = {"device": "cuda: a GPU"}
    times = {(1, 224): (11.2, 3.0), (1, 1280): (12.2, 3.4), (64, 224): (11.4, 2.8), (64, 1280): (39.2, 96.0)}
    rows = []
    for (batch, side), (ours, theirs) in times.items():
        rows.append(make_row(VITTT, None, side, ours, 3.0, batch_size=batch, **gpu))
        rows.append(make_row(DEIT, "fused", side, theirs, 2.0, batch_size=batch, **gpu))
    one, many = conclude(rows)["compared"]
    assert one["speedup"] is None and HOST in one["speedup_reason"] and one["memory_saved_percent"] == -50.0
    assert many["speedup"] == pytest.approx(96 / 39.2)
    assert not any(each[key] for each in (one, many) for key in ("crossover", "faster_at", "slower_at", "open_at"))
    json.dumps([one, many], allow_nan=False)
