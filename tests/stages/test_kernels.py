"""`repro kernels`: what it says where it cannot run, the record of a failed check, and the table in the documentation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from repro.core.errors import RunError, UserError
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
        (["check", "--op", "bi_wvk"], {}, "--op 'bi_wvk': no such operator; did you mean 'bi_wkv'?"),
    ],
)
def test_where_it_cannot_run(arguments, environment, says):
    done = repro(*arguments, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("repro: kernels") and says in done.stderr and done.stderr.count("\n") == 1


def test_a_failed_check_is_recorded_and_fails(tmp_path, monkeypatch, capsys):
    """A row over its limit, as a broken kernel would give it: the record says so, the exit code is 1 and bench would stop there."""
    import torch

    from kernels.tools import check
    from kernels.ttt_linear import op, triton_fwd

    sizes = {"operator": "ttt_linear", "tokens": 17, "heads": 1, "dtype": "fp32", "head_dim": 64, "chunk_size": 16}
    rows = [
        {"check": "default config", **sizes, "errors": {"out": 1e-7}, "not_finite": [], "limits": {"out": 1e-5}, "passed": True},
        {"check": "default config", **sizes, "errors": {"out": 1e-3}, "not_finite": ["q"], "limits": {"out": 1e-5}, "passed": False},
        {"check": "a peer", **sizes, "passed": None, "reason": "not installed"},
        {"check": "a config", **sizes, "passed": False, **check.failure(ValueError("shared\nmemory"))},
        {"check": "a config", **sizes, "config": check.describe(triton_fwd.configs(torch.float32, 16)[0]), "passed": True},
    ]
    monkeypatch.setattr(check, "rows", lambda cases, device: iter(rows))
    monkeypatch.setattr(op, "_triton_obstacle", lambda *asked: None)
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "repro").symlink_to(ROOT / "repro")
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    with pytest.raises(RunError, match="2 of 5 checks failed, see .*kernels_check.json"):
        kernels.run_check(Paths(tmp_path), "ttt_linear")
    (record,) = tmp_path.glob("results/measured/*/kernels_check.json")
    metrics = json.loads(record.read_text())["metrics"]
    assert (metrics["rows"], metrics["failed"], list(metrics["source_sha256"])) == (rows, 2, ["ttt_linear"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok: ") and "nearest its limit: out 1.0e-07 of 1e-05" in lines[0]
    assert lines[1].startswith("FAILED: ") and "not finite: q" in lines[1]
    assert lines[2].startswith("not run: ") and lines[2].endswith("not installed")
    assert lines[3].endswith("ValueError: shared memory")


def row(implementation, median_ms, operator="ttt_linear", tokens=6400, **more):
    """As `bench.rows` yields it, at the width that the goals of the operator are about."""
    from kernels.tools.operators import OPERATORS

    sizes = {**vars(OPERATORS[operator].COMPARED), "tokens": tokens}
    shared = {"operator": operator, **sizes, "passes": "forward", "median_ms": median_ms}
    return {"implementation": implementation, **shared, "share_of_copy_percent": None, "peak_memory_mib": None, **more}


def test_bench_table():
    rows = [
        row("copy", 0.3),
        row("triton", 0.6, share_of_copy_percent=50.2, peak_memory_mib=10.4),
        row("fla chunk", None),
        row("copy", 0.01, tokens=196),
        row("triton", 0.25, "bi_wkv", share_of_copy_percent=40.4),
    ]
    summary = {"forward_speedup_over_fla": 2.345, "forward_backward_speedup_over_fla": None, "forward_share_of_copy_percent": 50.2}
    summary = {"ttt_linear": summary, "bi_wkv": {"forward_share_of_copy_percent": 40.4}}
    assert kernels.bench_table({"rows": rows, "summary": summary}, "cuda: X").splitlines() == [
        "| `ttt_linear`, B 64, T 6400, 3 heads, both directions, bf16 | asked on an H200 | cuda: X |",
        "|---|---|---|",
        "| forward, against the faster of flash-linear-attention's two | 2 × | 2.35 × |",
        "| forward and backward, against the faster of the two | 2 × | – |",
        "| forward, share of the bandwidth of a copy | 40 % | 50 % |",
        "",
        "Median milliseconds of `ttt_linear`, bf16:",
        "",
        "| heads | T | passes | copy | triton | fla chunk | share of copy | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
        "| 3 | 6400 | forward | 0.300 | 0.600 | – | 50 % | 10 |",
        "| 3 | 196 | forward | 0.010 | – | – | – | – |",
        "",
        "| `bi_wkv`, B 64, T 6400, 192 channels, bf16 | asked on an H200 | cuda: X |",
        "|---|---|---|",
        "| forward, share of the bandwidth of a copy | 30 % | 40 % |",
        "",
        "Median milliseconds of `bi_wkv`, bf16:",
        "",
        "| channels | T | passes | triton | share of copy | peak MiB |",
        "|---|---|---|---|---|---|",
        "| 192 | 6400 | forward | 0.250 | 40 % | – |",
    ]


def test_resources_table():
    shared = {"default": True, "dtype": "bf16", "config": {"chunk_size": 16, "num_warps": 4}, "registers": 168, "stack_bytes": 0}
    shared |= {"operator": "ttt_linear", "shared_bytes": 8192, "instructions": {"LDL": 1, "STL": 2, "BAR": 30}, "target": "sm_90"}
    loops = [{"instructions": n, "SHFL": s, "BAR": b} for n, s, b in ((900, 40, 20), (500, 20, 10), (300, 12, 8))]
    rows = [
        {**shared, "kernel": "ttt_linear_forward", "loops": loops[1:2]},
        {**shared, "kernel": "ttt_linear_backward", "loops": loops},
        {**shared, "kernel": "ttt_linear_backward", "default": False},
        {**shared, "kernel": "ttt_linear_forward", "dtype": "fp16"},
        {**shared, "operator": "bi_wkv", "kernel": "bi_wkv_forward", "config": {"channels": 192}, "loops": loops[1:]},
        {**shared, "operator": "bi_wkv", "kernel": "bi_wkv_forward", "config": {"channels": 192}, "loops": loops[2:] + loops[1:2]},
    ]
    assert kernels.resources_table(rows).splitlines()[2:] == [
        "| `ttt_linear` forward | sm_90 | 168 | 0 | 8192 | 3 | 500, 20, 10 |",
        "| `ttt_linear` backward | sm_90 | 168 | 0 | 8192 | 3 | 500, 20, 10; 300, 12, 8 |",
        "| `bi_wkv` forward | sm_90 | 168 | 0 | 8192 | 3 | 300, 12, 8 |",
        "| `bi_wkv` forward | sm_90 | 168 | 0 | 8192 | 3 | 300, 12, 8; 500, 20, 10 |",
    ]


def test_summary_is_against_the_faster_peer():
    from kernels.tools import bench, bi_wkv_cases, selective_scan_cases, ttt_linear_cases

    def measured(forward, both, operator="ttt_linear", others=("fla chunk", "fla fused_chunk")):
        return [
            {**row(name, ms, operator), "passes": passes}
            for passes, times in (("forward", forward), ("forward+backward", both))
            for name, ms in zip(("copy", "triton", "torch", *others), times, strict=True)
        ]

    fla = [*measured((1.0, 2.0, 90.0, 5.0, 4.0), (2.0, 8.0, 90.0, 12.0, 20.0)), row("fla chunk", 0.1, tokens=196)]
    mamba = measured((1.0, 4.0, 90.0, 5.0), (2.0, 4.0, 90.0, 2.0), "selective_scan", ["mamba-ssm"])
    alone = measured((1.0, 4.0, 90.0), (2.0, 5.0, 90.0), "bi_wkv", [])
    found = bench.summary(ttt_linear_cases, [*fla, *mamba, *alone])
    assert found == {
        "forward_speedup_over_fla": 2.0,
        "forward_share_of_copy_percent": 50.0,
        "forward_backward_speedup_over_fla": 1.5,
        "forward_backward_share_of_copy_percent": 25.0,
    }
    assert bench.summary(selective_scan_cases, [*fla, *mamba, *alone]) == {
        "forward_speedup_over_mamba_ssm": 1.25,
        "forward_share_of_copy_percent": 25.0,
        "forward_backward_speedup_over_mamba_ssm": 0.5,
        "forward_backward_share_of_copy_percent": 50.0,
    }
    assert bench.summary(bi_wkv_cases, [*fla, *mamba, *alone]) == {
        "forward_share_of_copy_percent": 25.0,
        "forward_backward_share_of_copy_percent": 40.0,
    }
    found = bench.summary(ttt_linear_cases, measured((1.0, 2.0, 90.0, None, None), (None,) * 5))
    assert found["forward_speedup_over_fla"] is None and found["forward_share_of_copy_percent"] == 50.0 and found["reason"]


def steps_of(implementations, name, passes):
    """What a call of the named implementation and of the torch backend returns."""
    import torch

    from kernels.tools import bench

    return (bench.op_step(implementations[which], passes, torch.device("cpu"))() for which in (name, "torch"))


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
@pytest.mark.parametrize("kind", ["chunk", "fused_chunk"])
def test_a_peer_is_called_as_ours_is(monkeypatch, kind, passes):
    """Its shapes, dtypes and gradients, with ours in place of its kernels: one direction, twice the heads, lr constant in a chunk."""
    import torch

    from kernels import ttt_linear
    from kernels.tools import peers, ttt_linear_cases

    def stands_in(q, k, v, w, b, eta, scale, eps, chunk_size, initial_state, initial_state_bias, output_final_state):
        assert {x.dtype for x in (q, k, v, w, b, eta)} == {torch.bfloat16} and scale == 1.0 and not output_final_state
        c = 1 / torch.arange(1, chunk_size + 1)
        lr = eta[..., 0] * (1 / c)[torch.arange(q.shape[1]) % chunk_size, None]
        shared = c, initial_state[0], initial_state_bias[0, :, 0], w, b
        return ttt_linear(q, k, v, lr.bfloat16(), *shared, chunk_size=chunk_size, eps=eps), None, None

    module = SimpleNamespace(chunk_ttt_linear=stands_in, fused_chunk_ttt_linear=stands_in)
    monkeypatch.setattr(peers, "_import", lambda name: module)
    sizes = ttt_linear_cases.Sizes(batch=2, tokens=40, heads=2, head_dim=16)
    results, expected = steps_of(ttt_linear_cases.implementations(sizes), f"fla {kind}", passes)
    if passes == "forward":
        assert results.shape == expected.shape == (2, 40, 2, 2, 16)
        # both scan forth there; and v is a part of a wider projection
    else:
        assert [g.shape for g in results] == [g.shape for g in expected]


def test_mamba_ssm_is_called_with_the_same_work(monkeypatch):
    """Ours in its place, in its layout, (B,E,T) and one direction: the same outputs, and gradients of the same norm."""
    import torch

    from kernels.selective_scan import selective_scan
    from kernels.tools import selective_scan_cases as cases

    def stands_in(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        assert {x.dtype for x in (u, delta, B, C, z)} == {torch.bfloat16} and {x.dtype for x in (A, D, delta_bias)} == {torch.float32}
        assert u.shape == delta.shape == z.shape == (2, 32, 21) and B.shape == C.shape == (2, 16, 21) and delta_softplus
        assert all(x.stride(-1) == 1 for x in (u, delta, B, C, z))
        return selective_scan(u.mT, delta.mT, A, B.mT, C.mT, D, z.mT, delta_bias).mT

    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", SimpleNamespace(selective_scan_fn=stands_in))
    implementations = cases.implementations(cases.Sizes(batch=2, tokens=21, channels=32))
    results, expected = steps_of(implementations, "mamba-ssm", "forward")
    torch.testing.assert_close(results.movedim(-1, 1), expected)
    results, expected = (dict(zip(cases.INPUTS, x, strict=True)) for x in steps_of(implementations, "mamba-ssm", "forward+backward"))
    results["z"] = results["z"][:, 0] + results["z"][:, 1].flip(-1)
    for name, gradient in expected.items():
        torch.testing.assert_close(results[name].double().norm(), gradient.double().norm(), rtol=2e-3, atol=0)


@pytest.mark.parametrize(("name", "shape", "gradients"), [("selective_scan", (2, 21, 2, 32), 8), ("bi_wkv", (2, 21, 32), 4)])
def test_what_is_timed_runs(name, shape, gradients):
    """The steps of the bench, on the torch backend at a small size, in bf16."""
    import torch

    from kernels.tools.operators import OPERATORS

    cases = OPERATORS[name]
    implementations = cases.implementations(cases.Sizes(batch=2, tokens=21, channels=32))
    assert list(implementations)[:2] == ["triton", "torch"]
    out, _ = steps_of(implementations, "torch", "forward")
    assert (out.shape, out.dtype) == (shape, torch.bfloat16)
    found, _ = steps_of(implementations, "torch", "forward+backward")
    assert len(found) == gradients and all(g.isfinite().all() for g in found)
    assert {(sizes.batch, sizes.tokens) for sizes in cases.shapes()} == {(64, T) for T in (196, 784, 1600, 4096, 6400)}
    assert len(cases.shapes()) == 15 and cases.COMPARED in cases.shapes()


@pytest.mark.parametrize(("levels", "tokens", "queries"), [(1, 12, 6 * 8 + 3 * 4 + 2 * 2), (3, 6 * 8 + 3 * 4 + 2 * 2, 12)])
def test_what_is_timed_of_deformable_attention_runs(levels, tokens, queries):
    """A map of 3 by 4 pixels beside those of twice and half the sides, on the torch backend; the bytes of the tensors themselves."""
    import torch

    from kernels.tools import bench
    from kernels.tools import ms_deform_attn_cases as cases

    sizes = cases.Sizes(batch=2, tokens=12, heads=2, head_dim=8, levels=levels)
    value, locations, weights = cases.layer_inputs(sizes, torch.device("cpu"))
    assert value.shape == (2, tokens, 2, 8) and locations.shape == (2, queries, 2, levels, 4, 2)
    implementations = cases.implementations(sizes)
    out, _ = steps_of(implementations, "torch", "forward")
    assert (out.shape, out.dtype) == ((2, queries, 2, 8), torch.bfloat16)
    gradients, _ = steps_of(implementations, "torch", "forward+backward")
    assert [g.shape for g in gradients] == [x.shape for x in (value, locations, weights)] and all(g.isfinite().all() for g in gradients)
    read, written = (sum(x.numel() * x.element_size() for x in tensors) for tensors in ((value, locations, weights), (out,)))
    assert sizes.bytes(bench.FORWARD) == read + written
    assert sizes.bytes(bench.BOTH_PASSES) == (read + written) + (read + written) + read
    assert sizes.flop(bench.FORWARD) == 2 * 5 * weights.numel() * 8 and sizes.flop(bench.BOTH_PASSES) == 2 * 13 * weights.numel() * 8
    assert len(cases.shapes()) == 8 and cases.COMPARED in cases.shapes()
    rows = [{**row("triton", 1.0, "ms_deform_attn"), "levels": n} for n in (1, 3)]
    assert [line.split(" | ")[1] for line in kernels.times_table(rows).splitlines()[2:]] == ["6400, L 1", "6400, L 3"]


def test_a_row_that_breaks_is_a_row(monkeypatch):
    """Neither a peer's failure nor a missing one ends the measurement, and numbers that are not there have a reason."""
    import torch

    from kernels.tools import bench, peers
    from kernels.tools import ttt_linear_cases as cases
    from repro.core.record import _require_reasons

    def broken():
        raise AssertionError("grid\nis too large")

    sizes = cases.Sizes(tokens=196, heads=3)
    monkeypatch.setattr(peers, "installed", lambda: True)
    row = bench._measured(cases, "fla chunk", sizes, "forward", torch.device("cpu"), 1.0, broken)
    assert (row["status"], row["reason"], row["median_ms"]) == ("failed", "AssertionError: grid is too large", None)
    monkeypatch.setattr(peers, "installed", lambda: False)
    unavailable = bench._measured(cases, "fla chunk", sizes, "forward", torch.device("cpu"), 1.0, broken)
    assert unavailable["status"] == "unavailable"
    copied = bench._filled(cases, "copy", sizes, "forward", [1.0, 2.0, 3.0], None, 0.0)
    ours = bench._filled(cases, "triton", sizes, "forward", [1.0, 2.0, 3.0], 1.0, 5.0)
    assert ours["share_of_copy_percent"] == 50 and ours["gb_per_s"] == pytest.approx(sizes.bytes("forward") / 2 / 1e6)
    config = cases.configs(torch.bfloat16)[0][0]
    _require_reasons([row, unavailable, copied, ours, {"config": bench.describe(config)}], "")


