"""The check of each operator as `repro kernels check` runs it: right kernels pass, wrong ones do not, all are tried."""

import pytest
import torch

from kernels import triton_launch
from kernels.tools import check
from kernels.tools.cases import DTYPES, describe_config
from kernels.tools.operators import OPERATORS
from kernels.tools.selective_scan_cases import CASES as selective_scan_cases
from repro.core.record import write_record
from tests.slow import slow


# their kernels are compared with the plain path in `test_fused_block.py` too
@pytest.fixture(params=[slow(name) if name in ("conv_norm", "scan_convs") else name for name in OPERATORS])
def cases(request):
    return OPERATORS[request.param]


@pytest.mark.parametrize("dtype", ["fp32", slow("fp16")])
def test_a_row_of_right_and_of_wrong_kernels(cases, dtype, monkeypatch, tmp_path):
    """Each output and gradient is looked at: a hundredth of it more in fp32, or a NaN."""
    row = check.compare(cases, "default", cases.SMALL, dtype, seeds=[0])
    assert row["passed"] and row["not_finite"] == [], row
    assert set(row["errors"]) == set(row["limits"]) == {"out", *cases.INPUTS}
    assert vars(cases.SMALL).items() <= row.items() and (row["operator"], row["dtype"]) == (cases.NAME, dtype)
    assert dtype == "fp32" or check.repeat(cases, cases.SMALL, dtype, "cpu")["passed"]
    write_record(tmp_path / "kernels_check.json", {"rows": [row]}, {}, 0.0)
    _, right = check.draw_case(cases, cases.SMALL, 0)
    for name in right:
        for wrong in (1.01 * right[name] + 0.01, torch.full_like(right[name], float("nan"))):
            monkeypatch.setattr(cases, "kernels", lambda *_, wrong=wrong, name=name: (right | {name: wrong}).values())
            row = check.compare(cases, "default", cases.SMALL, "fp32", seeds=[0])
            assert row["passed"] is False and (name in row["not_finite"] or row["errors"][name] > row["limits"][name])


def test_the_plan_has_every_dtype_and_on_a_gpu_every_config(cases, monkeypatch):
    def plan():
        checks = list(check.planned(cases, "cpu"))
        return [run.func for _, run in checks], [run for _, run in checks if run.func is check.compare]

    kinds, compared = plan()
    assert {run.args[3] for run in compared} == {"fp32", "fp16"} and check.repeat in kinds
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(cases, "select", lambda *_: "triton")
    kinds, compared = plan()
    assert {run.args[3] for run in compared} == set(DTYPES)
    assert {run.args[2].tokens for run in compared} >= {1, 2, 196, 197, 4200, 6400}
    configured = [run for run in compared if "configs" in run.keywords]
    for which in (0, 1):
        for dtype, given_dtype in DTYPES.items():
            found = [run.keywords["configs"][which] for run in configured if run.args[3] == dtype]
            wanted = cases.configs(given_dtype)[which]
            assert list(map(describe_config, filter(None, found))) == list(map(describe_config, wanted))
    assert kinds.count(check.repeat) == 1 + len(configured) and kinds.count(check.compile_op) == 1


def test_a_check_that_breaks_is_a_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of\nresources")

    monkeypatch.setattr(selective_scan_cases, "kernels", broken)
    rows = [check.check_one(selective_scan_cases, *each) for each in check.planned(selective_scan_cases, "cpu")]
    assert all(row["passed"] is False and row["reason"] == "RuntimeError: out of resources" for row in rows)
    assert {row["operator"] for row in rows} == {"selective_scan"}
