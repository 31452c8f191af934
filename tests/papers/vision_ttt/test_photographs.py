"""CIFAR-10: verdicts of registered pairs, from made seeds whose answer is known; nothing before a question is finished."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from repro.core.config import load_yaml
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.record import pack_hits, write_json
from repro.papers.vision_ttt import photographs
from repro.papers.vision_ttt.photographs import Model, bootstrap, bound_below, find_models, judge_pairs
from tests.conftest import ROOT

IMAGES = 10_000
SEEDS = range(5)
QUESTIONS = {
    "data": "cifar10",
    "commit": "c",
    "seeds": list(SEEDS),
    "search": {"rates": [1e-3]},
    "questions": {"Q": {"asks": "?", "primary": True, "pairs": [["a", "b"]]}},
}


def model(name: str, percents: list[float], cpu: str = "A") -> Model:
    """A model whose first images are right, so that two models differ on whole images by the difference of scores."""
    seeds = {}
    for seed, percent in enumerate(percents):
        hits = np.arange(IMAGES) < round(IMAGES * percent / 100)
        found = {"hits": pack_hits(hits), "images": IMAGES, "top1_percent": 100 * float(hits.mean())}
        seeds[seed] = {**found, "device": {"cpu": cpu}}
    return Model(name=name, seeds=seeds, trials={})


def judge(first: list[float], second: list[float], cpu: str = "A", **question) -> str:
    models = {"a": model("a", first), "b": model("b", second, cpu)}
    (judged,) = judge_pairs(question or {"pairs": [["a", "b"]]}, models)
    return judged.word


BASE = [60.0, 60.2, 59.9, 60.1, 59.8]


@pytest.mark.parametrize(
    ("shifts", "word"),
    [
        ([3.0, 3.1, 2.9, 3.0, 3.2], "seen"),
        ([-3.0, -3.1, -2.9, -3.0, -3.2], "contradicted"),
        ([0.1, -0.1, 0.2, -0.2, 0.0], "equal within a point"),
        ([0.0, 0.0, 0.0, 0.0, 0.0], "equal within a point"),
        ([5.0, -5.0, 4.0, -3.0, 1.0], "undecided"),
        ([1.2, 0.4, 2.3, -0.2, 1.6], "undecided"),
    ],
)
def test_a_pair_gets_the_word_of_its_differences(shifts, word):
    assert judge([base + shift for base, shift in zip(BASE, shifts, strict=True)], BASE) == word


def test_two_kinds_of_processor_also_need_the_unpaired_test():
    """Seeds that differ by far more than the pair: the paired test sees it, Welch's does not."""
    base = [50.0, 54.0, 58.0, 62.0, 66.0]
    above = [value + shift for value, shift in zip(base, [2.0, 2.1, 1.9, 2.0, 2.1], strict=True)]
    assert judge(above, base) == "seen"
    assert judge(above, base, cpu="B") == "undecided"
    (judged,) = judge_pairs({"pairs": [["a", "b"]]}, {"a": model("a", above), "b": model("b", base, "B")})
    assert judged.p == pytest.approx(stats.ttest_ind(above, base, equal_var=False).pvalue)


def test_equality_and_no_loss_on_two_kinds_of_processor_need_the_unpaired_bounds():
    """Seeds that differ by 16 points within a model, and by 0.1 in a pair; with little spread both tests agree."""
    base, close = [50.0, 54.0, 58.0, 62.0, 66.0], [60.0, 60.1, 59.9, 60.0, 60.1]
    loss = {"not_worse": [["a", "b"]], "margin_points": 1.0}
    for values, cpu, words in (
        (base, "A", ("equal within a point", "not worse")),
        (base, "B", ("undecided", "undecided")),
        (close, "B", ("equal within a point", "not worse")),
    ):
        near = [value + shift for value, shift in zip(values, [0.1, -0.1, 0.1, -0.1, 0.0], strict=True)]
        assert judge(near, values, cpu=cpu) == words[0]
        said = judge(near, values, cpu=cpu, **loss)
        assert said.startswith(words[1])
    allowed = stats.t.isf(0.05, 8) * (2 * np.var(base, ddof=1) / 5) ** 0.5  # equal spreads: 2n - 2 degrees of freedom
    bound = float(judge(base, base, cpu="B", **loss).split()[-1].rstrip(")"))
    assert bound == pytest.approx(-allowed, abs=0.005)