def test_with_an_operator_the_others_rows_stay(tmp_path, monkeypatch, capsys):
    """`resources --op bi_wkv`: its rows and hash are new, in their place between the others', which no one compiled."""
    from kernels.tools import resources

    for name in ("kernels", "repro", "stages"):
        (tmp_path / name).symlink_to(ROOT / name)
    page, record = tmp_path / kernels.DOCS, tmp_path / "results/measured/compile/resources.json"
    page.parent.mkdir()
    page.write_text(f"<!-- {kernels.RESOURCES_BLOCK} -->\n<!-- /{kernels.RESOURCES_BLOCK} -->\n")
    made = []

    def compiled(cases):
        made.append(cases.NAME)
        numbers = {"registers": len(made), "stack_bytes": 0, "shared_bytes": 0, "instructions": {"LDL": 0, "STL": 0, "BAR": 0}}
        labels = {"operator": cases.NAME, "kernel": f"{cases.NAME}_forward", "config": {}, "default": True, "dtype": "bf16"}
        return iter([{**labels, "target": "sm_90", **numbers, "loops": [{"instructions": 9, "BAR": 0, "SHFL": 0}]}])

    monkeypatch.setattr(resources, "rows", compiled)
    monkeypatch.setattr(resources, "source_hash", lambda cases: f"{cases.NAME} {len(made)}")
    kernels.run_resources(Paths(tmp_path))
    kernels.run_resources(Paths(tmp_path), "selective_scan")
    metrics = json.loads(record.read_text())["metrics"]
    names = ["ttt_linear", "selective_scan", "bi_wkv", "ms_deform_attn"]
    assert made == [*names, "selective_scan"]
    assert [(row["operator"], row["registers"]) for row in metrics["rows"]] == list(zip(names, (1, 5, 3, 4), strict=True))
    assert metrics["source_sha256"] == {name: f"{name} {5 if name == 'selective_scan' else 4}" for name in names}
    assert "| `selective_scan` forward | sm_90 | 5 |" in page.read_text()
    monkeypatch.setattr(kernels, "versions", lambda: {"triton": "another"})
    with pytest.raises(UserError, match="made with other versions; run without --op"):
        kernels.run_resources(Paths(tmp_path), "bi_wkv")
    capsys.readouterr()


