"""`repro verify --first-epochs`: which trainings of older code the code here begins alike."""

import json
from pathlib import Path

import pytest

from repro.core.freshness import FOLLOWED, OTHER_CODE
from repro.core.paths import Paths
from repro.core.record import write_json
from repro.graph import find_old_records
from repro.papers.first_epochs import follow_records, judge
from repro.tasks.classification.spec import SPEC
from tests.stages.helpers import edit


def make_old(file: Path) -> Path:
    """The record, as if older code had made it."""
    content = json.loads(file.read_text())
    content["identity"]["number_hash"] = "0"
    file.write_text(json.dumps(content))
    return file


def list_old() -> dict[str, list[str]]:
    return {why: [Path(each.path) for each in old] for why, old in find_old_records(Paths(Path.cwd())).items()}


def test_a_variant_is_stale_no_more_while_its_record_and_curve_say_what_the_code_does(checkout, repro_cli, monkeypatch):
    edit("    epochs: 2\n", "    epochs: 1\n", "[0, 2]", "[]")
    repro_cli.run("ablate", "--variant", "conv1d", "--seeds", "2", "--epochs", "2", "--no-speed")
    (record,) = Path("results/measured").rglob("conv1d/metrics.json")
    make_old(record)
    assert list_old() == {OTHER_CODE: [record]}
    made = json.loads(record.read_text())
    another = json.loads(record.read_text())
    another["identity"]["recipe"]["epochs"] = 3
    record.write_text(json.dumps(another))
    assert "recipe or its data are others" in repro_cli.run("verify", "--first-epochs")
    assert not list(Path("results/measured").rglob("first_epochs.json"))
    record.write_text(json.dumps(made))

    curve = record.with_name("curve.csv")
    whole = curve.read_text()
    header, first, *rest = whole.splitlines()
    place, values = header.split(",").index("train_loss"), first.split(",")
    values[place] = str(float(values[place]) * 1.002)
    curve.write_text("\n".join([header, ",".join(values), *rest, ""]))
    assert "does not tell" in repro_cli.run("verify", "--first-epochs")
    assert list_old() == {OTHER_CODE: [record]}
    with monkeypatch.context() as patched:
        patched.setattr("repro.papers.first_epochs.build_job", None)  # what is known is not trained again
        assert "does not tell" in repro_cli.run("verify", "--first-epochs")

    curve.write_text(whole)
    (known,) = Path("results/measured").rglob("first_epochs.json")
    known.unlink()
    assert "does not tell" not in repro_cli.run("verify", "--first-epochs")
    assert list_old() == {FOLLOWED: [record]}
    made["metrics"]["by_seed"][0]["weights_hash"] = "other"  # of which nothing is known
    record.write_text(json.dumps(made))
    assert list_old() == {OTHER_CODE: [record]}


@pytest.mark.parametrize(
    ("loss", "norm", "follows"),
    [
        (2.0001, 1.0, True),  # by its norm, which is the record's
        (2.0, 1.001, True),  # by its loss
        (2.003, 1.0, False),  # another training
        (2.0001, 1.001, None),  # one is as near in both
    ],
)
def test_a_training_is_known_by_what_others_do_not_have(loss, norm, follows):
    def means(loss: float, norm: float) -> dict[str, float]:
        return {"train_loss": loss, "train_grad_norm": norm}

    assert judge(means(loss, norm), means(2.0, 1.0), [means(2.0002, 1.002), means(2.1, 3.0)]) is follows
    assert not judge(means(loss, norm), means(2.0, 1.0), [means(2.0, 1.0)])  # two records are alike


def test_records_of_the_graph_and_of_no_training_are_left_out(checkout):
    names = "count/metrics", "pretrain/nano/metrics", "measured/cpu/faults/metrics", "measured/cpu/x"
    files = [Path("results", f"{name}.json") for name in names]
    for file in files:
        write_json(file, {"metrics": {}, "identity": {}})
    assert not list(follow_records(Paths(Path.cwd()), list(map(str, files)), [], {"pretrain": SPEC}))


def test_a_cell_of_the_parameters_that_was_trained_outside_the_pipeline(checkout, repro_cli):
    edit("    epochs: 2\n", "    epochs: 1\n", "[0, 2]", "[]")
    repro_cli.run("pretrain", "--cell", "nano", "--seeds", "1", "--epochs", "2")
    (file,) = Path("results/measured").rglob("metrics.json")
    make_old(file)
    assert "does not tell" not in repro_cli.run("verify", "--first-epochs")
    assert list_old() == {FOLLOWED: [file]}
