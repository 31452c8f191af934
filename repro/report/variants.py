"""The variants that a paper ablates: its rows next to ours, and whether its ordering is seen in our data."""

import dataclasses
import fnmatch
import itertools
import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from ..core.paths import Paths
from .claims import Report
from .document import Block, Heading, Picture, Piece, Table, code, number, strong, table
from .ledger import Column, Ledger
from .ordering import MOST_SEEDS, TOP1, Ordering, judge_ordering
from .paper import Drawings, VariantTable
from .records import Source, describe_age, describe_seeds, describe_twins, group_by, keep_best, read_curves
from .results import Missing, Results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Variants that were trained alike."""

    variants: Mapping[str, Source]  # name -> record, in the order in which the paper's room names them
    speeds: Mapping[str, Source]  # name -> the record of its throughput, where that was measured
    paths: Paths  # of the checkout

    @property
    def common(self) -> Mapping[str, Any]:
        """What the records have in common, as one of them says it."""
        return next(iter(self.variants.values())).metrics

    @property
    def most_seeds(self) -> int:
        return max(source.most_seeds for source in self.variants.values())

    @property
    def has_own_rates(self) -> bool:
        return all(source.has_own_rate for source in self.variants.values())

    @property
    def title(self) -> str:
        """What was trained, how long, on what devices, whether by older code, and on how many other machines."""
        m, seeds = self.common, describe_seeds(self.variants.values())
        sources = list(self.variants.values())
        devices = " and ".join(dict.fromkeys(source.device.split(",")[0] for source in sources))
        length = f"{m['epochs']} epoch{'s' if m['epochs'] > 1 else ''}, {seeds}"
        about = f"{m['model']} on {m['data']}, {length}, {m['image_size']}² pixels"
        rates = ", each at its own best rate" if self.has_own_rates else ""
        return f"{about}{rates}, {devices}{describe_age(sources)}{describe_twins(sources)}"

    def at(self, where: VariantTable) -> dict[str, Source]:
        """Its variants in a table or figure, in the paper's order."""
        return {name: self.variants[name] for name in where.rows if name in self.variants}

    def read_curve(self, name: str, key: str) -> dict[int, dict[int, float]]:
        """Seed -> epoch -> a column of a variant's learning curve; none where it is not there."""
        return read_curves(self.paths, self.variants[name], key) if name in self.variants else {}

    def throughput(self, name: str) -> float | None:
        """Images per second of a variant; None where it was not measured, or other work disturbed it."""
        speed = self.speeds.get(name)
        return None if speed is None or speed.metrics.get("noisy") else speed.metrics["throughput_img_per_s"]


def find_groups(results: Results, variants: Any) -> list[Group]:
    """The trained variants: those of the pipeline, then others. Another recipe, model or data set is another group.

    A variant that several records of a group hold is taken from the one with the most seeds.
    """

    def name_recipe(source: Source) -> tuple:
        m = source.metrics
        unchanged = {key: str(value) for key, value in m["options"].items() if key not in variants.changed}
        return source.stage is None, m["data"], m["model"], tuple(sorted(unchanged.items())), _hash_recipe(source)

    classifiers = [each for each in results.sources if each.most_seeds and TOP1 in each.metrics]
    names = {each.path: find_variant(results, variants, each.metrics) for each in classifiers}
    trained = [each for each in classifiers if names[each.path]]
    has_speed = (each for each in results.sources if each.path.endswith("/speed.json"))
    speeds = {each.folder: each for each in has_speed if each.metrics.get("throughput_img_per_s")}
    groups = []
    for alike in group_by(trained, name_recipe).values():
        members = {names[each.path]: each for each in keep_best(alike, lambda each: names[each.path])}
        ordered = {name: members[name] for name in variants.options if name in members}
        measured = {name: speeds[source.folder] for name, source in ordered.items() if source.folder in speeds}
        groups.append(Group(variants=ordered, speeds=measured, paths=results.paths))
    return groups


def _hash_recipe(source: Source) -> str:
    """What is the same for records that were trained alike: with rates of their own, the rest of their recipes."""
    if source.recipe is None:
        return source.metrics["recipe_hash"]
    varied = {"options", "learning_rate"} if source.has_own_rate else {"options"}
    return json.dumps({name: value for name, value in json.loads(source.recipe).items() if name not in varied})


def find_variant(results: Results, variants: Any, metrics: Mapping[str, Any]) -> str | None:
    """Which variant a record is of; None for another combination of options, or of a recipe's settings."""
    defaults = results.families.get(metrics["model"].split("_")[0], {})
    own = {key: value for key, value in metrics["options"].items() if key in variants.changed}
    options = {key: value for key, value in own.items() if defaults.get(key) != str(value)}
    recipe = {key: metrics[key] for key in variants.changed_recipe if metrics.get(key)}
    for name, changes in variants.options.items():
        model = variants.variants[name].changes.get("model", "").partition("_nano")[0]
        if metrics["model"].startswith(model) and changes == options and variants.recipes[name] == recipe:
            return name
    return None


