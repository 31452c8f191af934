"""The variants of a paper's ablations: tables of its numbers and ours, and verdicts on its order of variants."""

import dataclasses
import fnmatch
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

from .claims import Report
from .ledger import Ledger
from .markdown import bullets, join, number, picture, show_p, strong, table
from .ordering import AT_CHANCE, FEW_IMAGES, MOST_SEEDS, TOP1, Ordering, Pair, judge_ordering
from .paper import Drawings, Paper, Suite, VariantTable
from .records import Source, describe_seeds, group_by, list_all, rank_machine, read_curves, warn_of_seeds
from .results import Missing, Results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The variants of one suite and one model that were trained on one machine."""

    suite: Suite
    variants: Mapping[str, Source]  # name -> record, in the order of the paper's tables
    searches: Mapping[str, Source]  # name -> the search that chose the variant's learning rate, if one did
    elsewhere: tuple["Group", ...] = ()  # the groups of other machines, which may have trained other variants

    @property
    def _first(self) -> Source:
        """Any of the records, for what they all have in common; a group is never empty."""
        return next(iter(self.variants.values()))

    @property
    def machine(self) -> str:
        """The device that trained all variants, without its number of threads."""
        return self._first.machine

    @property
    def common(self) -> Mapping[str, Any]:
        """The metrics of the first record, for keys on which all records agree, such as the model and the data."""
        return self._first.metrics

    @property
    def setting(self) -> tuple[Any, ...]:
        """What the trainings have in common besides their model and first weights."""
        return _read_setting(self._first)

    @property
    def most_seeds(self) -> int:
        """The number of seeds of the variant that has most."""
        return max(source.most_seeds for source in self.variants.values())

    @property
    def has_own_rates(self) -> bool:
        """Whether each variant was trained at a learning rate of its own, by the suite's declaration."""
        return self.suite.searches is not None

    @property
    def rates(self) -> str:
        """The choice of learning rates in words: one rate for all variants, or one per variant."""
        if not self.has_own_rates:
            return "one rate"
        searched = self.searches.keys() == self.variants.keys()
        return "rates by own searches" if searched else "own rates, whose searches are not all here"

    @property
    def title(self) -> str:
        """The model, the data, the numbers of epochs and seeds, and the choice of learning rates."""
        m, seeds = self.common, describe_seeds(self.variants.values())
        length = f"{m['epochs']} epoch{'s' if m['epochs'] > 1 else ''}, {seeds}"
        return f"{m['model']} on {m['data']}, {length}, {self.rates}"

    def at(self, where: VariantTable) -> dict[str, Source]:
        """Return the trained variants of a table or figure, in the paper's order."""
        return {name: self.variants[name] for name in where.rows if name in self.variants}

    def read_curve(self, name: str, key: str) -> dict[int, dict[int, float]]:
        """Return seed -> epoch -> a column of a variant's learning curve; empty if there is no variant or no curve."""
        return read_curves(self.variants[name], key) if name in self.variants else {}

    def list_changes(self, name: str) -> dict[str, Any]:
        """Return the settings that distinguish a variant: model options, and `freeze` if inherited weights stay."""
        choices = {
            each: {**source.metrics["options"], **({"freeze": True} if source.metrics.get("freeze") else {})}
            for each, source in self.variants.items()
        }
        own = choices[name].items()
        return {key: value for key, value in own if any(each.get(key) != value for each in choices.values())}


