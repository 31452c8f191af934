"""Rows of speed in real processes, with real shortages of memory and time; steps by our own clock; peak memory."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver

import pytest
import torch

import repro
from repro.bench import speed
from repro.bench.build import build_eval_model
from repro.bench.memory import measure_peak_mib
from repro.bench.pooling import median_interval
from repro.bench.speed import RowSpec, measure
from repro.core import runtime
from tests.slow import slow

NANO = "vittt_nano_patch16_144"
MIB = 2**18  # fp32 numbers
NOISE = "import os, repro.bench.speed as s; run = s._run; s._run = lambda spec: (print('noise'), os.write(1, b'noise'), run(spec))[2]"


class Carrier(str):
    """The name of the model, which runs code where it arrives: in the measuring process, before the row."""

    code = "pass"

    def __reduce__(self):
        return eval, (f"(exec({self.code!r}, {{}}), {str(self)!r})[1]",)


def make_spec(code="pass", **changes):
    """A small row whose limit of time is far beyond what any machine needs; its process runs the code first."""
    model = Carrier(NANO)
    model.code = code
    return RowSpec(**{"model": model, "image_size": (144, 144), "budget_s": 600.0, "threads": 1, **changes})


@pytest.mark.parametrize(
    "n, lowest, highest",
    [
        *((n, None, None) for n in (1, 3, 5)),  # too few samples have no interval
        (6, 1, 6),  # P(all six on one side) = 2/64 = 3.1 %
        (9, 2, 8),  # 2·(1 + 9)/512 = 3.9 %, a third would make it 18 %
        (10, 2, 9),  # 2·(1 + 10)/1024 = 2.1 %
        (20, 6, 15),  # the usual table of the sign test
    ],
)
def test_median_interval_by_hand(n, lowest, highest):
    samples = [float((7 * i) % n) if n % 7 else float(i) for i in range(n)]  # 0 ... n-1, shuffled
    assert sorted(samples) == list(range(n))
    assert median_interval(samples) == (None if lowest is None else (lowest - 1, highest - 1))


@pytest.mark.parametrize("is_spawned", [False, slow(True)])
def test_a_row_in_a_fresh_process_whatever_is_printed(is_spawned, monkeypatch, capfd):
    if is_spawned:  # as on a GPU and outside Linux
        monkeypatch.setattr(speed, "_open_context", lambda device: multiprocessing.get_context("spawn"))
    how = {"batch_size": 3, "dtype": "bf16", "backend": "torch"}
    row = measure(make_spec(NOISE, options={"design": "dual"}, image_size=(64, 96), **how))
    samples = sorted(row["samples_ms"])
    # 10 steps, or 3 on a machine so slow that a step takes over 2 s: the median is the 5th and the 6th, or the 2nd
    assert row["status"] == "ok" and row["steps"] == len(samples) and len(samples) in (3, 10)
    middle = samples[4:6] if len(samples) == 10 else samples[1:2]
    assert row["latency_ms"] == pytest.approx(sum(middle) / len(middle), abs=1e-3)
    if len(samples) == 10:
        assert row["latency_ms_ci95"] == pytest.approx([samples[1], samples[8]], abs=1e-3)
    assert row["throughput_img_per_s"] == pytest.approx(3 * 1000 / row["latency_ms"])
    assert row["peak_memory_mib"] > 0
    assert (row["model"], row["options"], row["image_size"]) == (NANO, {"design": "dual"}, [64, 96])
    assert {**how, "device": "cpu", "mode": "infer"}.items() <= row.items()
    assert row["num_params"] > 0 and row["macs_g"] > 0 and row["attention"] is None
    assert json.loads(json.dumps(row, allow_nan=False)) == row and "noise" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("code", "changes", "status", "reason"),
    [
        # 6e14 bytes of input: more than the address space of a 64-bit process
        ("pass", {"image_size": (224, 224), "batch_size": 10**9}, "oom", "memory"),
        ("import os; os.kill(os.getpid(), 9)", {}, "oom", "killed"),  # as the kernel does where memory runs out
        ("import time; time.sleep(3600)", {"budget_s": 0.2}, "timeout", "0.2 s"),
    ],
)
def test_what_does_not_fit_or_is_killed_or_over_its_budget_is_a_row(code, changes, status, reason):
    row = measure(make_spec(code, **changes))
    assert row["status"] == status and reason in row["reason"]
    assert row["macs_g"] > 0 and row["samples_ms"] == [] and row["latency_ms"] is row["peak_memory_mib"] is None


def test_an_interrupt_ends_the_measuring_process(monkeypatch):
    processes, wait = [], speed.connection.wait

    def interrupt(ends, timeout=None):
        if timeout != 600.0:  # which is that of the row
            return wait(ends, timeout)
        processes.extend(multiprocessing.active_children())
        raise KeyboardInterrupt

    monkeypatch.setattr(speed.connection, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(make_spec("import time; time.sleep(3600)"))
    assert [process.exitcode for process in processes] == [-signal.SIGKILL]


def test_the_measuring_process_ends_with_the_one_that_waits_for_it():
    """Its parent is killed while the row is under way; the pipe that both hold is closed when both are gone."""
    code = "import os, time, repro.bench.speed as s; os.dup(1); s._run = lambda _: (os.kill(os.getppid(), 9), time.sleep(99))"
    script = f"""