def test_it_runs_with_torch_triton_timm_typer_and_rich_alone():
    """A bare GPU machine: nothing else of the lock file is imported on the way to the first check."""
    blocked = ["dvc", "sklearn", "matplotlib", "scipy", "pytest", "mmseg", "mmcv", "mmengine", "dvclive"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from repro.cli import main; sys.argv = ['repro', 'kernels', 'bench']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "PyTorch sees no CUDA device" in done.stderr, done.stderr


def test_bytes_and_flop_by_hand():
    """One head of 64, T = 32, two directions, one sample: two chunks of 16."""
    from kernels.tools.bench import BOTH_PASSES, FORWARD
    from kernels.tools.ttt_linear_cases import Sizes

    sizes = Sizes(batch=1, tokens=32, heads=1)
    rows, lr = 32 * 2 * 64 * 2, 32 * 2
    assert sizes.bytes(FORWARD) == 4 * rows + lr
    assert sizes.bytes(BOTH_PASSES) == (4 * rows + lr) + (4 * rows + lr) + (3 * rows + lr)  # q k v out; q k v dout; dq dk dv
    products = 3 * 16 * 64 * 64 + 2 * 16 * 16 * 64  # KW, QW, KᵀG; QKᵀ, AG: multiply-adds of a chunk
    assert sizes.flop(FORWARD) == 2 * 2 * 2 * products
    last_update = 2 * 16 * 64 * 64  # nothing depends on the state after the last chunk: two products less
    assert sizes.flop(BOTH_PASSES) == 3 * sizes.flop(FORWARD) - 2 * 2 * last_update


def test_bytes_and_flop_of_the_scan_by_hand():
    """Two samples, T = 10, 32 channels of 16 states: the bytes of the tensors themselves; four multiply-adds a state."""
    import torch

    from kernels.tools.bench import BOTH_PASSES, FORWARD
    from kernels.tools.selective_scan_cases import Sizes, layer_inputs

    sizes = Sizes(batch=2, tokens=10, channels=32)
    activations = sum(x.nbytes for x in layer_inputs(sizes, torch.device("cpu")) if x.dtype == torch.bfloat16)
    out = 2 * 10 * 2 * 32 * 2
    assert sizes.bytes(FORWARD) == activations + out
    assert sizes.bytes(BOTH_PASSES) == (activations + out) + (activations + out) + activations
    assert sizes.flop(FORWARD) == 2 * 4 * (2 * 10 * 2 * 32 * 16)
    assert sizes.flop(BOTH_PASSES) == 3 * sizes.flop(FORWARD)


def test_bytes_and_flop_of_bi_wkv_by_hand():
    """Two samples, T = 10, 32 channels: k, v, out; k, v, dout, dk, dv. 6 and 17 multiply-adds a token and channel."""
    from kernels.tools.bench import BOTH_PASSES, FORWARD
    from kernels.tools.bi_wkv_cases import Sizes

    sizes = Sizes(batch=2, tokens=10, channels=32)
    assert (sizes.bytes(FORWARD), sizes.bytes(BOTH_PASSES)) == (3 * 640 * 2, 8 * 640 * 2)
    assert (sizes.flop(FORWARD), sizes.flop(BOTH_PASSES)) == (2 * 6 * 640, 2 * (6 + 17) * 640)


def nothing_measured():
    from kernels.tools import bench
    from kernels.tools.operators import OPERATORS

    return {name: bench.summary(cases, []) for name, cases in OPERATORS.items()}


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
    assert found in (tables or [kernels.bench_table({"rows": [], "summary": nothing_measured()}, kernels.NO_GPU)])


def test_replace_block_wants_its_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    replace_block(page, "x", "new\nlines")
    assert page.read_text() == "a\n<!-- x -->\nnew\nlines\n<!-- /x -->\nb\n"
    with pytest.raises(Exception, match="no lines <!-- y --> and <!-- /y -->"):
        replace_block(page, "y", "new")