def find_groups(results: Results, paper: Paper, names: Collection[str] = ()) -> list[Group]:
    """Group a paper's trained variants by suite and model.

    A group belongs to the machine that `rank_machine` puts first, by all variants or by those in `names` if there are
    any. Its `elsewhere` has the groups of the other machines. Records that differ in data, length or first weights are
    not compared: of one machine's, the most that agree are the group.
    """
    listed = list_all(results.sources)
    trained = [each for each in listed if each.most_seeds and TOP1 in each.metrics]
    searches = [each for each in listed if "trials" in each.metrics]
    names = names or paper.variants

    def rank(group: Group) -> tuple[int, int]:
        """Return the rank of a group's machine; a picture or a table counts only the variants that it shows."""
        return rank_machine([source for name, source in group.variants.items() if name in names])

    def find_alike(source: Source) -> tuple[Any, ...]:
        """Return what the records of a group share; only seeds of one machine are paired."""
        return source.machine, _read_setting(source), source.init_hash

    groups = []
    for suite in paper.suites:
        places = suite.list_places(paper.variants)
        members = [each for each in trained if each.place in places]
        for alike in group_by(members, lambda each: each.metrics["model"]).values():
            by_machine = [_gather(suite, places, own, searches) for own in group_by(alike, find_alike).values()]
            first, *others = sorted(by_machine, key=rank, reverse=True)
            others = [each for each in others if each.machine != first.machine and each.setting == first.setting]
            groups.append(dataclasses.replace(first, elsewhere=tuple(others)))
    return groups


def _read_setting(source: Source) -> tuple[Any, ...]:
    """Return what variants must have in common to be compared, besides machine, model and first weights."""
    return *source.scored_on, *(source.metrics.get(key) for key in ("image_size", "epochs", "classes"))


def _gather(suite: Suite, places: Mapping[str, str], own: Iterable[Source], searches: Iterable[Source]) -> Group:
    """Make the group of one machine's records, and look up the searches of their learning rates.

    Args:
        suite: the suite whose cells wrote the records.
        places: place of a cell -> its variant, see `Suite.list_places`.
        own: the machine's records.
        searches: the searches of all machines.
    """
    by_place = {each.place: each for each in own}
    members: dict[str, Source] = {}
    for place, name in places.items():  # of a variant's cells the first counts
        if place in by_place:
            members.setdefault(name, by_place[place])
    chosen = {name: _find_search(suite, name, source, searches) for name, source in members.items()}
    return Group(suite=suite, variants=members, searches={name: search for name, search in chosen.items() if search})


def _find_search(suite: Suite, name: str, source: Source, searches: Iterable[Source]) -> Source | None:
    """Find the search that chose a training's learning rate, if possible on the same machine; None if none did."""
    if suite.searches is None:
        return None
    place = suite.searches.format(variant=name)
    fitting = [each for each in searches if each.place == place and each.metrics["chosen"]["lr"] == _read_rate(source)]
    return min(fitting, key=lambda each: each.machine != source.machine, default=None)


def _read_rate(source: Source) -> float:
    """Read the peak of a training's learning rate from its recipe; trainings of a suite with searches have one."""
    return json.loads(source.recipe)["learning_rate"]["peak"]


def judge_group(group: Group, where: VariantTable, ledger: Ledger, also_in: Group | None = None) -> Ordering:
    """Judge the paper's order of the variants in a table or figure by a group; see `ordering.judge_ordering`.

    With `also_in`, only the variants count that this other group has, too.
    """
    members, m = group.at(where), group.common
    if also_in is not None:
        members = {name: source for name, source in members.items() if name in also_in.variants}
    top1 = {name: source.by_seed(TOP1) for name, source in members.items()}
    ends = {
        name: {run["seed"]: find_last_scores(run) for run in source.metrics["by_seed"]}
        for name, source in members.items()
    }
    return judge_ordering(top1, ends, find_orders(where, ledger), m["held_out_images"], m["classes"], where.margins)