def judge_group(group: Group, where: VariantTable, ledger: Ledger) -> Ordering:
    """Whether the paper's ordering of a table or figure is seen; see `ordering.judge_ordering`."""
    members, m = group.at(where), group.common
    top1 = {name: source.by_seed(TOP1) for name, source in members.items()}
    runs = {name: source.metrics["by_seed"] for name, source in members.items()}
    ends = {name: {run["seed"]: find_ends(run) for run in own} for name, own in runs.items()}
    return judge_ordering(top1, ends, find_orders(where, ledger), m["held_out_images"], m["classes"])


def find_ends(run: Mapping[str, Any]) -> tuple[float | None, float]:
    """The last two accuracies of a curve in percent, on its own split; None first where there was one."""
    of_curve = "tune_" if f"tune_{TOP1}" in run else ""
    return run[f"{of_curve}top1_previous_percent"], run[f"{of_curve}{TOP1}"]


def find_orders(where: VariantTable, ledger: Ledger) -> list[tuple[str, str]]:
    """(better, worse) for each two variants that the paper orders, by its text or by its printed Top-1."""
    if where.orders is not None:
        return [(better, worse) for better, others in where.orders.items() for worse in others]
    top1 = {name: float(find_printed(ledger, row, TOP1)) for name, row in where.rows.items()}
    ranked = sorted(top1, key=top1.__getitem__, reverse=True)
    return [(better, worse) for better, worse in itertools.combinations(ranked, 2) if top1[better] > top1[worse]]


def find_printed(ledger: Ledger, row: str | None, column: str) -> str:
    """What the paper prints in a row and a column; `–` where it prints nothing."""
    entry = ledger.entries.get(f"{row}.{column}")
    return "–" if entry is None else entry.printed or "–"


def judge_variants(report: Report) -> list[tuple[Group, VariantTable, Ordering]]:
    """The verdict on each table for each group with two of its variants; the group with the most seeds first."""
    tables = report.paper.compared
    pairs = sorted(_pair(report), key=lambda pair: (tables.index(pair[1]), -pair[0].most_seeds))
    return [(group, where, judge_group(group, where, report.paper.ledger)) for group, where in pairs]


def list_ablations(report: Report) -> list[Block]:
    """The verdicts on orderings, then every table and figure of each group; nothing where the paper ablates nothing."""
    if not report.paper.variants:
        return []
    ledger, command = report.paper.ledger, report.paper.train_command
    judged = judge_variants(report)
    if not judged:
        raise Missing("no variant is trained yet", f"{command} --all")
    rows = [[at.place, group.title, strong(it.word), it.why, number(it.tau, ".2f")] for group, at, it in judged]
    blocks: list[Block] = [table(["", "trained", "verdict", "because", "τ"], rows)]
    drawn = _to_draw(report)
    for group, where, found in judged:
        blocks.append(Heading(f"{where.place}: {group.title}"))
        if note := report.paper.ablations.notes.get(where.place):
            blocks.append((note,))
        blocks.append(_rows_table(group, where, report))
        blocks += [(Picture(f"figures/{name}", where.place),) for name, pair in drawn.items() if pair == (group, where)]
        if absent := [name for name in where.rows if name not in group.variants]:
            alike = f"{command} --all --data {group.common['data']} --epochs {group.common['epochs']}"
            blocks.append((f"Not trained here: {', '.join(absent)}; ", code(alike), " trains all."))
        if found.pairs:
            blocks.append(_pairs_table(where, found, ledger))
    return blocks


def plan_figures(report: Report) -> Drawings:
    """The figures that compare variants, one for each data set: from the group with most of a figure's variants."""
    printed = partial(find_printed, report.paper.ledger)
    drawn = {}
    for name, (group, where) in _to_draw(report).items():
        _, draw = report.paper.pictures[where.place]
        drawn[name] = list(group.at(where).values()), partial(draw, group=group, printed=printed)
    return drawn


def find_shown(report: Report) -> set[str]:
    """The paths of the records that `list_ablations` or another document alone shows."""
    sources = [source for group, where in _list_pairs(report) for source in group.at(where).values()]
    shown = {source.path for source in sources if source.stage in (None, "ablate")}
    paths = [source.path for source in report.results.sources]
    return shown.union(*(fnmatch.filter(paths, document.records) for document in report.paper.documents))


def _pair(report: Report) -> list[tuple[Group, VariantTable]]:
    """Each group with each table of which it has two variants, unless another one says all that, and more."""
    pairs = _list_pairs(report)
    rivals = group_by(pairs, lambda pair: pair[1].place)
    return [pair for pair in pairs if not any(_surpasses(other, *pair) for other, _ in rivals[pair[1].place])]


def _list_pairs(report: Report) -> list[tuple[Group, VariantTable]]:
    groups = find_groups(report.results, report.paper.variants) if report.paper.variants else []
    return [(group, where) for group in groups for where in report.paper.compared if len(group.at(where)) > 1]


