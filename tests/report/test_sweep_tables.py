"""A sweep on the page: its matrices, its comparisons and withheld ratios, and what does not count twice."""

import re

from repro.core.record import write_record
from stages.efficiency_sweep import conclude

CPU = "cpu: Made-up, 2 threads"
VITTT, DEIT, VIM = "vittt_tiny_patch16_224", "deit_tiny_patch16_224", "vim_tiny_patch16_224"


def row(model, attention, side, latency, memory, *, status="ok", run=1, compile=False):
    return {
        "row": f"{model}@{side}",
        "model": model,
        "options": {},
        "attention": attention,
        "attention_reason": "none to choose",
        "attention_kernel": "flash",
        "resolution": [side, side],
        "batch": 1,
        "dtype": "fp32",
        "device": CPU,
        "mode": "infer",
        "compile": compile,
        "backend": "torch",
        "status": status,
        "reason": "made up",
        "latency_ms": latency,
        "latency_ms_ci95": None,
        "throughput_img_per_s": None if latency is None else 1e3 / latency,
        "peak_memory_mib": memory,
        "macs_g": side**2 / 1e5,
        "params": 7,
        "run": run,
        "samples_ms": [],
    }


def section(checkout, rows, gates):
    from repro.report.tables import _efficiency

    identity = {"device": CPU, "dtype": "fp32", "backend": "torch"}
    metrics = {"rows": rows, "left_out": [], "gates": gates, **conclude(rows, gates)}
    write_record(checkout.paths.results / "measured" / "cpu_made_up", metrics, identity, 1.0, name="efficiency")
    return _efficiency(checkout.results())


def test_matrices_comparisons_and_growth(checkout):
    rows = [row(VITTT, None, side, side**2 / 1e3, side**2 / 1e4) for side in (512, 1024)]
    rows += [row(DEIT, "unfused", 512, 1048.576, 100.0), row(DEIT, "unfused", 1024, None, None, status="oom")]
    rows += [row(VIM, None, 512, 500.0, 50.0), row(VITTT, None, 512, 1.0, 1.0, run=2), row(VITTT, None, 512, 9.0, 9.0, compile=True)]
    gate = {"operator": "selective_scan_bidir", "share_of_copy_percent": 2.0, "at_least_percent": 20, "holds": False}
    text = section(checkout, rows, [gate | {"family": "vim", "batch": 1, "dtype": "fp32"}])
    assert f"| {VITTT} | 262 | 1049 |" in text
    assert f"| {DEIT}, unfused | 1049 | oom |" in text
    assert "| T | deit | 512² | 4.00× | 73.8 % | always |" in text
    assert "| T | vim | – | no ratio: selective_scan_bidir reaches 2 % of the bandwidth of a copy, 20 % are asked for" in text
    assert re.search(rf"\| {VITTT} \| 1\.000? \| 1\.000? \| 1\.000? \|", text)
    assert f"### {CPU}, batch 1, fp32, infer\n" in text and f"### {CPU}, batch 1, fp32, infer, compiled\n" in text


def test_what_was_measured_twice_counts_once(checkout):
    section(checkout, [row(VITTT, None, 512, 10.0, 1.0), row(VITTT, None, 512, 20.0, 1.0, run=2)], [])
    (rows,) = checkout.results().speed_rows.values()
    assert [found["latency_ms"] for found, _ in rows] == [10.0]
