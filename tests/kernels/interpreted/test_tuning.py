"""What a kernel computes while Triton tunes it: all candidates run on the same memory, and then the one that is chosen."""

import collections
import dataclasses
import importlib
import itertools
import pkgutil

import pytest
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction

import kernels
from kernels import triton_launch
from kernels.around import triton_bwd as around_bwd
from kernels.around import triton_fwd as around_fwd
from kernels.bi_wkv import triton_fwd as wkv_fwd
from kernels.tools import check
from kernels.tools.operators import OPERATORS
from kernels.ttt_linear import triton_bwd as ttt_bwd
from kernels.ttt_linear import triton_phases
from tests.slow import slow

# at which an operator's candidates have grids of other sizes, if their grids depend on them; of as few programs as that
# takes
AROUND = {"batch": 1, "tokens": 130, "height": 10}
SIZES = {
    "ttt_linear": {"batch": 1, "heads": 1, "reverse": (True,), "tokens": 6, "chunk_size": 4, "head_dim": 16},
    "selective_scan": {"batch": 1, "tokens": 2},
    "bi_wkv": {"batch": 1, "tokens": 17, "channels": 35},
    "ms_deform_attn": {"batch": 1, "tokens": 2, "heads": 2, "head_dim": 32, "levels": 3, "points": 1},
    **dict.fromkeys(("conv_norm", "scan_convs", "gated_norm", "gated_linear"), AROUND),
}
# what else is run: both passes in two launches, as where programs are few; and programs with as many tokens as on a GPU
TWO, LONG = {"tokens": 17, "chunk_size": 16}, {"tokens": 2304, "height": 48}
USUAL = ("ttt_linear", "conv_norm")
CASES = [(name, {}) if name in USUAL else slow(name, {}) for name in OPERATORS] + [("ttt_linear", TWO)]
CASES += [slow(name, LONG) for name in ("conv_norm", "scan_convs", "gated_norm")]
# of one config, which no tuner runs
UNTUNED = {
    "bi_wkv.triton_fwd.ends_kernel",
    *(f"selective_scan.triton_{name}_kernel" for name in ("fwd.forward", "fwd.starts", "bwd.backward")),
}


def name_of(kernel):
    """Its module's name within the package, and its own."""
    return f"{kernel.fn.__module__}.{kernel.__name__}".removeprefix("kernels.")


def find_kernels():
    """The names of all kernels that the package has."""
    modules = [module.name for module in pkgutil.walk_packages(kernels.__path__, "kernels.") if "triton" in module.name]
    values = [each for name in modules for each in vars(importlib.import_module(name)).values()]
    found = {name_of(each) for each in values if isinstance(each, InterpretedFunction)}
    return {name for name in found if name.endswith("_kernel")}


def run(name, other):
    """The output and the gradients by name; those of the norm, which is no operator, with `gated_norm`'s."""
    cases, dtype = OPERATORS[name], torch.float16 if other is TWO else torch.float32
    sizes = dataclasses.replace(cases.SMALL, **SIZES[name] | other)
    found = check.run_kernels(cases, cases.draw(0, sizes), dtype, sizes)
    if name == "gated_norm":
        x = torch.linspace(-1, 1, 300 * 16).sin().view(1, 300, 16)
        found["norm"] = around_fwd.norm(x, x[0, 0], x[0, 1], 1e-6, x.dtype)
    return found


class Forgetful(dict):
    """Takes the place of what is compiled: the interpreter compiles nothing."""

    def __setitem__(self, key, value):
        pass


@pytest.fixture
def tuned_kernels(monkeypatch):
    """A function of an operator and a winner's number that tunes it, by Triton's own tuner, in which only the clock is
    ours; the kernels that were tuned, and the results of a run without tuning, of the tuning run and of the next one.
    """

    def tune(name, winner, other):
        runs = collections.defaultdict(itertools.count)

        def bench(tuner):
            def measure(call, quantiles):
                call()
                count = len(tuner.configs)
                return [float(next(runs[tuner]) % count != winner % count)] * len(quantiles)

            return measure

        triton_launch.tuned.cache_clear()
        monkeypatch.setattr(wkv_fwd, "SEGMENT", 8)
        monkeypatch.setattr(around_bwd, "LOOP", around_bwd.LOOP if other is LONG else 1)
        monkeypatch.setattr(triton_phases, "takes_two_phases", lambda *_: other is TWO)
        monkeypatch.setattr(ttt_bwd, "takes_two_passes", lambda *_: other is TWO)
        untuned = run(name, other)
        monkeypatch.setattr(triton_launch, "CHOSEN", {})
        monkeypatch.setattr(triton_launch, "READY", Forgetful())
        monkeypatch.setattr(triton_launch, "INTERPRETED", False)
        monkeypatch.setattr(triton_launch, "KEEP_CHOICES", False)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        monkeypatch.setattr(Autotuner, "do_bench", property(bench))
        first, second = run(name, other), run(name, other)
        return {name_of(key[0]) for key in triton_launch.CHOSEN}, untuned, first, second

    yield tune
    triton_launch.tuned.cache_clear()


@pytest.mark.parametrize(("name", "other"), CASES)
@pytest.mark.parametrize("winner", [-1, *map(slow, range(3))])
def test_what_is_tuned_gives_the_bits_of_the_next_run(tuned_kernels, name, other, winner):
    """Whatever ran on the same memory before: partial sums of more programs, sums, what is read and written. They are
    those of the first config but for rounding.
    """
    _, untuned, first, second = tuned_kernels(name, winner, other)
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert max(check.relative_errors(first, untuned, 1.0).values()) < (5e-3 if other is TWO else 1e-5)


def test_every_tuned_kernel_is_among_them(tuned_kernels, monkeypatch):
    """A new one is run by its operator above, or is of one config."""
    monkeypatch.setattr(Autotuner, "run", lambda tuner, *_, **__: setattr(tuner, "best_config", tuner.configs[0]))
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda **_: None)
    every = [(name, {}) for name in OPERATORS] + [("ttt_linear", TWO)]
    tuned = set().union(*(tuned_kernels(name, 0, other)[0] for name, other in every))
    assert tuned == find_kernels() - UNTUNED