def test_holm_divides_among_the_pairs_of_a_question():
    """p is 0.02 for each pair alone, and 0.04 and 0.06 for two and three of them."""
    shifts = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    wanted = stats.t.isf(0.02 / 2, 4)
    shifts = shifts - shifts.mean() + wanted * shifts.std(ddof=1) / 5**0.5
    second = model("b", BASE)
    others = {name: model(name, [b + s for b, s in zip(BASE, shifts, strict=True)]) for name in "acd"}
    for count, p in ((1, 0.02), (2, 0.04), (3, 0.06)):
        judged = judge_pairs({"pairs": [[name, "b"] for name in "acd"[:count]]}, {"b": second, **others})
        assert [each.p for each in judged] == pytest.approx([p] * count, rel=0.02)
        assert {each.word for each in judged} == {"seen" if p < 0.05 else "undecided"}


@pytest.mark.parametrize("others", [[], [50.0], [50.0, 51.0]])
def test_a_finished_question_is_judged_by_its_own_models(others):
    """Another question's model has fewer seeds, or none."""
    models = {"a": model("a", [base + 1 for base in BASE]), "b": model("b", BASE)}
    asked = {"pairs": [["a", "b"]]}
    assert judge_pairs(asked, models | {"c": model("c", others)}) == judge_pairs(asked, models)


@pytest.mark.parametrize(
    ("shift", "word"), [(-0.1, "not worse"), (-0.9, "undecided"), (-3.0, "undecided"), (2.0, "not worse")]
)
def test_not_worse_asks_for_the_lower_bound(shift, word):
    first = [base + shift + each for base, each in zip(BASE, [0.2, -0.2, 0.1, -0.1, 0.0], strict=True)]
    assert judge(first, BASE, not_worse=[["a", "b"]], margin_points=1.0).startswith(word)


def test_bounds_are_those_of_scipy():
    values = [0.3, -0.4, 0.9, 0.2, 0.5]
    expected = stats.ttest_1samp(values, 0, alternative="greater").confidence_interval(0.95).low
    assert bound_below(values) == pytest.approx(expected)
    for margin in (0.3, 0.8, 1.5):
        above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue < 0.05
        below = stats.ttest_1samp(values, margin, alternative="less").pvalue < 0.05
        assert all(bound_below(side) > -margin for side in (values, [-v for v in values])) == (above and below)


def test_the_bootstrap_covers_the_chance_of_images():
    """Equal seeds, and one image in ten that only the first model has right: a share with a binomial's deviation."""
    low, high = bootstrap(model("a", [60.0] * 5), model("b", [50.0] * 5))
    deviation = 100 * (0.1 * 0.9 / IMAGES) ** 0.5
    assert (low + high) / 2 == pytest.approx(10.0, abs=0.1)
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.1)


def test_the_bootstrap_covers_the_chance_of_seeds():
    """Five differences: a draw's mean has their deviation (n, not n − 1) over √5."""
    shifts = [0.0, 4.0, 8.0, 12.0, 16.0]
    low, high = bootstrap(model("a", [50 + shift for shift in shifts]), model("b", [50.0] * 5))
    assert high - low == pytest.approx(2 * 1.96 * np.std(shifts) / 5**0.5, rel=0.1)


def store(root, name: str, seed: int, **changes) -> None:
    found = model(name, [50.0]).seeds[0] | {
        "commit": "c",
        "data_hash": "d",
        "epochs": 6,
        "params": {"lr": 1, "seeds": [seed]},
    }
    write_json(root / f"results/seeds/cifar10/{name}/{seed}.json", found | changes)


def test_nothing_is_judged_before_every_model_has_all_its_seeds(tmp_path, monkeypatch):
    """Nine of ten trainings, then all ten."""
    monkeypatch.setattr(photographs, "load_photographs", lambda: QUESTIONS)
    for name in "ab":
        for seed in SEEDS:
            if (name, seed) != ("b", 4):
                store(tmp_path, name, seed)
    models = find_models(Paths(tmp_path), QUESTIONS)
    report = SimpleNamespace(results=SimpleNamespace(paths=Paths(tmp_path)))
    # of one rate in each search
    assert re.findall(r"\d+", photographs.count_trainings(report)) == ["9", "10", "0", "2"]
    assert not photographs.is_finished(QUESTIONS["questions"]["Q"], models, SEEDS)
    assert photographs.answer_primary(report) == photographs.count_trainings(report)
    store(tmp_path, "b", 4)
    assert "a against b: equal within a point, +0.0" in photographs.answer_primary(report)
    models = find_models(Paths(tmp_path), QUESTIONS)
    assert photographs.is_finished(QUESTIONS["questions"]["Q"], models, SEEDS)


