"""The night's questions are the paper's and can be answered, only its own records fill its slots, and ImageNet-1K is
apart.
"""

import re

import numpy as np
import pytest
from scipy import stats

from repro.core.config import load_yaml
from repro.papers.vision_ttt.sections import (
    detectable,
    list_night_pairs,
    list_night_power,
    list_night_scores,
    load_questions,
    printed_difference,
)
from repro.report.markdown import show_p
from repro.report.power import detectable_difference
from repro.report.results import Missing
from tests.conftest import ROOT

PROFILE = load_yaml(ROOT / "profiles" / "night.yaml")
SEEDS = {"Vittt-T": (60.0, 61.0, 62.5), "DeiT-T": (50.0, 51.2, 52.4), "Vim-T": (60.1, 61.1, 62.4)}


def repeat(top1: tuple[float, ...], seeds: int) -> tuple[float, ...]:
    """So many accuracies, by going round."""
    return tuple(np.resize(top1, seeds).tolist())


def train(checkout, data="cifar100", names=None, **more):
    """Records of the models of the night on a data set."""
    for name, model in load_questions()["models"].items():
        if names is None or name in names:
            stage, cell = model["cell"].split("/")
            if (params := PROFILE[stage].get(f"{cell}_{data}")) is None:  # the designs, on ImageNet-100
                continue
            about = {"options": params["options"], "data": data, "classes": 100, "split": "test", "image_size": 32}
            top1 = repeat(SEEDS.get(name, (55.0, 55.5, 56.0)), len(params["seeds"]))
            about |= {"epochs": 30, "held_out_images": 10_000, "top1": top1}
            checkout.train(f"{model['cell']}_{data}", params["model"], **{"kind": data} | about | more)


def search(checkout, data="cifar100", trials=5, names=None):
    """Records of the searches of the models of the night on a data set."""
    for name, model in load_questions()["models"].items():
        if names is None or name in names:
            tried = [{"lr": 1e-3 * 2**rank} for rank in range(trials)]
            cell = f"{model['cell'].partition('/')[2]}_{data}"
            checkout.record(f"replications/gpu/tune/{cell}", {"split": "tune", "data": data, "trials": tried})