def _surpasses(other: Group, group: Group, where: VariantTable) -> bool:
    """Whether another group has all of a group's variants by the same written recipes with more seeds."""
    if any(other.common[key] != group.common[key] for key in ("model", "data")) or other.most_seeds <= group.most_seeds:
        return False
    ours, theirs = group.at(where), other.at(where)
    return all(name in theirs and theirs[name].recipe == source.recipe for name, source in ours.items())


def _to_draw(report: Report) -> dict[str, tuple[Group, VariantTable]]:
    """File name of a figure -> the group with most of its variants, then with own rates, then with most epochs."""
    pictures = report.paper.pictures
    shown = [(group, where) for group, where in _pair(report) if where.place in pictures]
    rivals = group_by(shown, lambda pair: f"{pictures[pair[1].place][0]}_{pair[0].common['data']}.png")

    def rank(pair: tuple[Group, VariantTable]) -> tuple[int, bool, int]:
        return len(pair[0].at(pair[1])), pair[0].has_own_rates, pair[0].common["epochs"]

    return {name: max(pairs, key=rank) for name, pairs in rivals.items()}


def _rows_table(group: Group, where: VariantTable, report: Report) -> Table:
    """The paper's numbers of each variant, then ours, with those of detectors that began from these weights."""
    paper, ledger, members = report.paper, report.paper.ledger, group.at(where)
    printed_row = next((row for row in where.rows.values() if row), None)
    columns = ledger.table(printed_row.partition(".")[0]).columns if printed_row else {}
    downstream = {name: _downstream_scores(report.results, source) for name, source in members.items()}
    asked = [key for key in columns if key in paper.ablations.columns.get(where.place, columns)]
    extra = [key for key in asked if key != TOP1 and any(key in scores for scores in downstream.values())]
    printed = [key for key in asked if columns[key].kind != "accuracy" or key == TOP1 or key in extra]
    theirs = [f"paper: {_label(columns[key], key)}" for key in printed]
    measured = ("params (M)", "MACs (G)", "Top-1 (%)", *(columns[key].label for key in extra))
    rows: list[list[Piece]] = []
    for name, source in members.items():
        m, scores = source.metrics, downstream[name]
        all_changes = {**paper.variants.options[name], **paper.variants.recipes[name]}
        changes = ", ".join(f"{key} {value or 'all'}" for key, value in all_changes.items())
        if group.has_own_rates:
            changes = f"{changes or paper.model}, rate {json.loads(source.recipe)['learning_rate']['peak']:g}"
        spread = m.get("top1_std_percent")
        rows.append(
            [
                changes or paper.ablations.label or paper.model,
                *(number(find_printed(ledger, where.rows[name], key)) for key in printed),
                number(m["num_params"] / 1e6, ".4g"),
                number(_count_macs(m["model"], json.dumps(m["options"]), m["image_size"], m["classes"]), ".4g"),
                f"{m[TOP1]:.2f}" + (f" ± {spread:.2f}" if spread is not None else ""),
                *(number(scores.get(key), ".1f") for key in extra),
            ]
        )
    return table(["", *theirs, *(f"ours: {name}" for name in measured)], rows)


@cache
def _count_macs(model: str, options: str, image_size: int, classes: int) -> float | None:
    """Multiply-adds of a model for one image, in units of 1e9; `options` as JSON. None for a model of another version."""
    from ..bench.flops import cost  # loads PyTorch

    try:
        return cost(model, {**json.loads(options), "num_classes": classes}, (image_size, image_size)).macs / 1e9
    except (RuntimeError, TypeError, ValueError):
        return None


def _label(column: Column, key: str) -> str:
    if key == TOP1:
        return "Top-1 (%)"
    return f"{column.label} ({column.unit})" if column.unit in ("M", "G") else column.label


def _downstream_scores(results: Results, source: Source) -> dict[str, float]:
    """The scores of the detectors and segmenters whose first weights are this record's."""
    weights = f"{source.folder}/weights.safetensors"
    found = (other.metrics for other in results.score_sources)
    began = [m for m in found if (m.get("init") or {}).get("weights") == weights]
    keys = {key for scores in results.scores.values() for key in scores} - {TOP1}
    return {key: m[key] for m in began for key in keys if isinstance(m.get(key), (int, float))}


def _pairs_table(where: VariantTable, found: Ordering, ledger: Ledger) -> Table:
    rows: list[list[Piece]] = []
    for pair in found.pairs:
        printed = [find_printed(ledger, where.rows[name], TOP1) for name in (pair.better, pair.worse)]
        theirs = "–" if where.orders is not None else number(f"+{float(printed[0]) - float(printed[1]):.1f}")
        needed: Piece = "–" if pair.is_learnt else "– (at chance)"
        if pair.is_learnt and not pair.side:
            needed = f"over {MOST_SEEDS}" if pair.needed is None else number(pair.needed)
        rows.append([f"{pair.better} > {pair.worse}", theirs, pair.show(2), number(pair.p, ".3f"), pair.word, needed])
    return table(["the paper's order", "paper (points)", "ours (points) [95 %]", "p (Holm)", "", "seeds needed"], rows)
