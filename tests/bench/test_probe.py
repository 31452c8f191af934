"""The probe of a GPU's first minutes, run on a CPU."""

import time

import pytest
import torch

from repro.bench import probe
from repro.bench.probe import Plan, ProbeLines, describe_probes, probe_device
from repro.bench.unfinished import read_clock
from repro.core.csvfile import read_typed_csv
from repro.core.paths import Paths

NANO = Plan(
    model="vittt_nano_patch16_144",
    baseline="deit_nano_patch16_144",
    corners=((64, 2), (48, 1)),
    dtype=torch.float32,
    device="cpu",
)


@pytest.fixture
def quick(monkeypatch):
    """Two samples of a step."""
    monkeypatch.setattr(probe, "FEWEST", 2)
    monkeypatch.setattr(probe, "SAMPLING_S", 0.0)


def read_only(folder):
    (file,) = folder.glob("results/speed/probe/*.csv")
    return read_typed_csv(file, probe.TYPES)


def test_what_runs_without_a_gpu_is_measured(tmp_path, quick, monkeypatch):
    """Each line has a value or a reason, and graphs, which a CPU has not, the reason."""
    chosen = [each for each in probe.PROBES if each[0] in ("right", "inference", "plain block", "training")]
    monkeypatch.setattr(probe, "PROBES", chosen)
    assert probe_device(Paths(tmp_path), None, "", NANO)
    lines = read_only(tmp_path)
    assert all((line["value"] is None) == (line["reason"] is not None) for line in lines)
    assert {line["measure"] for line in lines if line["value"] is None} == {"latency_ms"}
    by_section = {name: [line for line in lines if line["section"] == name] for name, *_ in chosen}
    errors = [line["value"] for line in by_section["right"] if line["measure"] == "relative_error"]
    assert len(errors) == 2 and max(errors) < 1e-5
    assert all(line["value"] == 1 for line in by_section["right"] if line["measure"] == "equal_bits")
    timed = {
        (line["model"], line["image_size"], line["batch_size"])
        for line in by_section["inference"]
        if line["measure"] == "latency_ms" and line["mode"] == "eager" and line["value"] > 0
    }
    assert timed == {(model, *corner) for model in (NANO.model, NANO.baseline) for corner in NANO.corners}
    trained = [line for line in by_section["training"] if line["measure"] == "latency_ms"]
    assert [line["image_size"] for line in trained] == [48, 48] and {line["batch_size"] for line in trained} == {2}


def test_a_section_that_breaks_or_takes_too_long_costs_nothing_but_itself(tmp_path, monkeypatch):
    def wait(found):
        time.sleep(60)

    def refuse(found):
        raise RuntimeError("no such kernel\nand more")

    def say(found):
        found.say("latency_ms", 1.5, model="a model")

    monkeypatch.setattr(probe, "PROBES", [("waits", 0.05, wait), ("breaks", 9.0, refuse), ("works", 9.0, say)])
    assert probe_device(Paths(tmp_path), None, "", NANO)
    *lines, last = read_only(tmp_path)
    found = {line["section"]: (line["measure"], line["value"], line["reason"]) for line in lines}
    assert (last["section"], last["measure"], last["value"]) == ("works", "complete", 1.0)
    assert found["works"] == ("latency_ms", 1.5, None)
    assert found["waits"][:2] == found["breaks"][:2] == ("complete", None)
    assert "0.05 s" in found["waits"][2] and found["breaks"][2].endswith("no such kernel")


def test_what_has_no_time_left_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "PROBES", [("never", 9.0, lambda _: pytest.fail("was begun"))])
    assert not probe_device(Paths(tmp_path), 0.0, "", NANO)


def test_a_probe_that_was_cut_goes_on(tmp_path, monkeypatch):
    """The second section is cut in the first call, in code that raises errors of its own, as a compiler does.

    Lines from before the series do not count.
    """
    calls = []

    def work(name, wait_s=0.0):
        def run(found):
            calls.append(name)
            found.say("latency_ms", float(len(calls)))
            try:
                time.sleep(wait_s if calls.count(name) == 1 else 0.0)
            except TimeoutError as error:
                raise RuntimeError("does not compile") from error

        return name, 90.0, run

    monkeypatch.setattr(probe, "PROBES", [work("first"), work("second", 60.0)])
    began = read_clock()
    assert not probe_device(Paths(tmp_path), 0.02, began, NANO)
    assert probe_device(Paths(tmp_path), 0.5, began, NANO) and probe_device(Paths(tmp_path), 0.5, began, NANO)
    assert calls == ["first", "second", "second"]
    times = [(line["section"], line["value"]) for line in read_only(tmp_path) if line["measure"] == "latency_ms"]
    assert times == [("first", 1.0), ("second", 3.0)]
    assert probe_device(Paths(tmp_path), 0.5, read_clock(), NANO) and calls[3:] == ["first", "second"]


def test_the_page_shows_eager_and_graph_apart(tmp_path):
    assert "make measure-gpu" in describe_probes(tmp_path)
    lines, about = (
        ProbeLines(NANO, tmp_path / "a.csv", tmp_path, ""),
        {"model": "m", "image_size": 224, "batch_size": 1},
    )
    lines.say("latency_ms", 3.0, mode="eager", **about)
    lines.say("host_ms", 2.5, mode="eager", **about)
    lines.say("kernel_ms", 0.5, mode="eager", kernel="largest", calls=12, **about)
    lines.say("kernel_ms", 0.25, mode="eager", kernel="next", calls=1, **about)
    lines.say("latency_ms", None, mode="graph", reason="refused", **about)
    *_, eager, graph = describe_probes(tmp_path).splitlines()
    assert "| eager | 3 | 2.5 | `largest` 0.5 ms, 12 calls |" in eager
    assert "| graph | null: refused | – | – |" in graph
