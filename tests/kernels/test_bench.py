"""What the bench times and counts: peers get the same work, bytes and FLOPs are those of the tensors."""

import dataclasses
import functools
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import ttt_linear
from kernels.selective_scan import selective_scan
from kernels.tools import bench, check, ms_deform_attn_cases, peers, selective_scan_cases, ttt_linear_cases
from kernels.tools.bench import BOTH_PASSES, FORWARD, count_work
from kernels.tools.bi_wkv_cases import Sizes as WKVSizes
from kernels.tools.cases import describe_config
from kernels.tools.operators import OPERATORS
from repro.core.record import write_record

CPU = torch.device("cpu")
ROUTES = selective_scan_cases.Sizes(batch=2, tokens=10, channels=32, **selective_scan_cases.VMAMBA)


def run_step(cases, sizes, name, passes, **changed):
    """The output of the named implementation, or the gradients by the inputs' names, with some inputs changed."""

    given = cases.layer_inputs

    def change(sizes, device):
        return [changed.get(name, x) for name, x in zip(cases.INPUTS, given(sizes, device), strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "layer_inputs", change)
        result = bench.op_step(cases, sizes, name, passes, CPU)()
    return result if passes == FORWARD else dict(zip(cases.INPUTS, result, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_timed_runs(name):
    """The steps of the bench, on the torch backend at a small size, in bf16."""
    cases = OPERATORS[name]
    assert cases.implementations(cases.SMALL)[:2] == ["triton", "torch"]
    inputs = cases.layer_inputs(cases.SMALL, CPU)
    out = run_step(cases, cases.SMALL, "torch", FORWARD)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, cases.bind(cases.SMALL)(*inputs, backend="torch"))
    gradients = run_step(cases, cases.SMALL, "torch", BOTH_PASSES)
    assert [g.shape for g in gradients.values()] == [x.shape for x in inputs]
    assert all(g.isfinite().all() for g in gradients.values())
    shapes = cases.SHAPES
    assert cases.COMPARED in shapes and len(set(shapes)) == len(shapes)
    assert len({sizes.batch for sizes in shapes}) == 1


@pytest.mark.parametrize("kind", ["chunk", "fused_chunk"])
def test_flash_linear_attention_gets_the_same_work(monkeypatch, kind):
    """With ours in its place: one call with both directions as heads, both forward, and lr constant in a chunk."""

    def stands_in(q, k, v, w, b, eta, scale, eps, chunk_size, initial_state, initial_state_bias, output_final_state):
        assert {x.dtype for x in (q, k, v, w, b, eta)} == {torch.bfloat16} and scale == 1.0 and not output_final_state
        c = 1 / torch.arange(1, chunk_size + 1)
        lr = eta[..., 0] * (1 / c)[torch.arange(q.shape[1]) % chunk_size, None]
        shared = c, initial_state[0], initial_state_bias[0, :, 0], w, b
        return ttt_linear(q, k, v, lr.bfloat16(), *shared, chunk_size=chunk_size, eps=eps, backend="torch"), None, None

    module = SimpleNamespace(chunk_ttt_linear=stands_in, fused_chunk_ttt_linear=stands_in)
    monkeypatch.setattr(peers, "_import", lambda name: module)
    cases, sizes = ttt_linear_cases.CASES, ttt_linear_cases.Sizes(batch=2, tokens=40, heads=2, head_dim=16)
    weight = 1 + 0.5 * torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    changed = {"ln_weight": weight, "token_scale": (1 / torch.arange(1, 17)).repeat(2, 1)}
    given = dict(zip(cases.INPUTS, cases.layer_inputs(sizes, CPU), strict=True)) | changed
    q, k, v, lr, *shared = given.values()
    directions = [(q[:, :, r], k[:, :, r], v[:, :, r], lr, *(x[r] for x in shared)) for r in (0, 1)]
    ours = [ttt_linear(*own, backend="torch") for own in directions]
    out = run_step(cases, sizes, f"fla {kind}", FORWARD, **changed)
    assert check.relative_error(out, torch.stack(ours, 2)) < 1e-2
    gradients = run_step(cases, sizes, f"fla {kind}", BOTH_PASSES, **changed)
    assert all(x.any() for x in gradients.values())


def test_mamba_ssm_gets_the_same_work(monkeypatch):
    """With ours in its place, in its layout, (B,E,T) and one direction."""

    def stands_in(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        assert {x.dtype for x in (u, delta, B, C, z)} == {torch.bfloat16}
        assert {x.dtype for x in (A, D, delta_bias)} == {torch.float32}
        assert u.shape == delta.shape == z.shape == (2, 32, 21) and B.shape == C.shape == (2, 16, 21) and delta_softplus
        assert all(x.stride(-1) == 1 for x in (u, delta, B, C, z))
        return selective_scan(u.mT, delta.mT, A, B.mT, C.mT, D, z.mT, delta_bias, backend="torch").mT

    module = SimpleNamespace(selective_scan_fn=stands_in)
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", module)
    cases, sizes = selective_scan_cases.CASES, selective_scan_cases.Sizes(batch=2, tokens=21, channels=32)
    theirs, ours = (run_step(cases, sizes, name, FORWARD) for name in ("mamba-ssm", "torch"))
    torch.testing.assert_close(theirs.movedim(-1, 1), ours)
    assert all(x.any() for x in run_step(cases, sizes, "mamba-ssm", BOTH_PASSES).values())


def test_a_row_that_breaks_is_a_row(monkeypatch, tmp_path):
    """Neither a peer's failure nor a missing one ends the measurement, and numbers that are missing have a reason."""

    def broken(*_):
        raise AssertionError("grid\nis too large")

    cases = ttt_linear_cases.CASES
    sizes = ttt_linear_cases.Sizes(tokens=196, heads=3)
    step = sizes, FORWARD, "fla chunk"
    monkeypatch.setattr(bench, "op_step", broken)
    monkeypatch.setattr(cases, "missing", lambda: None)
    row = bench.measure(cases, CPU, step, find={}.get)
    assert (row["status"], row["reason"], row["median_ms"]) == ("failed", "AssertionError: grid is too large", None)
    monkeypatch.setattr(cases, "missing", lambda: "not installed")
    unavailable = bench.measure(cases, CPU, step, find={}.get)
    assert unavailable["status"] == "unavailable"
    monkeypatch.undo()
    # a CPU has no kernels, and no memory that CUDA counts
    memory = [
        (cases.SMALL, bench.MEMORY, name) for _, passes, name in bench.planned(cases).values() if passes == bench.MEMORY
    ]
    rows = [bench.measure(cases, CPU, step, find={}.get) for step in memory]
    assert [(row["status"], bool(row["reason"])) for row in rows] == [("failed", True)] * 2
    copied = bench._filled(bench._blank(cases, "copy", sizes, FORWARD), [1.0, 2.0, 3.0], None, 0.0)
    ours = bench._filled(bench._blank(cases, "triton", sizes, FORWARD), [1.0, 2.0, 3.0], 1.0, 5.0)
    assert ours["share_of_copy_percent"] == 50 and ours["gb_per_s"] == pytest.approx(
        count_work(cases, sizes, FORWARD)[0] / 2 / 1e6
    )
    config = cases.configs(torch.bfloat16)[0][0]
    write_record(
        tmp_path / "kernels.json",
        {"rows": [row, unavailable, copied, ours, {"config": describe_config(config)}]},
        {},
        0.0,
    )


@pytest.mark.parametrize("name", [*OPERATORS, "VMamba's routes"])
def test_bytes_are_those_of_the_tensors_that_grow_with_t(name):
    """Inputs and output; then the inputs, the gradient of the output, and theirs. Parameters are left out."""
    cases = OPERATORS.get(name, selective_scan_cases.CASES)
    sizes = cases.SMALL if name in OPERATORS else ROUTES
    inputs = dict(zip(cases.INPUTS, cases.layer_inputs(sizes, CPU), strict=True))
    grow = {"lr", "locations", *(("weights",) if name == "ms_deform_attn" else ()), *cases.ACTIVATIONS}
    read = sum(x.nbytes for key, x in inputs.items() if key in grow and x is not None)
    written = cases.bind(sizes)(*inputs.values(), backend="torch").nbytes
    assert count_work(cases, sizes, FORWARD)[0] == read + written
    assert count_work(cases, sizes, BOTH_PASSES)[0] == (read + written) + (read + written) + read


attention = functools.partial(ms_deform_attn_cases.Sizes, batch=2, tokens=12, heads=2, head_dim=8)
# multiply-adds forward, and of the backward pass alone
FLOPS = {
    # of 24 channels and their 64 hidden ones: nine taps; four of two convolutions of keys and queries; a product to two
    # halves
    **{
        name: (dataclasses.replace(OPERATORS[name].TYPICAL, batch=2, tokens=10, height=5), 20 * macs, 2 * 20 * macs)
        for name, macs in (
            ("conv_norm", 9 * 24),
            ("scan_convs", 4 * 2 * 2 * 24),
            ("gated_norm", 0),
            ("gated_linear", 24 * 2 * 64),
        )
    },
    # Ω(SSM) of the Vim paper: 3 T·E·N + T·E·N in each direction or route, twice that back
    "the selective scan": (
        selective_scan_cases.Sizes(batch=2, tokens=10, channels=32),
        (3 + 1) * (2 * 10 * 2 * 32 * 16),
        2 * (3 + 1) * (2 * 10 * 2 * 32 * 16),
    ),
    "VMamba's routes": (ROUTES, (3 + 1) * (2 * 10 * 4 * 32), 2 * (3 + 1) * (2 * 10 * 4 * 32)),
    # of 640 tokens and channels: 2 sums in 2 directions, and the token itself in both sums
    "Bi-WKV": (WKVSizes(batch=2, tokens=10, channels=32), (2 * 2 + 2) * 640, (6 + 2 + 1 + 2 + 2 + 4) * 640),
    # samples of four points in two heads: a channel is four neighbours and a weight; back, it is multiplied with four
    # and added to four. A map of 3 by 4 pixels, and beside it those of twice and half the sides, 64 pixels together
    "attention to a level": (attention(levels=1), 5 * (2 * 64 * 2 * 1 * 4 * 8), 8 * (2 * 64 * 2 * 1 * 4 * 8)),
    "attention to three levels": (attention(levels=3), 5 * (2 * 12 * 2 * 3 * 4 * 8), 8 * (2 * 12 * 2 * 3 * 4 * 8)),
}


@pytest.mark.parametrize(("sizes", "forward", "backward"), FLOPS.values(), ids=FLOPS)
def test_flop_by_hand(sizes, forward, backward):
    cases = next(each for each in OPERATORS.values() if type(each.SMALL) is type(sizes))
    cases = OPERATORS.get(getattr(sizes, "kind", ""), cases)
    found = [count_work(cases, sizes, passes)[1] for passes in (FORWARD, BOTH_PASSES)]
    assert found == [2 * forward, 2 * (forward + backward)]
