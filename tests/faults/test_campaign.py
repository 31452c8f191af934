"""The fault lab sees every difference, and every stage that is killed ends as it should."""

import itertools
import os
from pathlib import Path

import pytest

from tests.faults.campaign import KILLED, Campaign
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
def test_a_killed_stage_ends_as_if_nothing_had_happened(tmp_path):
    """Each twice, at a random moment and before a change of the file system, or as often as the environment says."""
    campaign = Campaign(tmp_path.resolve())
    kills = int(os.environ.get("FAULT_KILLS", 2 * len(KILLED)))
    cases = [(name, number // len(KILLED)) for number, name in zip(range(kills), itertools.cycle(KILLED))]
    outcomes = {case: campaign.try_kill(*case) for case in cases}
    assert {case: found for case, found in outcomes.items() if found} == {}


@pytest.mark.parametrize(("code", "err"), [(0, ""), (2, "Traceback\nrepro: bad"), (2, "bad"), (2, "repro: worse")])
def test_a_result_that_is_not_the_required_one(code, err):
    CommandResult(2, "", "repro: bad\n").require(2, "bad")
    with pytest.raises(AssertionError):
        CommandResult(code, "", err).require(2, "bad")
