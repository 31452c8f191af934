"""`repro verify`: scores of the working tree against those of a commit."""

import json
import subprocess

import pytest

from repro.core.errors import UserError
from repro.report.records import read_sources
from repro.report.reproduced import describe_scores, list_scores
from stages import verify

SEED = {"seeds": [0], "held_out_images": 100}


def average(score):
    """The details of three seeds, whose mean has an interval of two points on either side."""
    return {"seeds": [0, 1, 2], "held_out_images": 100, "top1_ci95_percent": [score - 2, score + 2]}


def commit(root):
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "results"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True)


def write(checkout, cell, score, details):
    checkout.write(f"results/pretrain/{cell}/metrics.json", json.dumps({"top1_percent": score}))
    checkout.write(f"results/pretrain/{cell}/record.json", json.dumps({"metrics": details, "identity": {}}))


@pytest.fixture
def held(checkout):
    """A repository whose commit holds two trainings of 50 %: one of one seed, one of three with their interval."""
    write(checkout, "one", 50.0, SEED)
    write(checkout, "three", 50.0, average(50))
    commit(checkout.paths.root)
    return checkout


# by hand, Wilson's 95 % interval of k of 100 begins at 40.38 for 50, and ends at 40.63 for 31 and at 39.58 for 30
@pytest.mark.parametrize(
    ("one", "three", "left"), [(50.0, 50.0, 0), (31.0, 53.9, 0), (30.0, 50.0, 1), (50.0, 54.1, 1), (70.0, 45.9, 2)]
)
def test_a_score_may_differ_while_the_intervals_meet(held, one, three, left):
    write(held, "one", one, SEED)
    write(held, "three", three, average(three))
    scores = list_scores(held.paths, ["pretrain"], "HEAD")
    assert [score.is_beyond_chance for score in scores].count(True) == left
    equal = (one == 50) + (three == 50)
    lines = describe_scores(scores, "HEAD")
    assert lines[0].startswith(f"{equal} of 2") and len(lines) == 1 + 2 - equal


def test_times_are_no_records_and_a_cell_may_be_called_run(checkout):
    checkout.train("replications/cpu/pretrain/long_run", "nano", "digits")
    checkout.write("results/replications/cpu/run.json", "{}")
    (source,) = read_sources(checkout.paths, [])
    assert source.place == "pretrain/long_run" and (checkout.paths.root / source.run_file).is_file()


def test_a_missing_score_is_no_success(held):
    (held.paths.results / "pretrain/one/metrics.json").unlink()
    assert [score.is_beyond_chance for score in list_scores(held.paths, ["pretrain"], "HEAD")] == [True, False]


def test_records_that_no_training_made_here_are_not_counted(checkout, monkeypatch, capsys):
    """Those of `repro seeds` come from committed files."""
    write(checkout, "one", 50.0, SEED)
    checkout.write("results/pretrain_seeds/one/metrics.json", json.dumps({"top1_percent": 50.0}))
    checkout.write("results/pretrain_seeds/one/record.json", json.dumps({"metrics": SEED, "identity": {}}))
    commit(checkout.paths.root)
    monkeypatch.chdir(checkout.paths.root)
    verify.command("HEAD")
    assert capsys.readouterr().out.startswith("1 of 1 ")


@pytest.mark.parametrize(("stages", "commit"), [(["pretrain"], "nonsense"), (["detect"], "HEAD")])
def test_what_cannot_be_compared_is_said(held, stages, commit):
    with pytest.raises(UserError, match=commit):
        list_scores(held.paths, stages, commit)


def train(checkout, machine, *top1, **more):
    """A training of the same variant on a machine, of the seeds 0, 1, ... with these accuracies."""
    known = {"held_out_images": 100, "top1": top1, "top1_ci95_percent": None, "top1_ci95_percent_reason": "x", **more}
    checkout.train(f"replications/{machine}/ablate/a_digits", "vittt_nano", "digits", **known)


def test_one_record_serves_for_those_of_several_machines(checkout):
    """That of the most seeds; the others come with it, unless their recipe is another."""
    train(checkout, "p", 50.0, 60.0)
    train(checkout, "q", 51.0, 63.0, 90.0)
    train(checkout, "r", 50.0, 60.0)

    def list_machines():
        sources = [source for source in read_sources(checkout.paths, ["pretrain"]) if source.most_seeds]
        return [[each.path.split("/")[2] for each in (source, *source.others)] for source in sources]

    assert list_machines() == [["q", "p", "r"]]
    with checkout.edit("replications/r/ablate/a_digits.json") as record:
        record["identity"]["recipe"]["learning_rate"] = 1.0
    assert list_machines() == [["q", "p"], ["r"]]