import multiprocessing
from repro.bench import speed
class Carrier(str):
    def __reduce__(self):
        return eval, ({f"(exec({code!r}, {{}}), 'none')[1]"!r},)
speed._open_context = lambda device: multiprocessing.get_context("spawn")
speed.measure(speed.RowSpec(model=Carrier(), image_size=(32, 32)))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("code", "changes", "name", "message"),
    [
        ("pass", {"options": {"chunks": 3}}, r"\[chunks=3\]@144", "no option chunks"),
        ("import os; os.abort()", {"image_size": (64, 32)}, "@64x32", "signal 6"),
        ("import os; os._exit(3)", {}, "@144", "exit code 3: no message"),
        (
            "import os, repro.bench.speed as s; s._run = lambda spec: (os.write(2, b'one\\n two \\n'), os.abort())",
            {},
            "@144",
            "signal 6: two",
        ),
    ],
)
def test_any_other_end_is_one_line_that_names_the_row(code, changes, name, message):
    with pytest.raises(RuntimeError, match=rf"^{NANO}{name}: .*{message}"):
        measure(make_spec(code, **changes))


@pytest.mark.skipif(sys.platform != "linux", reason="rows are forked on Linux alone")
def test_a_process_to_fork_from_that_breaks_is_a_line_too(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os, sys\n'forkserver' in str(sys.orig_argv) and os._exit(3)")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        forkserver._forkserver._stop()
        with pytest.raises(RuntimeError, match=rf"^{NANO}@144: .*start"):
            measure(make_spec())


@pytest.mark.skipif(sys.platform != "linux", reason="rows are forked on Linux alone")
@pytest.mark.slow
def test_rows_on_a_cpu_are_forked_from_one_process_which_has_imported_this_code(tmp_path, monkeypatch):
    """Where it starts there is another `repro`; each row says who it is and what it found."""
    (tmp_path / "repro").mkdir()
    (tmp_path / "repro" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ABOUT", "a row")
    forkserver._forkserver._stop()
    found = "(os.getpid(), os.getppid(), os.getcwd(), os.environ['ABOUT'], 'timm' in sys.modules, repro.__file__)"
    code = f"import json, os, sys, repro; print(json.dumps({found}), file=open('log', 'a'))"
    for _ in range(2):
        assert measure(make_spec(code, image_size=(32, 32)))["status"] == "ok"
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    processes, parents, *others = zip(*lines, strict=True)
    assert len(set(processes)) == 2 and len(set(parents)) == 1 and os.getpid() not in parents
    assert [set(each) for each in others] == [{str(tmp_path)}, {"a row"}, {True}, {repro.__file__}]


@pytest.mark.parametrize(
    ("step_ms", "first_ms", "compiles", "warmup", "timed"),
    [
        (300.0, 300.0, False, 4, 10),  # a second of warm-up: 4 steps of 300 ms
        (1.0, 1.0, False, 1000, 10),
        (2500.0, 2500.0, False, 1, 3),  # one slow step warms up by itself, and three are timed
        (300.0, 9000.0, True, 2, 10),  # the first step compiles: it is not slow, and takes the whole second
        (2500.0, 9000.0, True, 2, 3),
    ],
)
def test_how_many_steps_are_run(monkeypatch, step_ms, first_ms, compiles, warmup, timed):
    """By a timer of our own: `warmup` steps, one for the peak, one with memory that is kept, and `timed` ones."""
    elapsed, steps, before = itertools.chain([first_ms], itertools.repeat(step_ms)), [], []
    monkeypatch.setitem(speed.STEP_TIMERS, "cpu", lambda step: (step(), next(elapsed))[1])
    monkeypatch.setattr(speed, "_reset_peak_rss", lambda: before.append(len(steps)) or "rss_peak")
    monkeypatch.setattr(runtime, "keep_freed_memory", lambda: before.append(len(steps)))
    samples, _, method = speed._sample(lambda: steps.append(0), torch.device("cpu"), make_spec(compile=compiles), 0)
    assert (before, len(steps)) == ([warmup, warmup + 1], warmup + 2 + timed)
    assert samples == [step_ms] * timed and method == "rss_peak"


def test_a_step_of_cuda_graphs_has_no_peak_of_memory(monkeypatch):
    """The allocator, of which a capture is no part of the timed steps, would say 5 MiB."""
    monkeypatch.setitem(speed.STEP_TIMERS, "cuda", lambda step: 300.0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**20)
    found = [speed._sample(None, torch.device("cuda"), make_spec(compile=how), 0) for how in (False, "graphs")]
    assert [each[1:] for each in found] == [(5.0, "cuda_allocator"), (None, "none: CUDA graphs hide activations")]


def test_what_loads_at_the_first_call_is_no_memory_of_the_model():
    """Against the storages alive at once in building the model and its steps; numba's compiler alone takes 100 MiB."""
    spec = make_spec(backend="numba", image_size=(144, 144))

    def build_and_run():
        model = build_eval_model(spec.model, {}, spec.image_size)
        model.set_backend("numba")
        with torch.inference_mode():
            model(torch.randn(1, 3, *spec.image_size))

    expected = measure_peak_mib(build_and_run, "cpu")
    assert expected - 2 <= measure(spec)["peak_memory_mib"] <= expected + 20


def test_storages_count_while_they_are_alive_if_they_are_new():
    given = torch.ones(MIB)

    def step():
        first = given + 1  # 1
        second = first * 2  # 2 at once
        view = second.view(2, -1).mT  # no storage of its own
        del first, second  # 1, which the view keeps
        return view + 1, view.sum()  # 2

    assert measure_peak_mib(step, "cpu") == 2.0 + 4 / 2**20
    assert measure_peak_mib(lambda: given.add_(1), "cpu") == 0
    assert measure_peak_mib(lambda: given[: MIB // 2].clone(), "cpu") == 0.5


def test_a_backward_pass_counts_what_is_kept_for_it():
    weight = torch.ones(MIB, requires_grad=True)
    weight.grad = torch.zeros(MIB)

    def step():
        hidden = (weight * 2).exp()  # the product is freed, exp is kept for its own gradient
        hidden.sum().backward()  # at the peak: hidden, the gradient of exp, and then that of the product

    assert 2 <= measure_peak_mib(step, "cpu") <= 4
