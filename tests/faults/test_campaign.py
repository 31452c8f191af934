"""The fault lab and the campaign see every difference, and one fault of each kind ends as it should."""

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.campaign import FILES, GOOD, KILLED, Campaign, list_cases
from tests.faults.lab import CommandResult, describe_damage


@pytest.mark.parametrize(
    ("name", "content", "finished"),
    [
        ("artifacts/pretrain/weights", "weigh", False),
        ("artifacts/pretrain/.weights.x.tmp", "weights", True),
        (".runs/step_1.pt", "state", True),
        ("results/pretrain/metrics.json", None, True),
    ],
    ids=["half a file", "a temporary file", "a state", "a missing file"],
)
def test_what_a_kill_must_not_leave_is_found(tmp_path, name, content, finished):
    """In the checkout of a killed run, beside that of an uninterrupted one with the same results."""
    ours, whole = tmp_path / "killed", tmp_path / "whole"
    for root in (ours, whole):
        (root / ".runs").mkdir(parents=True)
        for result in ("artifacts/pretrain/weights", "results/pretrain/metrics.json"):
            (root / result).parent.mkdir(parents=True)
            (root / result).write_text(Path(result).name)
    assert not describe_damage(ours, whole, finished=True)
    (ours / name).unlink() if content is None else (ours / name).write_text(content)
    assert name in describe_damage(ours, whole, finished=finished)


@pytest.mark.slow
def test_a_fault_of_each_kind_ends_as_it_should(tmp_path):
    """One of each, or as many as the environment says."""
    usual = {"FAULT_KILLS": 2 * len(KILLED), "FAULT_FLIPS": len(FILES), "FAULT_PARAMS": 20}
    cases = list_cases(*(int(os.environ.get(name, count)) for name, count in usual.items()))
    campaign = Campaign(ROOT, tmp_path.resolve())
    outcomes = {case: campaign.try_case(case) for case in cases}
    assert {case: outcome for case, outcome in outcomes.items() if outcome not in GOOD} == {}


@pytest.mark.parametrize(("code", "err"), [(0, ""), (2, "Traceback\nrepro: bad"), (2, "bad"), (2, "repro: worse")])
def test_a_result_that_is_not_the_required_one(code, err):
    CommandResult(2, "", "repro: bad\n").require(2, "bad")
    with pytest.raises(AssertionError):
        CommandResult(code, "", err).require(2, "bad")


def test_the_last_step_is_found():
    result = CommandResult(0, "step 3, loss 1\nstep 12, loss 0.5\nat step 99\n", "")
    assert result.find_step("step") == 12 and result.find_step("continuing after step") == 0
