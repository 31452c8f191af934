"""The check of each operator as `repro kernels check` runs it: right kernels pass, wrong ones do not, all are tried."""

import dataclasses
import functools
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import triton_launch
from kernels.selective_scan import selective_scan
from kernels.tools import check
from kernels.tools.bi_wkv_cases import Sizes as WKVSizes
from kernels.tools.cases import DTYPES, describe_config
from kernels.tools.ms_deform_attn_cases import Sizes as AttentionSizes
from kernels.tools.operators import OPERATORS
from kernels.tools.selective_scan_cases import CASES as selective_scan_cases
from repro.core.record import write_record
from tests.slow import slow


@pytest.fixture(params=[slow(name) if name == "conv_norm" else name for name in OPERATORS])
def cases(request):
    return OPERATORS[request.param]


@pytest.mark.parametrize("dtype", ["fp32", slow("fp16")])
def test_a_row_of_right_and_of_wrong_kernels(cases, dtype, monkeypatch, tmp_path):
    """Each output and gradient is looked at: a hundredth of it more in fp32, or a NaN."""
    row = check.compare(cases, "default", cases.SMALL, dtype, seeds=[0])
    assert row["passed"] and row["not_finite"] == [], row
    assert set(row["errors"]) == set(row["limits"]) == {"out", *cases.INPUTS}
    assert vars(cases.SMALL).items() <= row.items() and (row["operator"], row["dtype"]) == (cases.NAME, dtype)
    assert check.repeat(cases, cases.SMALL, dtype, "cpu")["passed"]
    write_record(tmp_path / "kernels_check.json", {"rows": [row]}, {}, 0.0)
    _, right = check.draw_case(cases, cases.SMALL, 0)
    for name in right:
        for wrong in (1.01 * right[name] + 0.01, torch.full_like(right[name], float("nan"))):
            monkeypatch.setattr(cases, "kernels", lambda *_, wrong=wrong, name=name: (right | {name: wrong}).values())
            row = check.compare(cases, "default", cases.SMALL, "fp32", seeds=[0])
            assert row["passed"] is False and (name in row["not_finite"] or row["errors"][name] > row["limits"][name])


def test_the_plan_has_every_dtype_and_on_a_gpu_every_config(cases, monkeypatch):
    interpreted = [(check_, given) for _, check_, given, _ in check.planned(cases, "cpu")]
    assert {given[3] for check_, given in interpreted if check_ is check.compare} == {"fp32", "fp16"}
    assert check.repeat in {check_ for check_, _ in interpreted}
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(cases, "select", lambda backend, sizes, dtype, device: "triton")
    plan = list(check.planned(cases, "cpu"))
    compared = [(given, asked) for _, check_, given, asked in plan if check_ is check.compare]
    assert {given[3] for given, _ in compared} == {"fp32", "fp16", "bf16"}
    assert {given[2].tokens for given, _ in compared} >= {1, 2, 196, 197, 4200, 6400}
    for key, which in (("config", 0), ("backward_config", 1)):
        for dtype, given_dtype in DTYPES.items():
            found = [asked[key] for given, asked in compared if given[3] == dtype and key in asked]
            assert list(map(describe_config, found)) == list(map(describe_config, cases.configs(given_dtype)[which]))
    configured = [asked for _, asked in compared if {"config", "backward_config"} & set(asked)]
    assert sum(check_ is check.repeat for _, check_, _, _ in plan) == 1 + len(configured)
    assert sum(check_ is check.compile_op for _, check_, _, _ in plan) == 1
    limits = [cases.limit(name, DTYPES[given[3]], given[2]) for given, _ in compared for name in cases.INPUTS]
    assert max(limits) <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "numbers"),
    [
        ("bi_wkv", WKVSizes(batch=1, tokens=19, channels=35), (1, 3)),
        ("ms_deform_attn", AttentionSizes(batch=1, tokens=12, heads=2, head_dim=24, points=2), (1, 2, 3)),
    ],
)
def test_other_configs_give_the_same(name, sizes, numbers):
    cases = OPERATORS[name]
    how = cases, cases.draw(0, sizes), torch.float32, sizes
    default = check.run_kernels(*how)
    for number in numbers:
        other = check.run_kernels(*how, *(configs[number % len(configs)] for configs in cases.configs(torch.float32)))
        assert max(check.relative_errors(other, default, 1.0).values()) < 2e-6


def test_a_check_that_breaks_is_a_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of\nresources")

    monkeypatch.setattr(selective_scan_cases, "kernels", broken)
    rows = [check.check_one(selective_scan_cases, *each) for each in check.planned(selective_scan_cases, "cpu")]
    assert all(row["passed"] is False and row["reason"] == "RuntimeError: out of resources" for row in rows)
    assert {row["operator"] for row in rows} == {"selective_scan"}


def test_the_way_past_the_dispatcher_is_the_operator(cases):
    operator, inputs = cases.bind(cases.SMALL), cases.cast(cases.draw(0, cases.SMALL)[:-1], torch.float32)
    expected = operator(*inputs, backend="triton")
    with torch.inference_mode():
        assert torch.equal(operator(*inputs, backend="triton"), expected)


@pytest.mark.slow
def test_mamba_ssm_against_the_kernels(monkeypatch):
    """With ours in its place they agree in output and gradients; a wrong one does not; without one, no verdict."""
    sizes = selective_scan_cases.SMALL
    (name,), ((_, run),) = zip(*selective_scan_cases.PEERS.checks.items(), strict=True)
    peers = dataclasses.replace(selective_scan_cases.PEERS, checks={name: (sizes, run)})
    monkeypatch.setattr(selective_scan_cases, "PEERS", peers)
    how = selective_scan_cases, name, "cpu"
    assert check.compare_peer(*how)["passed"] is None

    def stands_in(u, delta, A, B, C, D, z, delta_bias, delta_softplus, slip=0.0):
        return selective_scan(u.mT, delta.mT, A, B.mT, C.mT, D + slip, z.mT, delta_bias).mT

    monkeypatch.setattr(selective_scan_cases, "missing", lambda: None)
    for slip, passed in ((0.0, True), (0.5, False)):
        module = SimpleNamespace(selective_scan_fn=functools.partial(stands_in, slip=slip))
        monkeypatch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", module)
        row = check.compare_peer(*how)
        assert row["passed"] is passed and set(row["errors"]) == {"out", *selective_scan_cases.INPUTS}, row
