"""Where the speed of a training is known from, and how the command line states one."""

from types import SimpleNamespace

import pytest

from repro.core.errors import UserError
from repro.planning.planner import Rates, find_measured, parse_rates


def make_results(*records):
    """The records of (name, stage, device, images per second, processes)."""
    sources = [
        SimpleNamespace(
            metrics={"model": name, "throughput_img_per_s": rate, **({"processes": processes} if processes else {})},
            device=device,
            path=f"results/measured/device/{stage}/cell.json",
        )
        for name, stage, device, rate, processes in records
    ]
    return SimpleNamespace(sources=sources, model_key=lambda record, where: record["model"])


def test_an_estimate_is_three_forward_passes_of_two_flop_per_multiply_add():
    speed = Rates(tflops=2.0, utilisation=0.5).estimate(10**9)
    assert speed.img_per_s == pytest.approx(1e12 / (3 * 2 * 1e9)) and speed.source == "estimated"
    assert "2 TFLOP/s and 50 % utilisation" in speed.note


def test_a_measured_speed_is_the_slowest_of_one_gpu():
    l40s = "cuda: NVIDIA L40S"
    useless = [
        ("m", "pretrain", "cpu: AMD EPYC", 1.0, 1),
        ("other", "pretrain", l40s, 1.0, 1),
        ("m", "pretrain", l40s, 1.0, None),
    ]
    useless.append(("m", "detect", l40s, 1.0, 1))
    assert find_measured(make_results(*useless), "m", ("pretrain", "ablate"), "L40S") is None
    measured = [
        ("m", "pretrain", l40s, 2000.0, 2),
        ("m", "ablate", l40s, 3000.0, 1),
        ("m", "ablate", "cuda: NVIDIA H200", 1.0, 1),
    ]
    found = find_measured(make_results(*measured, *useless), "m", ("pretrain", "ablate"), "l40s")
    assert (found.img_per_s, found.source) == (1000.0, "measured")
    assert "NVIDIA L40S" in found.note and "results/measured/device/pretrain/cell.json" in found.note
    assert find_measured(make_results(*useless), "m", ("detect",), "L40S").img_per_s == 1.0


def test_a_given_speed_is_of_a_model_with_or_without_its_options():
    for name in ("m", "m[depth=1]"):
        given = Rates(given={name: 7.0}).find_given("m", "m[depth=1]")
        assert (given.img_per_s, given.source, given.note) == (7.0, "given", "")
    assert Rates(given={"m": 7.0, "m[depth=1]": 8.0}).find_given("m", "m[depth=1]").img_per_s == 8.0
    assert Rates(given={"m[depth=1]": 8.0}).find_given("m", "m") is None


def test_rates_are_read_from_text():
    assert parse_rates(["m=5", "m[design=dual]=1e3"]) == {"m": 5.0, "m[design=dual]": 1000.0}


@pytest.mark.parametrize("text", ["m=fast", "m=0", "m=-1", "m=nan", "m=inf", "5", "=5", "m"])
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match="expected MODEL=NUMBER with a number above 0$"):
        parse_rates([text])


@pytest.mark.parametrize(
    "change", [{"tflops": 0.0}, {"tflops": float("nan")}, {"utilisation": 30.0}, {"utilisation": 0.0}]
)
def test_assumptions_out_of_range_are_refused(change):
    with pytest.raises(UserError, match=f"^plan: --{next(iter(change))} "):
        Rates(**change)
