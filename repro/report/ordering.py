"""Is the paper's order of variants seen in ours? Paired differences over seeds, Holm's correction, and what would make a verdict void.

Why paired: a seed gives every variant the same order and augmentation of the images and the same random stream for its initial weights, so
the accuracies of one seed are not independent. The differences of a pair, one per seed, are, whatever the two have in common; Welch's test
would take the two for independent. It costs degrees of freedom: with n seeds Student's t has n − 1.
"""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

Word = Literal["ordering seen", "ordering contradicted", "not separated", "insufficient budget"]
ALPHA = 0.05
MOST_SEEDS = 1000
Top1 = Mapping[int, float]  # seed -> percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two variants that the paper orders.

    Args:
        better, worse: by the paper.
        difference: mean over the common seeds of better − worse, in points.
        low, high: its 95 % interval, of this pair alone.
        p: two-sided, after Holm's correction over the pairs.
        word: what the pair says.
        needed: seeds with which a difference and a spread as observed would separate all pairs; None above `MOST_SEEDS`.
    """

    better: str
    worse: str
    difference: float
    low: float
    high: float
    p: float
    word: Word
    needed: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one table or figure on one data set.

    Args:
        word: the verdict.
        why: the sentence behind it.
        pairs: in the paper's order.
        tau: Kendall's, over these pairs: (those in the paper's order − those against it) / all; None without pairs.
    """

    word: Word
    why: str
    pairs: tuple[Pair, ...]
    tau: float | None


def judge(
    top1: Mapping[str, Top1], before: Mapping[str, Mapping[int, float | None]], orders: Sequence[tuple[str, str]], images: int, classes: int
) -> Verdict:
    """The verdict of a table.

    Args:
        top1: variant -> seed -> accuracy in percent.
        before: variant -> seed -> accuracy at the evaluation before the last; None if there was none.
        orders: (better, worse) by the paper; those of which one was not trained are left out.
        images: of the validation split.
        classes: of the data set.
    """
    orders = [(better, worse) for better, worse in orders if better in top1 and worse in top1]
    seeds = sorted(set.intersection(*(set(of_variant) for of_variant in top1.values()))) if top1 else []
    names = list(dict.fromkeys(name for order in orders for name in order))
    if len(seeds) < 2 or not orders:
        why = f"{len(seeds)} seed(s) in common show no spread" if orders else "no two variants that the paper orders"
        return Verdict(word="insufficient budget", why=why, pairs=(), tau=None)
    means = {name: statistics.mean(top1[name][seed] for seed in seeds) for name in names}
    pairs = compare(top1, orders, seeds, images)
    tau = statistics.mean((pair.difference > 0) - (pair.difference < 0) for pair in pairs)
    return Verdict(**_said(pairs, means, [before[name][seed] for name in names for seed in seeds], images, classes), pairs=pairs, tau=tau)


def compare(top1: Mapping[str, Top1], orders: Sequence[tuple[str, str]], seeds: Sequence[int], images: int) -> tuple[Pair, ...]:
    """Every ordered pair; see `Pair`.

    Accuracies are whole images, so a spread below that of their rounding, √(2/12) images in a difference, is taken for it.
    """
    from scipy.stats import t as student

    n = len(seeds)
    rounding = 100 / images * math.sqrt(2 / 12)
    differences = [[top1[better][seed] - top1[worse][seed] for seed in seeds] for better, worse in orders]
    means = [statistics.mean(values) for values in differences]
    spreads = [max(statistics.stdev(values), rounding) for values in differences]
    p_values = [2 * student.sf(abs(mean) / spread * math.sqrt(n), n - 1) for mean, spread in zip(means, spreads, strict=True)]
    found = []
    for (better, worse), mean, spread, p in zip(orders, means, spreads, holm(p_values), strict=True):
        half = student.ppf(1 - ALPHA / 2, n - 1) * spread / math.sqrt(n)
        word = "not separated" if p >= ALPHA else "ordering seen" if mean > 0 else "ordering contradicted"
        needed = seeds_needed(mean, spread, ALPHA / len(orders))
        found.append(
            Pair(better=better, worse=worse, difference=mean, low=mean - half, high=mean + half, p=float(p), word=word, needed=needed)
        )
    return tuple(found)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of m times m − k + 1, never below a smaller one's, at most 1."""
    m, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(m), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (m - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def seeds_needed(mean: float, spread: float, alpha: float) -> int | None:
    """Fewest seeds whose t reaches the two-sided level `alpha` if mean and spread of the differences stay as they are."""
    from scipy.stats import t as student

    numbers = range(2, MOST_SEEDS + 1)
    place = bisect.bisect_left(numbers, True, key=lambda n: abs(mean) / spread * math.sqrt(n) >= student.isf(alpha / 2, n - 1))
    return numbers[place] if place < len(numbers) else None


def sampling_noise(percent: float, images: int) -> float:
    """Points by which two accuracies near `percent` on `images` images each differ by chance in 95 % of cases, binomially."""
    share = percent / 100
    return 100 * 1.96 * math.sqrt(2 * share * (1 - share) / images)


def _said(pairs: Sequence[Pair], means: Mapping[str, float], before: Sequence[float | None], images: int, classes: int) -> dict:
    """The word of a table and its reason."""
    spread, best, overall = max(means.values()) - min(means.values()), max(means.values()), statistics.mean(means.values())
    chance = 100 / classes
    if best - chance < sampling_noise(chance, images):
        return {
            "word": "insufficient budget",
            "why": f"no variant is above chance, {chance:.1f} %, by more than the noise of {images} images",
        }
    if None in before:
        return {"word": "insufficient budget", "why": "accuracy was taken once, so whether it still rose is unknown"}
    gain = overall - statistics.mean(before)
    if gain > spread:
        why = f"the last evaluation still gained {gain:.1f} points, more than the {spread:.1f} between the best and the worst variant"
        return {"word": "insufficient budget", "why": why}
    noise = sampling_noise(overall, images)
    if spread < noise:
        easy = "the task is too easy: " if overall > 95 else ""
        why = f"{easy}all variants lie within {spread:.1f} points, and chance alone makes {noise:.1f} on {images} images; more seeds do not change that"
        return {"word": "not separated", "why": why}
    count = {word: sum(pair.word == word for pair in pairs) for word in ("ordering seen", "ordering contradicted")}
    if count["ordering contradicted"]:
        against = ", ".join(f"{pair.worse} above {pair.better}" for pair in pairs if pair.word == "ordering contradicted")
        return {"word": "ordering contradicted", "why": f"{against}, at a family-wise level of 95 %"}
    if count["ordering seen"] == len(pairs):
        return {"word": "ordering seen", "why": f"all {len(pairs)} pairs, at a family-wise level of 95 %"}
    wanted = [pair.needed for pair in pairs if pair.word == "not separated"]
    seeds = f"over {MOST_SEEDS}" if None in wanted else str(max(wanted))
    why = f"{count['ordering seen']} of {len(pairs)} pairs are separated; all would need {seeds} seeds with differences and spreads as observed"
    return {"word": "not separated", "why": why}
