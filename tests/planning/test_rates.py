"""Where the speed of a training is known from, and how the command line states one."""

from types import SimpleNamespace

import pytest

from repro.core.errors import UserError
from repro.planning.rates import Rates, parse_rates


def make_results(*records):
    """The records of (name, device, images per second, processes)."""
    sources = [
        SimpleNamespace(
            metrics={"model": name, "throughput_img_per_s": rate, **({"processes": processes} if processes else {})},
            device=device,
            path=f"results/measured/{name}.json",
        )
        for name, device, rate, processes in records
    ]
    return SimpleNamespace(sources=sources, model_key=lambda record, where: record["model"])


def test_an_estimate_is_three_forward_passes_of_two_flop_per_multiply_add():
    speed = Rates(tflops=2.0, utilisation=0.5).estimate(10**9)
    assert speed.img_per_s == pytest.approx(1e12 / (3 * 2 * 1e9)) and speed.source == "estimated"
    assert "2 TFLOP/s and 50 % utilisation" in speed.note


def test_given_goes_before_measured_before_estimated():
    measured = [("m", "cuda: NVIDIA L40S", 2000.0, 2), ("m", "cuda: NVIDIA H200", 3000.0, 1)]
    useless = [("m", "cpu: AMD EPYC", 1.0, 1), ("other", "cuda: NVIDIA L40S", 1.0, 1), ("m", "cuda: NVIDIA L40S", 1.0, None)]
    rates = Rates()
    assert rates.find_speed(make_results(*useless), "m", "m", 10**9) == rates.estimate(10**9)
    found = rates.find_speed(make_results(*measured, *useless), "m", "m", 10**9)
    assert (found.img_per_s, found.source) == (1000.0, "measured")  # of one GPU, and the slowest
    assert "NVIDIA L40S" in found.note and "results/measured/m.json" in found.note
    for name in ("m", "m[depth=1]"):
        given = Rates(given={name: 7.0}).find_speed(make_results(*measured), "m", "m[depth=1]", 10**9)
        assert (given.img_per_s, given.source, given.note) == (7.0, "given", "")
    both = Rates(given={"m": 7.0, "m[depth=1]": 8.0})
    assert both.find_speed(make_results(), "m", "m[depth=1]", 10**9).img_per_s == 8.0


def test_rates_are_read_from_text():
    assert parse_rates(["m=5", "m[design=dual]=1e3"]) == {"m": 5.0, "m[design=dual]": 1000.0}


@pytest.mark.parametrize("text", ["m=fast", "m=0", "m=-1", "m=nan", "m=inf", "5", "=5", "m"])
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match="expected MODEL=NUMBER with a number above 0$"):
        parse_rates([text])


@pytest.mark.parametrize("change", [{"tflops": 0.0}, {"tflops": float("nan")}, {"utilisation": 30.0}, {"utilisation": 0.0}])
def test_assumptions_out_of_range_are_refused(change):
    with pytest.raises(UserError, match=f"^plan: --{next(iter(change))} "):
        Rates(**change)
