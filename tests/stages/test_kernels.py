"""`repro kernels`: what it says where it cannot run, the record of a failed check, and the table in the documentation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repro.core.errors import RunError
from repro.core.paths import Paths
from repro.core.record import replace_block
from stages import kernels

ROOT = Path(__file__).parents[2]
GPU_DOC = ROOT / "docs" / "gpu.md"


def repro(*arguments, **environment):
    command = [sys.executable, "-m", "repro", "kernels", *arguments]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=os.environ | hidden | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["check"], {}, "no NVIDIA GPU from sm_80 on; on a CPU run TRITON_INTERPRET=1 repro kernels check"),
        (["bench"], {}, "PyTorch sees no CUDA device; speed is measured on a GPU"),
        (["resources"], {"TRITON_INTERPRET": "1"}, "the interpreter compiles nothing, unset it"),
    ],
)
def test_where_it_cannot_run(arguments, environment, says):
    done = repro(*arguments, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("repro: kernels ") and says in done.stderr and done.stderr.count("\n") == 1


def test_a_failed_check_is_recorded_and_fails(tmp_path, monkeypatch, capsys):
    """A row over its limit, as a broken kernel would give it: the record says so, the exit code is 1 and bench would stop there."""
    from kernels.tools import check
    from kernels.ttt_linear import op

    sizes = {"tokens": 17, "heads": 1, "dtype": "fp32", "head_dim": 64, "chunk_size": 16}
    rows = [
        {"check": "default config", **sizes, "errors": {"out": 1e-7}, "not_finite": [], "limits": {"out": 1e-5}, "passed": True},
        {"check": "default config", **sizes, "errors": {"out": 1e-3}, "not_finite": ["q"], "limits": {"out": 1e-5}, "passed": False},
        {"check": "a peer", **sizes, "passed": None, "reason": "not installed"},
    ]
    monkeypatch.setattr(check, "rows", lambda device: iter(rows))
    monkeypatch.setattr(op, "_triton_obstacle", lambda *asked: None)
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "repro").symlink_to(ROOT / "repro")
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    with pytest.raises(RunError, match="1 of 3 checks failed, see .*kernels_check.json"):
        kernels.run_check(Paths(tmp_path))
    (record,) = tmp_path.glob("results/measured/*/kernels_check.json")
    assert json.loads(record.read_text())["metrics"] == {"rows": rows, "failed": 1}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok: ") and "nearest its limit: out 1.0e-07 of 1e-05" in lines[0]
    assert lines[1].startswith("FAILED: ") and "not finite: q" in lines[1]
    assert lines[2].startswith("not run: ") and lines[2].endswith("not installed")


def row(implementation, median_ms, heads=3, tokens=6400, **more):
    shared = {"batch": 64, "heads": heads, "tokens": tokens, "passes": "forward", "median_ms": median_ms}
    return {"implementation": implementation, **shared, "share_of_copy_percent": None, "peak_memory_mib": None, **more}


def test_bench_table():
    rows = [
        row("copy", 0.3),
        row("triton", 0.6, share_of_copy_percent=50.2, peak_memory_mib=10.4),
        row("fla chunk", None),
        row("copy", 0.01, tokens=196),
    ]
    assert kernels.bench_table(rows, "cuda: X").splitlines() == [
        "cuda: X, bf16, both directions, median milliseconds:",
        "",
        "| heads | T | passes | copy | triton | fla chunk | share of copy | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
        "| 3 | 6400 | forward | 0.300 | 0.600 | – | 50 % | 10 |",
        "| 3 | 196 | forward | 0.010 | – | – | – | – |",
    ]


def test_summary_is_against_the_faster_peer():
    from kernels.tools import bench

    def measured(forward, both):
        return [
            {**row(name, ms), "passes": passes}
            for passes, times in (("forward", forward), ("forward+backward", both))
            for name, ms in zip(("copy", "triton", "torch", "fla chunk", "fla fused_chunk"), times, strict=True)
        ]

    found = bench.summary([*measured((1.0, 2.0, 90.0, 5.0, 4.0), (2.0, 8.0, 90.0, 12.0, 20.0)), row("fla chunk", 0.1, tokens=196)])
    assert found == {
        "forward_speedup_over_fla": 2.0, "forward_share_of_copy_percent": 50.0,
        "forward_backward_speedup_over_fla": 1.5, "forward_backward_share_of_copy_percent": 25.0,
    }  # fmt: skip
    found = bench.summary(measured((1.0, 2.0, 90.0, None, None), (None,) * 5))
    assert found["forward_speedup_over_fla"] is None and found["forward_share_of_copy_percent"] == 50.0 and found["reason"]


def test_bytes_and_flop_by_hand():
    """One head of 64, T = 32, two directions, one sample: two chunks of 16."""
    from kernels.tools.bench import BOTH_PASSES, FORWARD, Sizes

    sizes = Sizes(batch=1, tokens=32, heads=1)
    rows, lr = 32 * 2 * 64 * 2, 32 * 4
    assert sizes.bytes(FORWARD) == 4 * rows + lr
    assert sizes.bytes(BOTH_PASSES) == (4 * rows + lr) + (4 * rows + lr) + (3 * rows + lr)  # q k v out; q k v dout; dq dk dv
    products = 3 * 16 * 64 * 64 + 2 * 16 * 16 * 64  # KW, QW, KᵀG; QKᵀ, AG: multiply-adds of a chunk
    assert sizes.flop(FORWARD) == 2 * 2 * 2 * products
    last_update = 2 * 16 * 64 * 64  # nothing depends on the state after the last chunk: two products less
    assert sizes.flop(BOTH_PASSES) == 3 * sizes.flop(FORWARD) - 2 * 2 * last_update


def test_the_documented_table_is_of_committed_records():
    """docs/gpu.md: the block that `repro kernels bench` writes says what results/measured holds, or that nothing is measured."""
    block = re.search(rf"<!-- {kernels.DOCS_BLOCK} -->\n(.*?)\n<!-- /{kernels.DOCS_BLOCK} -->", GPU_DOC.read_text(), re.S)[1]
    tables = []
    for record in sorted((ROOT / "results" / "measured").glob("*/kernels.json")):
        content = json.loads(record.read_text())
        tables.append(kernels.bench_table(content["metrics"]["rows"], content["identity"]["device"]))
    assert block in (tables or [kernels.NOT_MEASURED])


def test_replace_block_wants_its_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    replace_block(page, "x", "new\nlines")
    assert page.read_text() == "a\n<!-- x -->\nnew\nlines\n<!-- /x -->\nb\n"
    with pytest.raises(Exception, match="no lines <!-- y --> and <!-- /y -->"):
        replace_block(page, "y", "new")
