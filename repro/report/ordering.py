"""Is the paper's order of variants seen in ours? Paired differences over seeds, and Holm's correction.

Why paired: a seed gives every variant the same order and augmentation of the images, so accuracies of one seed are not
independent. The differences of a pair are, over the seeds; with n seeds Student's t has n − 1 degrees of freedom.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .document import show_interval
from .records import find_common

Word = Literal["ordering seen", "ordering contradicted", "not separated", "insufficient budget"]
ALPHA = 0.05
MOST_SEEDS = 1000
NOT_SEPARATED = "not separated"
TOP1 = "top1_percent"
Order = tuple[str, str]  # (better, worse), or any first and second variant
Scores = Mapping[str, Mapping[int, float]]  # variant -> seed -> its value
End = tuple[float | None, float]  # accuracies at the last two evaluations of a curve; None first where there was one


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two variants, and how much the first is above the second over the seeds that all variants have."""

    better: str  # where a paper orders them, the better one by the paper
    worse: str
    difference: float  # better − worse, the mean over the seeds
    interval: tuple[float, float] | None = None  # its 95 % interval, for this pair alone; None with one seed
    p: float = 1.0  # two-sided, after Holm's correction over the pairs
    # 1 where the first is above the second beyond chance, −1 where it is below, 0 where they are not separated
    side: int = 0
    # whether either exceeds chance by more than the noise of the images; without that nothing is separated
    is_learnt: bool = True
    # the seeds that would separate it, if difference and spread stayed as observed; None: over `MOST_SEEDS`
    needed: int | None = None

    @property
    def word(self) -> str:
        return self.name_side("ordering seen", "ordering contradicted")

    def name_side(self, above: str, below: str) -> str:
        if self.interval is None:
            return "one seed"
        return (NOT_SEPARATED, above, below)[self.side]

    def show(self, places: int) -> str:
        return show_interval(self.difference, self.interval, f"+.{places}f")


@dataclasses.dataclass(frozen=True)
class Ordering:
    """The verdict on the order of a table or figure on one data set."""

    word: Word
    why: str  # the sentence behind it
    pairs: tuple[Pair, ...] = ()  # in the paper's order
    # Kendall's over these pairs, (in the paper's order − against it) / all; None without pairs
    tau: float | None = None


def judge_ordering(
    top1: Scores, ends: Mapping[str, Mapping[int, End]], orders: Sequence[Order], images: int, classes: int
) -> Ordering:
    """Judge whether the paper's order is seen.

    Args:
        top1: the accuracies in percent, on the reported split.
        ends: variant -> seed -> the end of its curve.
        orders: (better, worse) by the paper. Pairs with a variant that was not trained are left out.
        images: size of the reported split.
        classes: of the data set.
    """
    orders = [(better, worse) for better, worse in orders if better in top1 and worse in top1]
    seeds = find_common(top1)
    if not orders:
        return Ordering("insufficient budget", "there are no two variants that the paper orders")
    if len(seeds) < 2:
        return Ordering("insufficient budget", f"{'one seed' if seeds else 'no seed'} in common, which shows no spread")
    names = list(dict.fromkeys(name for order in orders for name in order))
    means = {name: statistics.mean(top1[name][seed] for seed in seeds) for name in names}
    pairs = compare_accuracies(top1, orders, images, classes)
    tau = statistics.mean((pair.difference > 0) - (pair.difference < 0) for pair in pairs)
    word, why = _conclude(pairs, means, [ends[name][seed] for name in names for seed in seeds], images, classes)
    return Ordering(word, why, pairs, tau)


def compare_accuracies(top1: Scores, pairs: Sequence[Order], images: int, classes: int) -> tuple[Pair, ...]:
    """`compare_pairs` of accuracies in percent on so many images; two variants at chance are not separated."""
    floor = 100 / classes + sampling_noise(100 / classes, images)
    return compare_pairs(top1, pairs, round_off(images), floor)


def compare_trainings(trained: Mapping[str, Any], pairs: Sequence[Order]) -> tuple[Pair, ...]:
    """`compare_accuracies` of records of trainings (`Source`) by name, all of them scored on the same images."""
    m = next(iter(trained.values())).metrics
    top1 = {name: source.by_seed(TOP1) for name, source in trained.items()}
    return compare_accuracies(top1, pairs, m["held_out_images"], m["classes"])


def round_off(images: int) -> float:
    """The standard deviation of a difference of two accuracies in percent by whole images: √(2/12) images."""
    return 100 / images * math.sqrt(2 / 12)


