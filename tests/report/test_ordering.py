"""Verdicts on orderings: statistics against SciPy's and numbers by hand, verdicts on data whose order is known."""

import random
import statistics
from itertools import combinations

import pytest
from scipy import stats

from repro.report import ordering

NAMES = ("a", "b", "c", "d")
ORDERS = list(combinations(NAMES, 2))  # the paper has a above b above c above d


def judge(top1, gain=0.5, images=10_000, classes=10):
    """On the curve's split all are five points better than on the reported one, and gained `gain` points in the end."""
    ends = {
        name: {seed: (None if gain is None else value + 5 - gain, value + 5) for seed, value in of.items()}
        for name, of in top1.items()
    }
    return ordering.judge_ordering(top1, ends, ORDERS, images, classes)


def drawn(means, spread, seeds=3, noise=0, shift=2.0):
    """Accuracies whose seeds shift all variants alike, with a `spread` of each one's own."""
    rng = random.Random(noise)
    shifts = [rng.gauss(0, shift) for _ in range(seeds)]
    return {
        name: {s: mean + shifts[s] + rng.gauss(0, spread) for s in range(seeds)}
        for name, mean in zip(NAMES, means, strict=True)
    }


def test_pairs_are_scipys_paired_t_tests():
    """Over the seeds that all have."""
    top1 = drawn((80, 79, 77, 70), 0.5, seeds=5)
    alone = [stats.ttest_rel(list(top1[x].values()), list(top1[y].values())) for x, y in ORDERS]
    top1["a"][9] = 9.0
    pairs = ordering.compare_accuracies(top1, ORDERS, 10_000, 10)
    assert [pair.p for pair in pairs] == pytest.approx(ordering.holm([found.pvalue for found in alone]))
    for pair, found in zip(pairs, alone, strict=True):
        assert pair.interval == pytest.approx(tuple(found.confidence_interval(0.95)))
        assert pair.difference == pytest.approx(statistics.mean(pair.interval))


def test_holm_by_hand():
    """0.01·4, 0.02·3, 0.03·2 = 0.06, 0.6·1; and never below an earlier one, never above 1."""
    assert ordering.holm([0.03, 0.01, 0.6, 0.02]) == pytest.approx([0.06, 0.04, 0.6, 0.06])
    assert ordering.holm([0.9, 0.8]) == [1.0, 1.0]


def test_an_order_that_is_there_is_seen_and_its_reverse_is_contradicted():
    seen = judge(drawn((80, 77, 74, 71), 0.05))
    assert (seen.word, seen.tau) == ("ordering seen", 1) and "all 6 pairs" in seen.why
    against = judge(drawn((71, 74, 77, 80), 0.05))
    assert (against.word, against.tau) == ("ordering contradicted", -1) and "d above a" in against.why
    mixed = (80, 74, 77, 76)
    assert judge(drawn(mixed, 1e-6)).tau == pytest.approx(stats.kendalltau([4, 3, 2, 1], mixed).statistic)


def test_one_pair_that_is_too_close_leaves_the_rest_as_it_is():
    verdict = judge(drawn((80, 77, 74, 74.01), 0.1))
    assert verdict.word == "not separated" and "5 of 6 pairs" in verdict.why and "all would need" in verdict.why
    (close,) = [pair for pair in verdict.pairs if pair.word == "not separated"]
    assert (close.better, close.worse) == ("c", "d")


def test_of_a_pair_at_chance_nothing_is_separated_and_more_seeds_do_not_help():
    """Two classes and 4,000 images: chance is 50 %, its noise 1.96·√(2·0.5·0.5/4000) = 2.2 points."""
    verdict = judge(drawn((60, 55, 51, 50), 0.01, shift=0.01), classes=2, images=4000)
    assert verdict.word == "not separated"
    assert verdict.why == "5 of 6 pairs are separated; of c and d neither exceeds chance, 50.0 %"
    (pair,) = [pair for pair in verdict.pairs if not pair.is_learnt]
    assert (pair.better, pair.worse, pair.word) == ("c", "d", "not separated") and pair.p < 1e-3
    both = judge(drawn((60, 59.999, 51, 50), 0.1, shift=0.01), classes=2, images=4000)
    assert "neither exceeds chance, 50.0 %; with differences and spreads as observed, the rest would need" in both.why