def read_table(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def list_models(pairs) -> set[str]:
    return {name for pair in pairs for name in pair}


def test_every_pair_is_ordered_so_by_the_paper_and_trained_by_the_profile(ledger):
    questions = load_questions()
    for listed in (questions["pairs"], questions["no_power"]):
        for place, pairs in listed.items():
            for better, worse in pairs:
                assert printed_difference(ledger, better, worse) > 0, (better, worse)
                assert questions["models"][worse]["row"].startswith(place.lower().replace(" ", ""))
    assert set(questions["data"]) == set(PROFILE["prepare_data"])
    for data, about in questions["data"].items():
        for name in list_models(pair for place in about["tables"] for pair in questions["pairs"][place]):
            stage, cell = questions["models"][name]["cell"].split("/")
            assert len(PROFILE[stage][f"{cell}_{data}"]["seeds"]) == about["seeds"], (name, data)


def test_a_pair_is_asked_only_where_its_seeds_could_answer(ledger):
    """By the paper's own differences, at the smallest spread that was named."""
    questions = load_questions()
    for about in questions["data"].values():
        for place in about["tables"]:
            limit = detectable(about, place, min(questions["spreads"]))
            assert all(printed_difference(ledger, *pair) >= limit for pair in questions["pairs"][place])
            assert all(printed_difference(ledger, *pair) < limit for pair in questions["no_power"].get(place, ()))


def test_every_model_of_a_pair_is_searched_by_the_same_grid():
    questions, searches = load_questions(), PROFILE["tune"]
    grids = {tuple(each["lr"]) + tuple(each["warmup_epochs"]) for each in searches.values()}
    assert len(grids) == 1 and {name: f"pretrain.{name}" for name in PROFILE["pretrain"]} == {
        name: each["cell"] for name, each in searches.items()
    }
    assert {questions["models"][name]["cell"].partition("/")[0] for name in models_of_pairs()} == {"pretrain"}
    one = next(iter(searches.values()))
    assert len(one["lr"]) * len(one["warmup_epochs"]) == questions["trials"]


def models_of_pairs() -> set[str]:
    return list_models(pair for pairs in load_questions()["pairs"].values() for pair in pairs)


@pytest.mark.parametrize(("seeds", "pairs", "spread"), [(8, 4, 0.6), (5, 4, 0.3), (3, 1, 0.3)])
def test_a_difference_that_is_detectable_is_detected_so_often(seeds, pairs, spread):
    """By a simulation of the test."""
    shift, rng = detectable_difference(seeds, pairs, spread), np.random.default_rng(0)
    differences = rng.normal(shift, spread, (20_000, seeds)) - rng.normal(0, spread, (20_000, seeds))
    p_values = stats.ttest_1samp(differences, 0, axis=1).pvalue
    assert np.mean(p_values < 0.05 / pairs) == pytest.approx(0.8, abs=0.012)
    with pytest.raises(ValueError, match="1 seeds"):
        detectable_difference(1, pairs, spread)


def test_the_page_shows_what_can_be_detected(checkout):
    questions = load_questions()
    rows = {(row[0], row[1]): row[2:] for row in read_table(list_night_power(checkout.report()))}
    for about in questions["data"].values():
        for place in about["tables"]:
            shown = [f"{detectable(about, place, spread):.2f}" for spread in questions["spreads"]]
            pairs = len(questions["pairs"][place])
            assert rows.pop((about["name"], place)) == [str(about["seeds"]), str(pairs), *shown]
    assert not rows


def test_the_slots_are_empty_before_the_run_and_filled_after_it(checkout):
    """Holm's correction is over all pairs that were named, not over those that happen to be there."""
    assert {cell for row in read_table(list_night_scores(checkout.report())) for cell in row[1:]} == {"–"}
    without = load_questions()["no_power"]["Table 3"]
    for names in ((), ("Vittt-T", "DeiT-T")):
        train(checkout, names=names)
        rows = read_table(list_night_pairs(checkout.report()))
        assert {cell for row in rows for cell in row[4:]} == {"–", "no power"}
        assert len([row for row in rows if row[6] == "no power"]) == len(without)
    train(checkout)
    search(checkout)
    pairs = read_table(list_night_pairs(checkout.report()))
    filled = {row[2]: row[4:] for row in pairs if row[:2] == ["Table 1", "CIFAR-100"]}
    assert not any("–" in cells for cells in filled.values())
    assert {cell for row in pairs if row[1] == "ImageNet-100" for cell in row[4:]} == {"–"}
    assert all(row[4:] == ["–", "–", "no power"] for row in pairs if row[2].split(" > ") in without)
    seeds = [repeat(SEEDS[name], 8) for name in ("Vittt-T", "DeiT-T")]
    found = stats.ttest_rel(*seeds)
    difference, p, word = filled["Vittt-T > DeiT-T"]
    assert difference.startswith(f"+{np.mean(np.subtract(*seeds)):.2f}") and word == "ordering seen"
    assert p == show_p(4 * found.pvalue) and filled["Vittt-T > Vim-T"][2] == "not separated"
    scores = {row[0]: row[1:] for row in read_table(list_night_scores(checkout.report()))}
    assert scores["Vittt-T"][0].startswith(f"{np.mean(seeds[0]):.2f}") and scores["Vittt-T"][1] == "–"


@pytest.mark.parametrize("searched", [(), ("DeiT-T",)])
def test_models_that_were_searched_unequally_are_not_compared(checkout, searched):
    train(checkout)
    if searched:
        search(checkout)
        search(checkout, trials=6, names=searched)
    with pytest.raises(Missing, match="trials each on cifar100.*DeiT-T [06]"):
        list_night_pairs(checkout.report())


def test_fewer_seeds_than_were_named_are_not_judged(checkout):
    search(checkout)
    train(checkout, top1=(60.0, 61.0, 62.0))
    with pytest.raises(Missing, match="seeds"):
        list_night_pairs(checkout.report())


def test_models_that_were_trained_differently_are_not_compared(checkout):
    train(checkout)
    train(checkout, names=("DeiT-T",), epochs=60)
    with pytest.raises(Missing, match="differ on cifar100"):
        list_night_pairs(checkout.report())


@pytest.mark.parametrize("data", ["cifar100", "imagenet100"])
def test_no_accuracy_of_the_night_is_next_to_one_of_imagenet(checkout, data):
    seeds = repeat(SEEDS["Vittt-T"], load_questions()["data"][data]["seeds"])
    mean, before = f"{np.mean(seeds):.2f} ", checkout.judge()
    # as if ImageNet's whole validation split had been taken
    whole = {"split": "val", "held_out_images": 50_000, "image_size": 224, "options": {}}
    train(checkout, data, **whole)
    assert checkout.judge() == before
    page = checkout.page()
    assert mean in list_night_scores(checkout.report())
    lines = [line for line in page.splitlines() if mean in line]
    assert all(re.search(r"cifar100|imagenet100|^\| Vittt-T \|", line) for line in lines), lines
    train(checkout, data, **whole, kind="imagenet")
    assert checkout.judge() != before, "the same records are there where their data are ImageNet-1K"