def compare_pairs(
    values: Scores, pairs: Sequence[Order], least_spread: float, floor: float = -math.inf
) -> tuple[Pair, ...]:
    """Paired t tests of first − second over the seeds that all variants have; none without such seeds.

    Args:
        least_spread: the standard deviation of differences that are closer to each other than the values are written.
        floor: the mean that one variant of a pair must reach before they can be separated.
    """
    from scipy.stats import t as student

    seeds = find_common(values)
    differences = [[values[first][seed] - values[second][seed] for seed in seeds] for first, second in pairs]
    if len(seeds) < 2:
        return tuple(Pair(*pair, *found) for pair, found in zip(pairs, differences, strict=True) if found)
    n, found = len(seeds), []
    means = [statistics.mean(each) for each in differences]
    spreads = [max(statistics.stdev(each), least_spread) for each in differences]
    t_values = (abs(mean) / spread * math.sqrt(n) for mean, spread in zip(means, spreads, strict=True))
    p_values = holm([2 * student.sf(t, n - 1) for t in t_values])
    for pair, mean, spread, p in zip(pairs, means, spreads, p_values, strict=True):
        half = float(student.ppf(1 - ALPHA / 2, n - 1)) * spread / math.sqrt(n)
        is_learnt = max(statistics.mean(values[name][seed] for seed in seeds) for name in pair) >= floor
        side = 0 if p >= ALPHA or not is_learnt else 1 if mean > 0 else -1
        needed = seeds_needed(mean, spread, ALPHA / len(pairs))
        found.append(Pair(*pair, mean, (mean - half, mean + half), float(p), side, is_learnt, needed))
    return tuple(found)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of m values times m − k + 1, never decreasing, at most 1."""
    m, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(m), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (m - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def seeds_needed(mean: float, spread: float, alpha: float) -> int | None:
    """The fewest seeds whose t reaches the two-sided level `alpha`, if mean and spread stay as they are."""
    import numpy as np
    from scipy.stats import t as student

    n = np.arange(2, MOST_SEEDS + 1)
    enough = n[abs(mean) / spread * np.sqrt(n) >= student.isf(alpha / 2, n - 1)]
    return int(enough[0]) if enough.size else None


def sampling_noise(percent: float, images: int) -> float:
    """By how many points two accuracies near `percent` on `images` images differ by chance at most (binomial, 95 %)."""
    share = percent / 100
    return 100 * 1.96 * math.sqrt(2 * share * (1 - share) / images)


def _conclude(
    pairs: Sequence[Pair], means: Mapping[str, float], ends: Sequence[End], images: int, classes: int
) -> tuple[Word, str]:
    """The word of a table and the sentence behind it: the first case that applies."""
    best, overall, chance = max(means.values()), statistics.mean(means.values()), 100 / classes
    spread = best - min(means.values())
    if best - chance < sampling_noise(chance, images):
        why = f"no variant exceeds chance, {chance:.1f} %, by more than the noise of {images} images"
        return "insufficient budget", why
    if any(before is None for before, _ in ends):
        return "insufficient budget", "accuracy was taken once, so whether it was still rising is unknown"
    gain = statistics.mean(last - before for before, last in ends)
    if gain > spread:
        why = f"the last evaluation still gained {gain:.1f} points, more than the {spread:.1f} between the best and the worst variant"
        return "insufficient budget", why
    noise = sampling_noise(overall, images)
    if spread < noise:
        easy = "the task is too easy: " if overall > 95 else ""
        why = f"all variants lie within {spread:.1f} points, and chance alone makes {noise:.1f} on {images} images"
        return "not separated", f"{easy}{why}; more seeds do not change that"
    against = [pair for pair in pairs if pair.side < 0]
    if against:
        named = ", ".join(f"{pair.worse} above {pair.better}" for pair in against)
        return "ordering contradicted", f"{named}, at a family-wise error rate of 5 %"
    seen = sum(pair.side > 0 for pair in pairs)
    if seen == len(pairs):
        return "ordering seen", f"all {len(pairs)} pairs, at a family-wise error rate of 5 %"
    needed = [pair.needed for pair in pairs if not pair.side and pair.is_learnt]
    why = f"{seen} of {len(pairs)} pairs are separated"
    if unlearnt := [pair for pair in pairs if not pair.is_learnt]:
        named = ", ".join(f"{pair.better} and {pair.worse}" for pair in unlearnt)
        why += f"; of {named} neither exceeds chance, {chance:.1f} %"
    if needed:
        seeds = f"over {MOST_SEEDS}" if None in needed else str(max(needed))
        which = "the rest" if unlearnt else "all"
        why += f"; with differences and spreads as observed, {which} would need {seeds} seeds"
    return "not separated", why
