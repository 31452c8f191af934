"""Verdicts on orderings: statistics against SciPy's and numbers by hand, verdicts on data whose order is known."""

import random
import statistics
from itertools import combinations

import pytest
from scipy import stats

from repro.report import ordering
from repro.report.records import Source, find_score_interval, show_mean

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
    verdict = judge(drawn((80, 77, 74, 74.01), 0.1), images=10**9)
    assert verdict.word == "not separated" and "5 of 6 pairs" in verdict.why and "all would need" in verdict.why
    (close,) = [pair for pair in verdict.pairs if pair.word == "not separated"]
    assert (close.better, close.worse) == ("c", "d")


def test_of_a_pair_at_chance_nothing_is_separated_and_more_seeds_do_not_help():
    """Two classes and 4,000 images: chance is 50 %, its noise 1.96·√(2·0.5·0.5/4000) = 2.2 points."""
    verdict = judge(drawn((60, 55, 51, 50), 0.01, shift=0.01), classes=2, images=4000)
    assert verdict.word == "not separated"
    assert verdict.why == "5 of 6 pairs are separated; of c and d neither exceeds chance, 50.0 %"
    (pair,) = [pair for pair in verdict.pairs if pair.limit == "at chance"]
    assert (pair.better, pair.worse, pair.word) == ("c", "d", "not separated") and pair.p < 1e-3
    both = judge(drawn((60, 59.999, 51, 50), 0.1, shift=0.01), classes=2, images=4000)
    assert both.why.endswith("neither exceeds chance, 50.0 %; 1 differs by less than chance alone makes")


@pytest.mark.parametrize(("mean", "spread", "alpha"), [(0.3, 1.0, 0.05 / 6), (5.0, 1.0, 0.05)])
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
    assert easy.shown == "no power (3 seeds, 359 images)" and easy.why.startswith("the task is too easy")
    few = judge(drawn((60.4, 60.2, 60.0, 59.8), 0.001), gain=0.1, images=359)
    assert few.word == few.counted.partition(" (")[0] == "no power" and "too easy" not in few.why
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
    assert pair.word == "two seeds" and 0 < pair.p < 1


@pytest.mark.parametrize(("images", "noise", "word"), [(359, 2.284, "not separated"), (35_900, 0.228, "ordering seen")])
def test_a_pair_within_the_noise_of_the_images_is_not_seen_however_sure_the_seeds_are(images, noise, word):
    """0.92 points near 97.5 %, as conv2d above dual; the standard error of two shares is √(2p(1−p)/images)."""
    assert 1.96 * stats.binom.std(images, 0.975) * 2**0.5 / images * 100 == pytest.approx(noise, abs=1e-3)
    differences = (0.90, 0.92, 0.94)
    values = {"a": {n: 97.04 + each for n, each in enumerate(differences)}, "b": dict.fromkeys(range(3), 97.04)}
    (pair,) = ordering.compare_accuracies(values, [("a", "b")], images, 10)
    # equal differences count with the spread of whole images
    assert pair.word == word and pair.limit == ("images" if images == 359 else "")


@pytest.mark.parametrize(("below", "word"), [(0.2, "claim seen"), (0.9, "not separated"), (16.1, "claim contradicted")])
def test_a_claim_of_no_loss_is_judged_by_its_margin(below, word):
    """One variant may be a point below the other: a loss of 16 points is no agreement."""
    losses = [below - 0.1, below, below + 0.12, below - 0.02]
    values = {"new": {n: 74 - each for n, each in enumerate(losses)}, "old": dict.fromkeys(range(4), 74.0)}
    ends = {name: {seed: (value, value) for seed, value in of.items()} for name, of in values.items()}
    found = ordering.judge_ordering(values, ends, [], 10**7, 10, {("new", "old"): 1.0})
    (pair,) = found.pairs
    assert pair.p == pytest.approx(stats.ttest_1samp(losses, 1.0).pvalue) and pair.word == word
    assert found.tau is None and (found.word == "ordering contradicted") == (below == 16.1)


def test_two_seeds_decide_nothing_and_an_experiment_without_a_separated_pair_has_no_power():
    two = judge({name: {0: top1, 1: top1 + 1} for name, top1 in zip(NAMES, (90, 80, 70, 60), strict=True)})
    assert two.why == "two seeds decide nothing" and {pair.word for pair in two.pairs} == {"two seeds"}
    wide = judge(drawn((80, 77, 74, 71), 20.0))
    assert wide.counted == "no power (3 seeds, 10000 images)" and wide.why.startswith("none of 6 pairs is separated")
    assert "No power: 3 seeds" in ordering.describe_power(wide.pairs, "3 seeds")
    assert ordering.describe_power(judge(drawn((80, 77, 74, 71), 0.05)).pairs, "3 seeds") == ""


def trained(machine, top1, others=()):
    """The record of a training over seeds."""
    runs = [{"seed": seed, "top1_percent": value} for seed, value in enumerate(top1)]
    metrics = {"by_seed": runs, "held_out_images": 10_000, "classes": 10, "top1_percent": statistics.fmean(top1)}
    return Source(
        f"results/replications/{machine}/x/metrics.json",
        metrics,
        {"device": f"cpu: {machine}, 1 thread"},
        others=others,
    )


def test_seeds_are_pairs_on_one_machine_alone():
    """`b` is shown by another machine's record, and was also made by the machine of `a` and `c`."""
    a, b, c = (80.0, 81.0, 82.5), (75.0, 76.5, 77.0), (70.0, 71.2, 72.0)
    named = {"a": trained("x", a), "b": trained("y", (90.0, 91.0, 92.0), (trained("x", b),)), "c": trained("x", c)}
    pairs = ordering.compare_trainings(named, [("a", "b"), ("b", "c")])
    alone = [stats.ttest_rel(a, b).pvalue, stats.ttest_rel(b, c).pvalue]
    assert [pair.p for pair in pairs] == pytest.approx(ordering.holm(alone))
    named["b"] = trained("y", b)
    assert ordering.compare_trainings(named, [("a", "b")]) == ()


def test_seeds_of_one_score_have_the_interval_of_the_images():
    """341 of 359 images on both seeds; an interval of no width says that no other seed can differ."""
    metrics = {"top1_ci95_percent": [100 * 341 / 359] * 2, "top1_percent": 100 * 341 / 359, "held_out_images": 359}
    wilson = stats.binomtest(341, 359).proportion_ci(0.95, "wilson")
    expected = pytest.approx((100 * wilson.low, 100 * wilson.high))
    assert find_score_interval(metrics, "top1_percent") == expected
    source = trained("x", [metrics["top1_percent"]] * 2)
    source.metrics["held_out_images"] = 359
    assert show_mean(source, "top1_percent", ".1f", " %") == "95.0 % [92.2, 96.8]"
    # AP is no share of images
    assert find_score_interval({"ap_ci95_percent": [40.0, 40.0], "ap_percent": 40.0}, "ap_percent") is None
    assert find_score_interval({**metrics, "top1_ci95_percent": [94.0, 96.0]}, "top1_percent") == (94.0, 96.0)


def test_variants_that_were_not_trained_leave_their_pairs_out():
    top1 = drawn((80, 77, 74, 71), 0.05)
    del top1["b"]
    verdict = judge(top1)
    assert [(pair.better, pair.worse) for pair in verdict.pairs] == [("a", "c"), ("a", "d"), ("c", "d")]
    assert judge({"a": top1["a"]}).word == "insufficient budget"
