"""Tests of the paper's order of variants on our runs: paired t tests over seeds, with Holm's correction.

The tests are paired because a seed gives every variant the same order and augmentation of the images: accuracies of one
seed are not independent. The differences of a pair are independent over the seeds. With n seeds, Student's t has n − 1
degrees of freedom.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from ..core.statistics import Interval
from .markdown import show_interval
from .records import Source, find_common, list_all, rank_machine

_Word = Literal["ordering seen", "ordering contradicted", "not separated", "no power", "insufficient budget"]
ALPHA = 0.05  # the two-sided level of all tests, for the pairs of one table or figure together
_LEAST_SEEDS = 3  # with two seeds, t has one degree of freedom and must exceed 12.7
MOST_SEEDS = 1000  # `seeds_needed` searches up to here; more are written as `over 1000`
# why a pair is not separated whatever its p: neither variant is above chance, or the images or the seeds are too few
AT_CHANCE, FEW_IMAGES, _TWO_SEEDS = "at chance", "images", "two seeds"
TOP1 = "top1_percent"
_Order = tuple[str, str]  # (better, worse), or any first and second variant
# (first, second) -> how many points the first may be worse and still satisfy a claim that it is no worse
_Margins = Mapping[_Order, float]
_Scores = Mapping[str, Mapping[int, float]]  # variant -> seed -> its value
_End = tuple[float | None, float]  # accuracies at a curve's last two evaluations; the first is None if there was one


@dataclasses.dataclass(frozen=True)
class Pair:
    """A comparison of two variants over the seeds that all variants have."""

    better: str  # the better one by the paper, where it orders them
    worse: str
    difference: float  # better − worse, the mean over the seeds
    interval: Interval | None = None  # 95 % interval of the difference, uncorrected; None with one seed
    p: float = 1.0  # two-sided, after Holm's correction over the pairs
    # 1 if better + margin is above worse beyond chance, −1 if it is below, 0 if they are not separated
    side: int = 0
    limit: str = ""  # `AT_CHANCE`, `FEW_IMAGES` or `_TWO_SEEDS` where one of them rules a separation out
    # the seeds that would separate the pair if difference and spread stayed as observed; None for over `MOST_SEEDS`
    needed: int | None = None
    margin: float = 0.0  # see `_Margins`

    @property
    def word(self) -> str:
        """The verdict on the pair in words."""
        what = "claim" if self.margin else "ordering"
        return self.name_side(f"{what} seen", f"{what} contradicted")

    @property
    def claim(self) -> str:
        """The paper's statement on the pair as a formula; with a margin, that `better` is no worse."""
        if self.margin:
            return f"{self.better} ≥ {self.worse} − {self.margin:g}"
        return f"{self.better} > {self.worse}"

    @property
    def reverse(self) -> str:
        """The opposite of the claim in words, for a contradicted order."""
        if self.margin:
            return f"{self.better} below {self.worse} by more than {self.margin:g}"
        return f"{self.worse} above {self.better}"

    def name_side(self, above: str, below: str) -> str:
        """Return `above` or `below` by `side`, or else why the pair is not separated."""
        if self.interval is None:
            return "one seed"
        if self.limit == _TWO_SEEDS:
            return _TWO_SEEDS
        return {1: above, 0: "not separated", -1: below}[self.side]

    def show(self, places: int) -> str:
        """Write the difference and its interval, with signs and `places` decimals."""
        return show_interval(self.difference, self.interval, f"+.{places}f")


@dataclasses.dataclass(frozen=True)
class Ordering:
    """The verdict on the order of a table or figure on one data set."""

    word: _Word
    why: str  # the reason for the word
    pairs: tuple[Pair, ...] = ()  # in the paper's order
    # Kendall's tau over the pairs that the paper orders, (in its order − against it) / all; None without such pairs
    tau: float | None = None
    taken: str = ""  # the numbers of seeds and images in words

    @property
    def shown(self) -> str:
        """The word, and the numbers of seeds and images where they are too few."""
        return f"{self.word} ({self.taken})" if self.word == "no power" else self.word

    @property
    def counted(self) -> str:
        """The counts of pairs seen and contradicted, or `shown` where the runs can decide none."""
        if self.word in ("insufficient budget", "no power"):
            return self.shown
        seen, contradicted = (sum(pair.side == side for pair in self.pairs) for side in (1, -1))
        return f"{seen} of {len(self.pairs)}" + (f", {contradicted} contradicted" if contradicted else "")


