"""`repro kernels`: what it says where it cannot run, the record of a failed check, and the table in the documentation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from repro.core.errors import RunError
from repro.core.paths import Paths
from repro.core.record import replace_block
from stages import kernels

ROOT = Path(__file__).parents[2]


def repro(*arguments, **environment):
    command = [sys.executable, "-m", "repro", "kernels", *arguments]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=os.environ | hidden | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["check"], {}, "q is on cpu, expected a CUDA device"),
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
    import torch

    from kernels.tools import check
    from kernels.ttt_linear import op, triton_fwd

    sizes = {"tokens": 17, "heads": 1, "dtype": "fp32", "head_dim": 64, "chunk_size": 16}
    rows = [
        {"check": "default config", **sizes, "errors": {"out": 1e-7}, "not_finite": [], "limits": {"out": 1e-5}, "passed": True},
        {"check": "default config", **sizes, "errors": {"out": 1e-3}, "not_finite": ["q"], "limits": {"out": 1e-5}, "passed": False},
        {"check": "a peer", **sizes, "passed": None, "reason": "not installed"},
        {"check": "a config", **sizes, "passed": False, **check.failure(ValueError("shared\nmemory"))},
        {"check": "a config", **sizes, "config": check.describe(triton_fwd.configs(torch.float32, 16)[0]), "passed": True},
    ]
    monkeypatch.setattr(check, "rows", lambda device: iter(rows))
    monkeypatch.setattr(op, "_triton_obstacle", lambda *asked: None)
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "repro").symlink_to(ROOT / "repro")
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    with pytest.raises(RunError, match="2 of 5 checks failed, see .*kernels_check.json"):
        kernels.run_check(Paths(tmp_path))
    (record,) = tmp_path.glob("results/measured/*/kernels_check.json")
    assert json.loads(record.read_text())["metrics"] == {"rows": rows, "failed": 2}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok: ") and "nearest its limit: out 1.0e-07 of 1e-05" in lines[0]
    assert lines[1].startswith("FAILED: ") and "not finite: q" in lines[1]
    assert lines[2].startswith("not run: ") and lines[2].endswith("not installed")
    assert lines[3].endswith("ValueError: shared memory")


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
    summary = {"forward_speedup_over_fla": 2.345, "forward_backward_speedup_over_fla": None, "forward_share_of_copy_percent": 50.2}
    assert kernels.bench_table({"rows": rows, "summary": summary}, "cuda: X").splitlines() == [
        "| B 64, T 6400, 3 heads, both directions, bf16 | asked on an H200 | cuda: X |",
        "|---|---|---|",
        "| forward, against the faster of flash-linear-attention's two | 2 × | 2.35 × |",
        "| forward and backward, against the faster of the two | 2 × | – |",
        "| forward, share of the bandwidth of a copy | 40 % | 50 % |",
        "",
        "Median milliseconds, bf16, both directions:",
        "",
        "| heads | T | passes | copy | triton | fla chunk | share of copy | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
        "| 3 | 6400 | forward | 0.300 | 0.600 | – | 50 % | 10 |",
        "| 3 | 196 | forward | 0.010 | – | – | – | – |",
    ]


def test_resources_table():
    shared = {"default": True, "dtype": "bf16", "config": {"chunk_size": 16, "num_warps": 4}, "registers": 168, "stack_bytes": 0}
    shared |= {"shared_bytes": 8192, "instructions": {"LDL": 1, "STL": 2, "BAR": 30}, "target": "sm_90"}
    loops = [{"instructions": n, "SHFL": s, "BAR": b} for n, s, b in ((900, 40, 20), (500, 20, 10), (300, 12, 8))]
    rows = [
        {**shared, "kernel": "ttt_linear_forward", "loops": loops[1:2]},
        {**shared, "kernel": "ttt_linear_backward", "loops": loops},
        {**shared, "kernel": "ttt_linear_backward", "default": False},
        {**shared, "kernel": "ttt_linear_forward", "dtype": "fp16"},
    ]
    assert kernels.resources_table(rows).splitlines()[2:] == [
        "| forward | sm_90 | 168 | 0 | 8192 | 3 | 500, 20, 10 |",
        "| backward | sm_90 | 168 | 0 | 8192 | 3 | 500, 20, 10; 300, 12, 8 |",
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


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
@pytest.mark.parametrize("kind", ["chunk", "fused_chunk"])
def test_a_peer_is_called_as_ours_is(monkeypatch, kind, passes):
    """Its shapes, dtypes and gradients, with ours in place of its kernels: one direction, twice the heads, lr constant in a chunk."""
    import torch

    from kernels import ttt_linear
    from kernels.tools import bench, peers

    def stands_in(q, k, v, w, b, eta, scale, eps, chunk_size, initial_state, initial_state_bias, output_final_state):
        assert {x.dtype for x in (q, k, v, w, b, eta)} == {torch.bfloat16} and scale == 1.0 and not output_final_state
        c = 1 / torch.arange(1, chunk_size + 1)
        lr = eta[..., 0] * (1 / c)[torch.arange(q.shape[1]) % chunk_size, None]
        shared = c, initial_state[0], initial_state_bias[0, :, 0], w, b
        return ttt_linear(q, k, v, lr.bfloat16(), *shared, chunk_size=chunk_size, eps=eps), None, None

    module = SimpleNamespace(chunk_ttt_linear=stands_in, fused_chunk_ttt_linear=stands_in)
    monkeypatch.setattr(peers, "_import", lambda name: module)
    sizes = bench.Sizes(batch=2, tokens=40, heads=2, head_dim=16)
    step = bench.op_step(peers.both_directions(kind), sizes, passes, torch.device("cpu"))
    ours = bench.op_step(bench.implementations()["torch"](), sizes, passes, torch.device("cpu"))
    results, expected = step(), ours()
    if passes == "forward":
        assert results.shape == expected.shape == (2, 40, 2, 2, 16)
        # both scan forth there; and v is a part of a wider projection
    else:
        assert [g.shape for g in results] == [g.shape for g in expected]


def test_a_row_that_breaks_is_a_row(monkeypatch):
    """Neither a peer's failure nor a missing one ends the measurement, and numbers that are not there have a reason."""
    import torch

    from kernels.tools import bench, peers
    from repro.core.record import _require_reasons

    def broken():
        raise AssertionError("grid\nis too large")

    sizes = bench.Sizes(tokens=196, heads=3)
    monkeypatch.setattr(peers, "installed", lambda: True)
    row = bench._measured("fla chunk", sizes, "forward", torch.device("cpu"), 1.0, broken)
    assert (row["status"], row["reason"], row["median_ms"]) == ("failed", "AssertionError: grid is too large", None)
    monkeypatch.setattr(peers, "installed", lambda: False)
    unavailable = bench._measured("fla chunk", sizes, "forward", torch.device("cpu"), 1.0, broken)
    assert unavailable["status"] == "unavailable"
    copied = bench._filled("copy", sizes, "forward", [1.0, 2.0, 3.0], None, 0.0)
    ours = bench._filled("triton", sizes, "forward", [1.0, 2.0, 3.0], 1.0, 5.0)
    assert ours["share_of_copy_percent"] == 50 and ours["gb_per_s"] == pytest.approx(sizes.bytes("forward") / 2 / 1e6)
    _require_reasons([row, unavailable, copied, ours, {"config": bench.describe(bench.triton_bwd.configs(torch.bfloat16, 16)[0])}], "")


