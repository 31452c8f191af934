"""The campaign of faults: it finds what a kill may leave, and one fault of each kind ends as it should."""

from pathlib import Path

import pytest

from tests.faults.campaign import FILES, GOOD, KILLED, Campaign, describe_damage, list_cases, summarise

ROOT = Path(__file__).parents[2]


@pytest.fixture
def killed(tmp_path) -> tuple[Path, Path]:
    """A checkout of a killed run and one of an uninterrupted run, with the same results."""
    checkouts = tmp_path / "killed", tmp_path / "whole"
    for root in checkouts:
        (root / "results" / "pretrain").mkdir(parents=True)
        (root / ".runs").mkdir()
        for name in ("weights", "metrics.json"):
            (root / "results" / "pretrain" / name).write_text(name)
    return checkouts


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
def test_what_a_kill_must_not_leave_is_found(killed, name, content, finished):
    ours, whole = killed
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