def judge_ordering(
    top1: _Scores,
    ends: Mapping[str, Mapping[int, _End]],
    orders: Sequence[_Order],
    images: int,
    classes: int,
    margins: _Margins | None = None,
) -> Ordering:
    """Judge whether our runs show the paper's order of its variants.

    Args:
        top1: variant -> seed -> accuracy in percent on the reported split.
        ends: variant -> seed -> the end of its learning curve.
        orders: (better, worse) by the paper. Pairs with a variant that was not trained are left out.
        images: the size of the reported split.
        classes: the data set's number of classes.
        margins: further pairs, whose first variant is no worse by the paper.
    """
    asked = [(better, worse) for better, worse in (*orders, *(margins or ())) if better in top1 and worse in top1]
    seeds = find_common(top1)
    if not asked:
        return Ordering("insufficient budget", "there are no two variants that the paper orders")
    if len(seeds) < 2:
        return Ordering("insufficient budget", f"{'one seed' if seeds else 'no seed'} in common, which shows no spread")
    names = list(dict.fromkeys(name for pair in asked for name in pair))
    means = {name: statistics.mean(top1[name][seed] for seed in seeds) for name in names}
    pairs = compare_accuracies(top1, asked, images, classes, margins)
    signs = [(pair.difference > 0) - (pair.difference < 0) for pair in pairs if not pair.margin]
    taken = f"{len(seeds)} seeds, {images} images"
    every = [ends[name][seed] for name in names for seed in seeds]
    word, why = _conclude(pairs, means, every, len(seeds), images, classes)
    return Ordering(word, why, pairs, statistics.mean(signs) if signs else None, taken)


def compare_accuracies(
    top1: _Scores, pairs: Sequence[_Order], images: int, classes: int, margins: _Margins | None = None
) -> tuple[Pair, ...]:
    """Compare pairs of accuracies in percent, see `compare_pairs`.

    Two variants at chance are not separated. Neither are two that differ by less than the sampling noise of the images.

    Args:
        top1: variant -> seed -> accuracy.
        pairs: (first, second).
        images: the size of the split.
        classes: the data set's number of classes, by which chance is known.
        margins: see `compare_pairs`.
    """
    floor = 100 / classes + sampling_noise(100 / classes, images)
    return compare_pairs(top1, pairs, round_off(images), floor, images, margins)


def compare_trainings(trained: Mapping[str, Source], pairs: Sequence[_Order]) -> tuple[Pair, ...]:
    """Compare pairs of trainings by their records' accuracies, see `compare_accuracies`.

    All trainings are scored on the same images. Seeds pair trainings on one machine only, so the machine with the most
    records is taken, and a pair that it did not train is left out.

    Args:
        trained: name -> record.
        pairs: names of (first, second).
    """
    by_machine: dict[str, dict[str, Source]] = {}
    for name, source in trained.items():
        for each in list_all([source]):
            by_machine.setdefault(each.machine, {}).setdefault(name, each)
    own = max(by_machine.values(), key=lambda of: rank_machine(of.values()))
    m = next(iter(own.values())).metrics
    top1 = {name: source.by_seed(TOP1) for name, source in own.items()}
    both = [pair for pair in pairs if own.keys() >= set(pair)]
    return compare_accuracies(top1, both, m["held_out_images"], m["classes"])


def round_off(images: int) -> float:
    """Return the standard deviation, in points, of a difference's rounding to whole images: √(2/12) images."""
    return 100 / images * math.sqrt(2 / 12)


