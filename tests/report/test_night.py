"""The night's questions are the paper's, only its own records fill its slots, and ImageNet-1K is apart."""

import re

import pytest
from scipy import stats

from repro.core.config import load_yaml
from repro.papers.vision_ttt.sections import list_night_pairs, list_night_scores, load_questions
from repro.report.document import plain
from repro.report.results import Missing
from tests.conftest import ROOT

PROFILE = load_yaml(ROOT / "profiles" / "night.yaml")
SEEDS = {"Vittt-T": (60.0, 61.0, 62.5), "DeiT-T": (50.0, 51.2, 52.4), "Vim-T": (60.1, 61.1, 62.4)}


def train(checkout, data="cifar100", names=None, **more):
    """Records of the models of the night on a data set."""
    for name, model in load_questions()["models"].items():
        if names is None or name in names:
            stage, cell = model["cell"].split("/")
            params = PROFILE[stage][f"{cell}_{data}"]
            about = {"options": params["options"], "data": data, "classes": 100, "split": "test", "image_size": 32}
            about |= {"epochs": 30, "held_out_images": 10_000, "top1": SEEDS.get(name, (55.0, 55.5, 56.0))}
            checkout.train(f"{model['cell']}_{data}", params["model"], **{"kind": data} | about | more)


def read_table(blocks) -> list[list[str]]:
    (found,) = blocks
    return [[plain(*line) for line in row] for row in found.rows]


def test_every_pair_is_ordered_so_by_the_paper_and_trained_by_the_profile(ledger):
    questions = load_questions()
    for place, pairs in questions["pairs"].items():
        for better, worse in pairs:
            rows = [questions["models"][name]["row"] for name in (better, worse)]
            printed = [float(ledger.entries[f"{row}.top1_percent"].printed) for row in rows]
            assert printed[0] > printed[1], (better, worse)
            assert rows[1].startswith(place.lower().replace(" ", ""))
    for model in questions["models"].values():
        stage, cell = model["cell"].split("/")
        assert {f"{cell}_{data}" for data in questions["data"]} <= set(PROFILE[stage])
    assert set(questions["data"]) == set(PROFILE["prepare_data"])


def test_the_slots_are_empty_before_the_run_and_filled_after_it(checkout):
    """Holm's correction is over all pairs that were named, not over those that happen to be there."""
    assert {cell for row in read_table(list_night_scores(checkout.report())) for cell in row[1:]} == {"–"}
    for names in ((), ("Vittt-T", "DeiT-T")):
        train(checkout, names=names)
        assert {cell for row in read_table(list_night_pairs(checkout.report())) for cell in row[3:]} == {"–"}
    train(checkout)
    pairs = read_table(list_night_pairs(checkout.report()))
    filled = {row[2]: row[3:] for row in pairs if row[:2] == ["Table 1", "CIFAR-100"]}
    assert not any("–" in cells for cells in filled.values())
    assert {cell for row in pairs if row[1] == "ImageNet-100" for cell in row[3:]} == {"–"}
    found = stats.ttest_rel(SEEDS["Vittt-T"], SEEDS["DeiT-T"])
    difference, p, word = filled["Vittt-T > DeiT-T"]
    assert difference.startswith("+9.97") and p == f"{4 * found.pvalue:.3f}" and word == "ordering seen"
    assert filled["Vittt-T > Vim-T"][2] == "not separated"
    scores = {row[0]: row[1:] for row in read_table(list_night_scores(checkout.report()))}
    assert scores["Vittt-T"][0].startswith("61.17") and scores["Vittt-T"][1] == "–"


def test_models_that_were_trained_differently_are_not_compared(checkout):
    train(checkout)
    train(checkout, names=("DeiT-T",), epochs=60)
    with pytest.raises(Missing, match="differ on cifar100"):
        list_night_pairs(checkout.report())


@pytest.mark.parametrize("data", ["cifar100", "imagenet100"])
def test_no_accuracy_of_the_night_is_next_to_one_of_imagenet(checkout, data):
    before = checkout.judge()
    # as if ImageNet's whole validation split had been taken
    whole = {"split": "val", "held_out_images": 50_000, "image_size": 224, "options": {}}
    train(checkout, data, **whole)
    assert checkout.judge() == before
    page = checkout.page()
    assert "61.17" in page.partition("## One GPU, one night")[2]
    lines = [line for line in page.splitlines() if "61.17" in line]
    assert all(re.search(r"cifar100|imagenet100|^\| Vittt-T \|", line) for line in lines), lines
    train(checkout, data, **whole, kind="imagenet")
    assert checkout.judge() != before, "the same records are there where their data are ImageNet-1K"
