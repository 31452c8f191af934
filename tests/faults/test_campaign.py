"""The fault lab and the campaign see every difference, and one fault of each kind ends as it should."""

import re

import pytest

from stages.selftest import GROUPS
from tests.conftest import ROOT, run_python
from tests.faults import test_faults
from tests.faults.campaign import FILES, GOOD, KILLED, Campaign, list_cases, summarise
from tests.faults.lab import CommandResult, describe_damage


@pytest.mark.parametrize(
    ("name", "content", "finished"),
    [
        ("results/pretrain/weights", "weigh", False),
        ("results/pretrain/.weights.x.tmp", "weights", True),
        (".runs/step_1.pt", "state", True),
        ("results/pretrain/metrics.json", None, True),
    ],
    ids=["half a file", "a temporary file", "a state", "a missing file"],
)
def test_what_a_kill_must_not_leave_is_found(tmp_path, name, content, finished):
    """In the checkout of a killed run, beside that of an uninterrupted one with the same results."""
    ours, whole = tmp_path / "killed", tmp_path / "whole"
    for root in (ours, whole):
        (root / "results" / "pretrain").mkdir(parents=True)
        (root / ".runs").mkdir()
        for result in ("weights", "metrics.json"):
            (root / "results" / "pretrain" / result).write_text(result)
    assert not describe_damage(ours, whole, finished=True)
    (ours / name).unlink() if content is None else (ours / name).write_text(content)
    assert name in describe_damage(ours, whole, finished=finished)


def test_the_counts_are_of_each_kind():
    found = summarise({"kill detect 0": "equal", "kill detect 1": "weights: differs", "flip state 0": "refused"})
    assert found["kill"] == {"detect": {"tried": 2, "wrong": 1, "equal": 1}} and found["flip"]["state"]["refused"] == 1


@pytest.mark.slow
def test_a_fault_of_each_kind_ends_as_it_should(tmp_path):
    campaign = Campaign(ROOT, tmp_path.resolve())
    outcomes = {case: campaign.try_case(case) for case in list_cases(2 * len(KILLED), len(FILES), 20)}
    assert {case: outcome for case, outcome in outcomes.items() if outcome not in GOOD} == {}


@pytest.mark.parametrize(("code", "err"), [(0, ""), (2, "Traceback\nrepro: bad"), (2, "bad"), (2, "repro: worse")])
def test_a_result_that_is_not_the_required_one(code, err):
    CommandResult(2, "", "repro: bad\n").require(2, "bad")
    with pytest.raises(AssertionError):
        CommandResult(code, "", err).require(2, "bad")


def test_the_last_step_is_found():
    result = CommandResult(0, "step 3, loss 1\nstep 12, loss 0.5\nat step 99\n", "")
    assert result.find_step("step") == 12 and result.find_step("continuing after step") == 0


@pytest.mark.slow
def test_the_chosen_faults_are_done_as_often_as_asked():
    command = "-m repro selftest faults --only kill,batch --kills 3"
    done = run_python(*command.split(), PYTEST_ADDOPTS="--collect-only -qq")
    assert done.returncode == 0 and re.search(r"\b9/\d+ tests collected", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_a_test(group):
    assert any(group in name for name in vars(test_faults) if name.startswith("test_"))