def compare_pairs(
    values: _Scores,
    pairs: Sequence[_Order],
    least_spread: float,
    floor: float = -math.inf,
    images: int | None = None,
    margins: _Margins | None = None,
) -> tuple[Pair, ...]:
    """Compare pairs by a paired t test of first − second over the seeds that all variants have; empty without seeds.

    Holm's correction is over the pairs of one call.

    Args:
        values: variant -> seed -> value, such as an accuracy or a loss.
        pairs: (first, second).
        least_spread: the least standard deviation of the differences, since values are written with few digits.
        floor: the mean that one variant of a pair must reach before the pair can be separated.
        images: the denominator of values in percent; None for other values.
        margins: (first, second) -> margin, for pairs whose test is of first + margin − second.
    """
    from scipy.stats import t as student

    seeds = find_common(values)
    n, found = len(seeds), []
    for first, second in pairs if seeds else ():
        differences = [values[first][seed] - values[second][seed] for seed in seeds]
        mean, margin = statistics.mean(differences), (margins or {}).get((first, second), 0.0)
        if n < 2:
            found.append(Pair(first, second, mean))
            continue
        spread, excess = max(statistics.stdev(differences), least_spread), mean + margin
        p = 2 * student.sf(abs(excess) / spread * math.sqrt(n), n - 1)
        half = float(student.ppf(1 - ALPHA / 2, n - 1)) * spread / math.sqrt(n)
        of_pair = [statistics.mean(values[name][seed] for seed in seeds) for name in (first, second)]
        noise = 0.0 if images is None else sampling_noise(statistics.mean(of_pair), images)
        limit = ""
        if n < _LEAST_SEEDS:
            limit = _TWO_SEEDS
        elif max(of_pair) < floor:
            limit = AT_CHANCE
        elif abs(excess) < noise:
            limit = FEW_IMAGES
        needed = seeds_needed(excess, spread, ALPHA / len(pairs))
        side = 0 if limit else 1 if excess > 0 else -1
        found.append(Pair(first, second, mean, (mean - half, mean + half), p, side, limit, needed, margin))
    # the correction needs the p values of all pairs
    adjusted = zip(found, holm([pair.p for pair in found]), strict=True)
    return tuple(dataclasses.replace(pair, p=float(p), side=pair.side if p < ALPHA else 0) for pair, p in adjusted)


def describe_power(pairs: Sequence[Pair], taken: str) -> str:
    """Return the sentence that no pair is separated; empty where one is, or without pairs.

    `taken` names the seeds and images, for the sentence.
    """
    if not pairs or any(pair.side for pair in pairs):
        return ""
    return f"No power: {taken} separate no pair."


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values by Holm's step-down: the k-th smallest of m times m − k + 1, never decreasing, at most 1."""
    m, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(m), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (m - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def seeds_needed(mean: float, spread: float, alpha: float) -> int | None:
    """Return the fewest seeds whose t reaches the two-sided level `alpha`, if mean and spread stay as they are.

    None for more than `MOST_SEEDS`.
    """
    import numpy as np
    from scipy.stats import t as student

    n = np.arange(2, MOST_SEEDS + 1)
    enough = n[abs(mean) / spread * np.sqrt(n) >= student.isf(alpha / 2, n - 1)]
    return int(enough[0]) if enough.size else None


def sampling_noise(percent: float, images: int) -> float:
    """Return the largest chance difference, in points, of two accuracies near `percent` (binomial, 95 %)."""
    share = percent / 100
    return 100 * 1.96 * math.sqrt(2 * share * (1 - share) / images)


def _conclude(
    pairs: Sequence[Pair], means: Mapping[str, float], ends: Sequence[_End], seeds: int, images: int, classes: int
) -> tuple[_Word, str]:
    """Return the word of an ordering and the reason for it, by the first case that applies.

    Args:
        pairs: the compared pairs.
        means: variant -> accuracy in percent.
        ends: of each variant and seed; a curve that still rises more than the variants differ decides nothing.
        seeds, images, classes: how many there are.
    """
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
    if seeds < _LEAST_SEEDS:
        return "no power", "two seeds decide nothing"
    noise = sampling_noise(overall, images)
    if spread < noise:
        easy = "the task is too easy: " if overall > 95 else ""
        return "no power", f"{easy}all variants lie within {spread:.1f} points, and chance alone makes {noise:.1f}"
    against = [pair for pair in pairs if pair.side < 0]
    if against:
        named = ", ".join(pair.reverse for pair in against)
        return "ordering contradicted", f"{named}, at a family-wise error rate of 5 %"
    seen = sum(pair.side > 0 for pair in pairs)  # none is below 0 any more
    if seen == len(pairs):
        return "ordering seen", f"all {len(pairs)} pairs, at a family-wise error rate of 5 %"
    needed = [pair.needed for pair in pairs if not pair.side and not pair.limit]
    why = f"{seen or 'none'} of {len(pairs)} pairs {'is' if seen < 2 else 'are'} separated"
    if unlearnt := [pair for pair in pairs if pair.limit == AT_CHANCE]:
        named = ", ".join(f"{pair.better} and {pair.worse}" for pair in unlearnt)
        why += f"; of {named} neither exceeds chance, {chance:.1f} %"
    if close := sum(pair.limit == FEW_IMAGES for pair in pairs):
        why += f"; {close} differ{'s' if close == 1 else ''} by less than chance alone makes"
    if needed:
        fewest = f"over {MOST_SEEDS}" if None in needed else str(max(needed))
        which = "the rest" if unlearnt or close else "all"
        why += f"; with differences and spreads as observed, {which} would need {fewest} seeds"
    return "not separated" if seen else "no power", why