@pytest.mark.parametrize(("mean", "spread", "alpha"), [(1.0, 1.0, 0.05), (0.3, 1.0, 0.05 / 6), (5.0, 1.0, 0.05)])
def test_seeds_needed_is_the_first_number_that_does(mean, spread, alpha):
    def reached(n):
        return 2 * stats.t.sf(abs(mean) / spread * n**0.5, n - 1) <= alpha

    n = ordering.seeds_needed(mean, spread, alpha)
    assert reached(n) and not any(reached(fewer) for fewer in range(2, n))
    assert ordering.seeds_needed(0.0, 1.0, 0.05) is None


def test_seeds_needed_by_a_pair_are_enough_next_to_the_other_pairs():
    """Holm's correction asks the smallest of two p for α / 2."""
    values = {"a": dict(enumerate((1.0, -0.5, 2.0))), **{name: dict.fromkeys(range(3), 0.0) for name in "bc"}}
    t = 2.5 / 3 / statistics.stdev([1.0, -0.5, 2.0])
    for pair in ordering.compare_pairs(values, [("a", "b"), ("a", "c")], 0.01):
        p_at = {n: 2 * stats.t.sf(t * n**0.5, n - 1) for n in (pair.needed - 1, pair.needed)}
        assert p_at[pair.needed] <= 0.05 / 2 < p_at[pair.needed - 1]


def test_too_easy_and_too_few_images():
    """359 images at 99 %: 1.96·√(2·0.99·0.01/359) = 1.46 points come by chance."""
    assert ordering.sampling_noise(99, 359) == pytest.approx(1.456, abs=1e-3)
    easy = judge(drawn((99.4, 99.2, 99.0, 98.8), 0.001, shift=0.1), gain=0.1, images=359)
    assert easy.word == "not separated" and easy.why.startswith("the task is too easy")
    few = judge(drawn((60.4, 60.2, 60.0, 59.8), 0.001), gain=0.1, images=359)
    assert few.word == "not separated" and "too easy" not in few.why and "more seeds do not change that" in few.why
    assert judge(drawn((60.4, 60.2, 60.0, 59.8), 0.001), gain=0.1, images=500_000).word == "ordering seen"


@pytest.mark.parametrize(
    ("top1", "gain", "why"),
    [
        (drawn((80, 77, 74, 71), 0.1, seeds=1), 0.5, "one seed in common"),
        (drawn((80, 77, 74, 71), 0.1), None, "accuracy was taken once"),
        (drawn((80, 77, 74, 71), 0.1), 20.0, "the last evaluation still gained 20.0 points"),
        (drawn((10.3, 10.2, 10.1, 10.0), 0.001, shift=0.1), 0.0, "exceeds chance, 10.0 %"),
    ],
)
def test_a_budget_that_says_nothing(top1, gain, why):
    verdict = judge(top1, gain, images=359)
    assert verdict.word == "insufficient budget" and why in verdict.why


def test_differences_without_any_spread_are_not_certain():
    """Whole images: two accuracies that agree to the image on both seeds differ by a rounding's spread, not by none."""
    step = 100 / 359
    values = {"a": {0: 90.0, 1: 91.0}, "b": {0: 90.0 - step, 1: 91.0 - step}}
    (pair,) = ordering.compare_accuracies(values, [("a", "b")], 359, 10)
    assert pair.word == "not separated" and 0 < pair.p < 1


def test_variants_that_were_not_trained_leave_their_pairs_out():
    top1 = drawn((80, 77, 74, 71), 0.05)
    del top1["b"]
    verdict = judge(top1)
    assert [(pair.better, pair.worse) for pair in verdict.pairs] == [("a", "c"), ("a", "d"), ("c", "d")]
    assert judge({"a": top1["a"]}).word == "insufficient budget"
