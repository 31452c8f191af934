"""`repro verify`: scores of the working tree against those of a commit."""

import json
import subprocess

import pytest

from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.report.reproduced import describe_scores, list_scores

SEEDS = {"seeds": [0, 1, 2], "held_out_images": 100, "top1_ci95_percent": [48.0, 52.0]}


def git(root, *arguments):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True)


def write(root, cell, score, details):
    folder = root / "results/pretrain" / cell
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps({"top1_percent": score}))
    (folder / "details.json").write_text(json.dumps({"metrics": details, "identity": {}}))


@pytest.fixture
def held(tmp_path):
    """A repository whose commit holds two trainings of 50 %: one of one seed, one of three with their interval."""
    git(tmp_path, "init", "-q")
    write(tmp_path, "one", 50.0, {"seeds": [0], "held_out_images": 100})
    write(tmp_path, "three", 50.0, SEEDS)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "results")
    return tmp_path


# Wilson's 95 % interval of 50 of 100, by hand: (0.5 + z²/200 ± z √(0.25/100 + z²/40000)) / (1 + z²/100) = 40.38 and
# 59.62 at z = 1.96
@pytest.mark.parametrize(
    ("one", "three", "left"), [(50.0, 50.0, 0), (40.5, 51.9, 0), (40.3, 50.0, 1), (50.0, 52.1, 1), (59.7, 47.9, 2)]
)
def test_a_score_may_differ_within_its_interval(held, one, three, left):
    write(held, "one", one, {})
    write(held, "three", three, {})
    scores = list_scores(Paths(held), ["pretrain"], "HEAD")
    assert [score.has_left for score in scores].count(True) == left
    equal = (one == 50) + (three == 50)
    lines = describe_scores(scores, "HEAD")
    assert lines[0].startswith(f"{equal} of 2") and len(lines) == 1 + 2 - equal


def test_a_missing_score_is_no_success(held):
    (held / "results/pretrain/one/metrics.json").unlink()
    assert [score.has_left for score in list_scores(Paths(held), ["pretrain"], "HEAD")] == [True, False]


@pytest.mark.parametrize(("stages", "commit"), [(["pretrain"], "nonsense"), (["detect"], "HEAD")])
def test_what_cannot_be_compared_is_said(held, stages, commit):
    with pytest.raises(UserError, match=commit):
        list_scores(Paths(held), stages, commit)