def find_last_scores(run: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return the last two accuracies of a run's curve in percent; the first is None if the curve has only one.

    They are on the tuning split if the run has one, because the curve then is.
    """
    of_curve = "tune_" if f"tune_{TOP1}" in run else ""
    return run[f"{of_curve}top1_previous_percent"], run[f"{of_curve}{TOP1}"]


def find_orders(where: VariantTable, ledger: Ledger) -> list[tuple[str, str]]:
    """Return (better, worse) for each pair of variants that the paper orders, by its text or by its printed Top-1.

    By Top-1, a pair is left out if `margins` has it in reverse: the paper then calls the lower variant no worse.
    """
    if where.orders is not None:
        return [(better, worse) for better, others in where.orders.items() for worse in others]
    top1 = {name: float(find_printed(ledger, row, TOP1)) for name, row in where.rows.items()}
    pairs = itertools.combinations(sorted(top1, key=top1.__getitem__, reverse=True), 2)
    return [(a, b) for a, b in pairs if top1[a] > top1[b] and (b, a) not in where.margins]


def find_printed(ledger: Ledger, row: str | None, column: str) -> str:
    """Return the number that the paper prints in a row and a column, or `–` if it prints none."""
    entry = ledger.entries.get(f"{row}.{column}")
    return "–" if entry is None else entry.printed or "–"


@lru_cache(maxsize=8)  # several sections and pages of a paper ask for it; the bound frees the reports of earlier runs
def judge_variants(report: Report) -> list[tuple[Group, VariantTable, Ordering]]:
    """Judge each table by each group with at least two of its variants, the group with the most seeds first.

    A group that another surpasses is left out, see `_surpasses`.
    """
    judged = []
    for where in report.paper.compared:
        groups = _find_compared(report, where)
        shown = [group for group in groups if not any(_surpasses(other, group, where) for other in groups)]
        for group in sorted(shown, key=lambda group: -group.most_seeds):
            judged.append((group, where, judge_group(group, where, report.paper.ledger)))
    return judged


def _find_compared(report: Report, where: VariantTable) -> list[Group]:
    """Find the groups with at least two variants of a table or figure; fewer have no order."""
    groups = find_groups(report.results, report.paper, where.rows)
    return [group for group in groups if len(group.at(where)) > 1]


def list_ablations(report: Report) -> str:
    """Write the verdicts on orders, then every table and figure of each group; empty if the paper has no suites.

    page.md calls it by name.

    Raises:
        Missing: no variant is trained yet.
    """
    if not report.paper.suites:
        return ""
    ledger, command = report.paper.ledger, report.paper.train_command
    judged = judge_variants(report)
    if not judged:
        raise Missing("no variant is trained yet", command)
    rows = []
    for group, where, found in judged:
        others = _judge_elsewhere(group, where, ledger)
        again = "; ".join(f"{each.machine}: {other.shown}, by {_count_pairs(other.pairs)}" for each, other, _ in others)
        origin = f"{group.title}, {group.common['image_size']}² pixels, {group.machine}"
        rows.append([where.place, origin, strong(found.shown), found.why, number(found.tau, ".2f"), again or "–"])
    header = ["", "trained", "verdict", "because", "τ", "elsewhere"]
    blocks = [table(header, rows)]
    drawn = _choose_panels(report)
    for group, where, found in judged:
        blocks += [f"### {where.place}: {group.title}", warn_of_seeds(group.at(where).values())]
        blocks += [report.paper.ablations.notes.get(where.place, ""), _rows_table(group, where, report)]
        # a picture of several panels is shown once, at the first
        names = [name for name, panels in drawn.items() if panels[0] == (group, where)]
        blocks += [picture(f"figures/{name}", where.place) for name in names]
        if absent := [name for name in where.rows if name not in group.variants]:
            blocks.append(f"Not trained here: {', '.join(absent)}; `{command}` trains all.")
        if found.pairs and found.word != "no power":
            blocks.append(_pairs_table(where, found, ledger))
        blocks.append(describe_elsewhere(group, where.rows))
    return join(blocks)


def list_changed_verdicts(report: Report) -> str:
    """List the tables on which another machine's records change the verdict; empty if there are none."""
    lines = []
    for group, where, _ in judge_variants(report):
        for each, other, same in _judge_elsewhere(group, where, report.paper.ledger):
            if other.word != same.word:
                about = f" of {where.place} ({group.common['data']}, {group.rates}; {_count_pairs(other.pairs)}): "
                said = f"{same.shown} on {group.machine}, {other.shown} on {each.machine}."
                lines.append(f"**The machine changes the verdict**{about}{said}")
    return bullets(lines)


def describe_elsewhere(group: Group, names: Collection[str]) -> str:
    """List the other machines that also trained some of a group's variants, with their Top-1 of those in `names`."""
    lines = []
    for other in group.elsewhere:
        own = {name: source for name, source in other.variants.items() if name in names}
        if group.variants.keys() & own.keys():
            shown = ", ".join(f"{name} {_show_top1(source)}" for name, source in own.items())
            lines.append(f"On {other.machine}, {describe_seeds(own.values())}: Top-1 (%) {shown}.")
    return bullets(lines)


def _judge_elsewhere(group: Group, where: VariantTable, ledger: Ledger) -> list[tuple[Group, Ordering, Ordering]]:
    """Return other machines' groups with an ordered pair, and the verdicts of both on the variants that both have."""
    found = [
        (other, judge_group(other, where, ledger, group), judge_group(group, where, ledger, other))
        for other in group.elsewhere
    ]
    return [(other, judged, same) for other, judged, same in found if judged.pairs]


def _count_pairs(pairs: Sequence[Pair]) -> str:
    """Return the number of pairs in words: `1 pair`, `2 pairs`."""
    return f"{len(pairs)} pair{'s' * (len(pairs) > 1)}"


def _show_top1(source: Source) -> str:
    """Write a training's mean Top-1 in percent ± its standard deviation over the seeds, which one seed lacks."""
    spread = source.metrics.get("top1_std_percent")
    return f"{source.metrics[TOP1]:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")


