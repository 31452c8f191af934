"""Rows of the speed benchmark in real processes, with real shortages of memory and time."""

import dataclasses
import json

import pytest

from repro.measure.speed import RowSpec, measure, median_interval, row_id

NANO = "vittt_nano_patch16_144"


@pytest.mark.parametrize(
    "n, lowest, highest",
    [
        (6, 1, 6),  # P(all six on one side) = 2/64 = 3.1 %
        (9, 2, 8),  # 2·(1 + 9)/512 = 3.9 %, a third would make it 18 %
        (10, 2, 9),  # 2·(1 + 10)/1024 = 2.1 %
        (20, 6, 15),  # the usual table of the sign test
    ],
)
def test_median_interval_by_hand(n, lowest, highest):
    samples = [float((7 * i) % n) if n % 7 else float(i) for i in range(n)]  # 0 ... n-1, shuffled
    assert sorted(samples) == list(range(n))
    assert median_interval(samples) == (lowest - 1, highest - 1)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_too_few_samples_have_no_interval(n):
    assert median_interval([1.0] * n) is None


@pytest.fixture
def startup(tmp_path, monkeypatch):
    """Code that every Python process started from here runs first."""

    def write(code):
        (tmp_path / "sitecustomize.py").write_text(code, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def test_a_row_in_a_fresh_process_whatever_is_printed(startup):
    startup("import atexit, os\nprint('noise at the start')\natexit.register(lambda: os.write(1, b'noise at the end'))\n")
    spec = RowSpec(model=NANO, options={"design": "dual"}, resolution=(64, 96), batch=3, dtype="bf16", backend="torch", threads=1)
    row = measure(spec)
    assert row["status"] == "ok"
    assert row["steps"] == len(row["samples_ms"]) == 10
    assert row["latency_ms"] == pytest.approx(sum(sorted(row["samples_ms"])[4:6]) / 2, abs=1e-3)
    low, high = row["latency_ms_ci95"]
    assert [low, high] == pytest.approx([sorted(row["samples_ms"])[i] for i in (1, 8)], abs=1e-3)
    assert row["throughput_img_per_s"] == pytest.approx(3 * 1000 / row["latency_ms"])
    assert row["peak_memory_mib"] > 0
    assert (row["model"], row["options"], row["resolution"]) == (NANO, {"design": "dual"}, [64, 96])
    assert (row["batch"], row["dtype"], row["device"], row["backend"], row["mode"]) == (3, "bf16", "cpu", "torch", "infer")
    assert row["params"] > 0 and row["macs_g"] > 0 and row["attention"] is None
    json.dumps(row, allow_nan=False)


def test_out_of_memory_is_a_row():
    # 6e14 bytes of input: more than the address space of a 64-bit process
    row = measure(RowSpec(model="deit_tiny_patch16_224", attention="unfused", resolution=(224, 224), batch=10**9))
    assert row["status"] == "oom" and "memory" in row["reason"]
    assert row["batch"] == 10**9 and row["latency_ms"] is None and row["peak_memory_mib"] is None
    assert row["params"] == 5_717_416  # known all the same


def test_a_process_that_the_kernel_kills_is_out_of_memory(startup):
    startup("import os, signal, sys\nif 'repro.measure.speed' in ' '.join(sys.orig_argv): os.kill(os.getpid(), signal.SIGKILL)\n")
    row = measure(RowSpec(model=NANO, resolution=(144, 144)))
    assert row["status"] == "oom" and "killed" in row["reason"]
    assert row["macs_g"] > 0


def test_over_the_budget_is_a_row():
    row = measure(RowSpec(model=NANO, resolution=(144, 144), budget_s=0.2))
    assert row["status"] == "timeout" and "0.2 s" in row["reason"]
    assert row["latency_ms"] is None and row["samples_ms"] == []


def test_any_other_end_is_one_line_that_names_the_row():
    with pytest.raises(RuntimeError, match=r"^vittt_nano_patch16_144\[chunks=3\]@144: .*unexpected keyword argument 'chunks'$"):
        measure(RowSpec(model=NANO, options={"chunks": 3}, resolution=(144, 144)))


def test_a_crash_is_one_line_that_names_the_row(startup):
    startup("import os, sys\nif 'repro.measure.speed' in ' '.join(sys.orig_argv): os.abort()\n")
    with pytest.raises(RuntimeError, match=r"^vittt_nano_patch16_144@64x32: .*signal 6"):
        measure(RowSpec(model=NANO, resolution=(64, 32)))


@pytest.mark.parametrize(
    "change", [{"steps": 9}, {"batch": 0}, {"warmup": 0}, {"budget_s": 0.0}, {"dtype": "fp8"}, {"device": "tpu"}, {"attention": "flash"}]
)
def test_bad_specs_are_refused(change):
    with pytest.raises(ValueError):
        dataclasses.replace(RowSpec(model=NANO, resolution=(144, 144)), **change)


def test_row_names():
    assert row_id("m", {}, (224, 224)) == "m@224"
    assert row_id("m", {"design": "dual", "chunk_size": 4}, (64, 32)) == "m[design=dual,chunk_size=4]@64x32"