def test_it_runs_with_torch_triton_timm_typer_and_rich_alone():
    """A bare GPU machine: nothing else of the lock file is imported on the way to the first check."""
    blocked = "dvc sklearn matplotlib scipy pytest mmseg mmcv mmengine dvclive".split()
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from repro.cli import main; sys.argv = ['repro', 'kernels', 'bench']; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and "PyTorch sees no CUDA device" in done.stderr, done.stderr


def test_bytes_and_flop_by_hand():
    """One head of 64, T = 32, two directions, one sample: two chunks of 16."""
    from kernels.tools.bench import BOTH_PASSES, FORWARD, Sizes

    sizes = Sizes(batch=1, tokens=32, heads=1)
    rows, lr = 32 * 2 * 64 * 2, 32 * 2
    assert sizes.bytes(FORWARD) == 4 * rows + lr
    assert sizes.bytes(BOTH_PASSES) == (4 * rows + lr) + (4 * rows + lr) + (3 * rows + lr)  # q k v out; q k v dout; dq dk dv
    products = 3 * 16 * 64 * 64 + 2 * 16 * 16 * 64  # KW, QW, KᵀG; QKᵀ, AG: multiply-adds of a chunk
    assert sizes.flop(FORWARD) == 2 * 2 * 2 * products
    last_update = 2 * 16 * 64 * 64  # nothing depends on the state after the last chunk: two products less
    assert sizes.flop(BOTH_PASSES) == 3 * sizes.flop(FORWARD) - 2 * 2 * last_update


@pytest.mark.parametrize(
    ("block", "pattern", "table"),
    [
        (kernels.BENCH_BLOCK, "*/kernels.json", lambda metrics, device: kernels.bench_table(metrics, device)),
        (kernels.RESOURCES_BLOCK, "compile/resources.json", lambda metrics, device: kernels.resources_table(metrics["rows"])),
    ],
)
def test_documented_tables_are_of_committed_records(block, pattern, table):
    """docs/gpu.md: each generated block is made of a record under results/measured, or, without one, of nulls."""
    found = re.search(rf"<!-- {block} -->\n(.*?)\n<!-- /{block} -->", (ROOT / kernels.DOCS).read_text(), re.S)[1]
    tables = []
    for record in sorted((ROOT / "results" / "measured").glob(pattern)):
        content = json.loads(record.read_text())
        tables.append(table(content["metrics"], content["identity"]["device"]))
    assert found in (tables or [kernels.goals_table(dict.fromkeys(kernels.GOALS), kernels.NO_GPU)])


def test_replace_block_wants_its_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    replace_block(page, "x", "new\nlines")
    assert page.read_text() == "a\n<!-- x -->\nnew\nlines\n<!-- /x -->\nb\n"
    with pytest.raises(Exception, match="no lines <!-- y --> and <!-- /y -->"):
        replace_block(page, "y", "new")