def plan_figures(report: Report) -> Drawings:
    """Plan the figures that compare variants, one per picture and data set, of the groups that `_choose_panels` chooses."""
    printed = partial(find_printed, report.paper.ledger)
    drawn = {}
    for name, panels in _choose_panels(report).items():
        _, draw = report.paper.pictures[panels[0][1].place]
        sources = {each.path: each for group, where in panels for each in group.at(where).values()}
        groups = {where.place: group for group, where in panels}
        drawn[name] = [*sources.values()], partial(draw, groups=groups, printed=printed)
    return drawn


def find_shown(report: Report) -> set[str]:
    """Return the paths of records that the ablations or another document show, which the page of runs leaves out.

    A table may compare trainings of other stages, too, such as `pretrain`; these stay on that page.
    """
    compared = ((group, where) for where in report.paper.compared for group in _find_compared(report, where))
    own = {source.path for group, where in compared for source in group.at(where).values()}
    patterns = [document.records for document in report.paper.documents]
    shown = set()
    for source in report.results.sources:
        ablated = any(of.path in own and of.place.startswith("ablate") for of in list_all([source]))
        if ablated or any(fnmatch.fnmatch(source.place, pattern) for pattern in patterns):
            shown.add(source.path)
    return shown


def _surpasses(other: Group, group: Group, where: VariantTable) -> bool:
    """Tell whether another group has all of a group's variants in a table, by the same recipes and with more seeds."""
    if any(other.common[key] != group.common[key] for key in ("model", "data")) or other.most_seeds <= group.most_seeds:
        return False
    ours, theirs = group.at(where), other.at(where)
    return all(name in theirs and theirs[name].recipe == source.recipe for name, source in ours.items())


def _choose_panels(report: Report) -> dict[str, list[tuple[Group, VariantTable]]]:
    """Return file name of a picture -> the group and the table of each of its panels.

    A panel shows the group with the most of its variants. Own learning rates break ties, then more epochs.
    """
    pictures = report.paper.pictures
    shown = [(group, where) for group, where, _ in judge_variants(report) if where.place in pictures]
    rivals = group_by(shown, lambda pair: (pair[0].common["data"], pair[1].place))

    def rank(pair: tuple[Group, VariantTable]) -> tuple[int, bool, int]:
        """Return the sort key by which a data set's best group is the largest."""
        return len(pair[0].at(pair[1])), pair[0].has_own_rates, pair[0].common["epochs"]

    found = {}
    for (data, place), pairs in rivals.items():
        found.setdefault(f"{pictures[place][0]}_{data}.png", []).append(max(pairs, key=rank))
    return found