def test_the_page_says_how_long_and_on_which_processors_was_trained(tmp_path, monkeypatch):
    search = {"search": {"rates": [1e-3], "epochs": 2, "split": "tune"}}
    monkeypatch.setattr(photographs, "load_photographs", lambda: QUESTIONS | search)
    report = SimpleNamespace(results=SimpleNamespace(paths=Paths(tmp_path)))
    assert re.findall(r"\d+ epochs", photographs.describe_photographs(report)) == ["2 epochs"]
    for name, cpu in (("a", "B"), ("b", "A")):
        more = {"train_images": 45_000, "split": "test", "device": {"cpu": cpu, "threads": 1}}
        store(tmp_path, name, 0, **more, params={"seeds": [0], "precision": "fp32"})
    said = photographs.describe_photographs(report)
    assert re.findall(r"\d+ epochs", said) == ["2 epochs", "6 epochs"]
    assert "45,000" in said and "10,000 of test" in said and "fp32, 1 thread, A and B." in said


@pytest.mark.parametrize(
    "changes", [{"commit": "e"}, {"data_hash": "e"}, {"epochs": 7}, {"params": {"lr": 2, "seeds": [1]}}]
)
def test_seeds_that_cannot_be_compared_are_refused(tmp_path, changes):
    store(tmp_path, "a", 0)
    store(tmp_path, "a", 1)
    assert set(find_models(Paths(tmp_path), QUESTIONS)["a"].seeds) == {0, 1}
    store(tmp_path, "a", 1, **changes)
    with pytest.raises(UserError, match="results/seeds/cifar10"):
        find_models(Paths(tmp_path), QUESTIONS)


def test_a_repeated_seed_says_how_many_images_differ(tmp_path):
    """50.03 % has the three images right that 50 % has not; the repeat enters no accuracy."""
    store(tmp_path, "a", 0, params_hash="p", weights_hash="w")
    file = tmp_path / "results/seeds/cifar10/a/0_again.json"
    again = model("a", [50.03]).seeds[0] | {"commit": "e" * 40, "params_hash": "p", "data_hash": "d"}
    models = find_models(Paths(tmp_path), QUESTIONS)

    def tell(**changes):
        write_json(file, again | changes)
        return photographs._list_repeats(Paths(tmp_path), QUESTIONS, models)

    assert re.findall(r"[\d,.]+ ", tell(weights_hash="x"))[-2:] == ["3 ", "10,000 "]
    assert not re.findall("10,000", tell(weights_hash="w"))
    assert find_models(Paths(tmp_path), QUESTIONS)["a"].top1 == {0: 50.0}
    with pytest.raises(UserError, match="0_again"):
        tell(weights_hash="w", params_hash="q")


def test_rates_that_few_images_cannot_tell_apart_stand_beside_each_other():
    trials = {5e-4: 40.0, 1e-3: 44.5, 2e-3: 45.0, 4e-3: 43.7}
    assert photographs._show_rates(trials, list(trials)) == "0.002 (45.00), 0.001 (44.50)"


def test_the_best_rate_of_a_finished_search_may_be_at_the_edge_of_the_grid():
    trials, grid = {1e-3: 40.0, 2e-3: 45.0}, [1e-3, 2e-3]
    assert "edge" in photographs._show_rates(trials, grid)
    assert "edge" not in photographs._show_rates(trials, [*grid, 4e-3])
    assert "edge" not in photographs._show_rates({**trials, 4e-3: 40.0}, [*grid, 4e-3])


def test_the_registered_rows_are_the_paper_s(ledger_of_paper):
    """Table 1: 77.7 and 72.2; Table 3: 75.2 and 74.0."""
    assert photographs._printed_difference(ledger_of_paper, "vittt", "deit") == pytest.approx(5.5)
    assert photographs._printed_difference(ledger_of_paper, "gating", "share_qk") == pytest.approx(1.2)
    assert photographs._printed_difference(ledger_of_paper, "vittt", "softmax") is None


@pytest.fixture(scope="module")
def ledger_of_paper():
    from repro.papers.vision_ttt.paper import PAPER as VISION_TTT

    return VISION_TTT.ledger


def test_the_forest_plot_has_a_row_for_each_pair(tmp_path, ledger_of_paper):
    models = {name: model(name, [value + shift for value in BASE]) for name, shift in (("vittt", 2.0), ("dot", 0.0))}
    judged = judge_pairs({"pairs": [["vittt", "dot"]], "shown": [["dot", "vittt"]]}, models)
    assert [each.word for each in judged] == ["seen", "no verdict asked"] and judged[1].p is None
    file = photographs.draw_pairs(tmp_path / "pairs.png", judged, ledger_of_paper)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_pages_name_the_epochs_and_the_size_of_the_registered_trainings():
    profile = load_yaml(ROOT / "profiles/cifar10.yaml")["pretrain_seeds"]
    settings = {(cell["epochs"], cell["transform"]["image_size"]) for cell in profile.values()}
    assert settings == {(6, 32)}