def _rows_table(group: Group, where: VariantTable, report: Report) -> str:
    """Write a row per variant: the paper's accuracy, ours, and scores of dense models that start from its weights."""
    paper, ledger, members = report.paper, report.paper.ledger, group.at(where)
    printed_row = next((row for row in where.rows.values() if row), None)
    columns = ledger.table(printed_row.partition(".")[0]).columns if printed_row else {}
    downstream = {name: _downstream_scores(report.results, source) for name, source in members.items()}
    asked = [key for key in columns if key in paper.ablations.columns.get(where.place, columns)]
    extra = [key for key in asked if key != TOP1 and any(key in scores for scores in downstream.values())]
    # sizes and speeds are left out, because the section of the paper's own table compares them with ours
    printed = [key for key in asked if columns[key].kind == "accuracy" and (key == TOP1 or key in extra)]
    rows = []
    for name, source in members.items():
        m = source.metrics
        # a `chunk_size` of 0 is one chunk of all tokens
        shown = {
            key: "all" if (key, value) == ("chunk_size", 0) else value
            for key, value in group.list_changes(name).items()
        }
        changes = ", ".join(f"{key} {value}" for key, value in shown.items())
        row = {"": changes or paper.ablations.label or paper.model}  # heading -> cell
        if group.has_own_rates:
            row[""] = f"{changes or paper.model}, rate {_read_rate(source):g}"
            row["search of its rate"] = _describe_search(group, name)
        for key in printed:
            label = "Top-1 (%)" if key == TOP1 else columns[key].label
            row[f"paper: {label}"] = find_printed(ledger, where.rows[name], key)
        macs_g = count_macs(m["model"], json.dumps(m["options"]), m["image_size"], m["classes"])
        row["ours: params (M)"] = number(m["num_params"] / 1e6, ".4g")
        row["ours: MACs (G)"] = number(macs_g, ".4g")
        row["ours: Top-1 (%)"] = _show_top1(source)
        row |= {f"ours: {columns[key].label}": number(downstream[name].get(key), ".1f") for key in extra}
        rows.append(row)
    return table([*rows[0]], (row.values() for row in rows))


def _describe_search(group: Group, name: str) -> str:
    """Describe the search that chose a variant's learning rate: its trials, and its machine if that is another."""
    search = group.searches.get(name)
    if search is None:
        return "no search on record"
    trials = len(search.metrics["trials"])
    return f"{trials} trials{'' if search.machine == group.machine else f' on {search.machine}'}"


@cache
def count_macs(model: str, options: str, image_size: int, classes: int) -> float | None:
    """Count a model's multiply-adds for one image, in units of 1e9.

    `options` is JSON, because the cache needs hashable arguments. The result is None if this version of the code cannot
    build the model.
    """
    from ..bench.flops import cost  # imported here because it loads PyTorch

    try:
        return cost(model, {**json.loads(options), "num_classes": classes}, (image_size, image_size)).macs / 1e9
    except (RuntimeError, TypeError, ValueError):
        return None


def _downstream_scores(results: Results, source: Source) -> dict[str, float]:
    """Return the scores of the detectors and segmenters that started from the weights of this record.

    Of several, those of the pipeline count before others, then those of the longest training.
    """
    keys = {key for scores in results.scores.values() for key in scores} - {TOP1}
    dense = [each for each in results.score_sources if each.init_hash == source.metrics["weights_hash"]]
    found: dict[str, float] = {}
    for each in sorted(dense, key=lambda each: (each.stage is None, -each.metrics["epochs"])):
        own = {key: each.metrics.get(key) for key in keys}
        found = {key: score for key, score in own.items() if isinstance(score, (int, float))} | found
    return found


def _pairs_table(where: VariantTable, found: Ordering, ledger: Ledger) -> str:
    """Write a row per pair that the paper orders: its difference, ours, and the seeds that would separate it."""
    rows = []
    for pair in found.pairs:
        theirs = "–"
        if where.orders is None:
            better, worse = (float(find_printed(ledger, where.rows[name], TOP1)) for name in (pair.better, pair.worse))
            theirs = f"{better - worse:+.1f}"
        needed = f"over {MOST_SEEDS}" if pair.needed is None else number(pair.needed)
        if pair.side or pair.limit in (AT_CHANCE, FEW_IMAGES):  # separated, or no number of seeds would do
            needed = f"– ({pair.limit})" if pair.limit else "–"
        rows.append([pair.claim, theirs, pair.show(2), show_p(pair.p), pair.word, needed])
    return table(["the paper's order", "paper (points)", "ours (points) [95 %]", "p (Holm)", "", "seeds needed"], rows)
