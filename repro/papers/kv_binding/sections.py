"""The sections of the KV binding's page besides the tables: residuals, changes of an inner learner, and probes."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.statistics import share_interval
from ...report.claims import Report
from ...report.expressions import Call
from ...report.markdown import code, join, number, strong, table, tabulate
from ...report.ordering import Pair, compare_accuracies, describe_power
from ...report.records import Source, describe_origin, describe_seeds, keep_best, warn_of_seeds
from ...report.results import Missing
from ...report.variants import TOP1, Group, describe_elsewhere, find_groups
from .forms import find_backbones, find_side

_ROUNDING = 1e-12
CHUNKS = (16, 32, 64, 256)
# calls whose two sides are equal bit for bit on every processor; their error prints as 0
EXACT = (Call("identity_error", ("negated_loss",)), Call("mirrored_training_error", ()))
_NAMES = {"vit3": "ViT³", "lact": "LaCT", "vittt": "Vittt"}
# step of a variant -> its change in words
CHANGES = {
    "own": "the unchanged model",
    "ascent": "learns up its loss",
    "q_is_k": "reads out keys",
    "steps2": "two inner steps",
    "steps4": "four inner steps",
    "v1": "V1: only the last matrix learns",
    "v2": "V2: and no row norms",
    "v3": "V3: one matrix",
    "v3_as_run": "V3 as the authors ran it",
    "v4": "V4: and no rates of tokens",
    "v5": "V5: and no momentum",
    "v6": "V6: and no orthogonal or damped step",
    "v6_as_run": "V6 as the authors ran it",
    "plain": "without LayerNorm and bias",
    "dot": "without them, and with the dot product for its loss",
}
COMPILED = ("numba", "triton")  # backends whose loops are compiled; the other learners run in eager PyTorch
UNLIKE = "not comparable (eager PyTorch beside compiled loops)"


def list_residuals(report: Report) -> str:
    """Tabulate, for each equation of the ledger, its largest error in fp64 and that of the repaired equation."""

    def show(calls: Sequence[Call]) -> str:
        return "; ".join(_show_error(report, call, named=len(calls) > 1) for call in calls) or "–"

    rows = []
    for verdict in report.all:
        entry = verdict.entry
        if calls := _find_errors(entry.ours.calls if entry.ours else ()):
            others = [each.expression.calls for each in entry.explanations if each.expression]
            rows.append((verdict, show(calls), show([call for each in others for call in _find_errors(each)])))
    columns = {
        "where": lambda row: row[0].entry.place,
        "the paper says": lambda row: row[0].entry.says,
        "residual": lambda row: row[1],
        "repaired": lambda row: row[2],
        "status": lambda row: row[0].status,
    }
    return tabulate(columns, rows)


def compare_momenta(report: Report) -> str:
    """Tabulate the error of the momenta by the number of chunks, for the authors' parallel code and for ours."""
    find_error = report.paper.formulas()["momentum_error"]

    def show_divided(chunks: int) -> str:
        error = find_error(chunks, "divided")
        return f"{100 * error:.0f} %" if error > 0.01 else "< 0.1 %" if error < 0.001 else "< 1 %"

    def show_ours(chunks: int) -> str:
        error = find_error(chunks, "ours")
        return "< 1e-6" if error < 1e-6 else f"{error:.0e}"

    return tabulate({"chunks": number, "by division": show_divided, "ours": show_ours}, CHUNKS)


def _find_errors(calls: Sequence[Call]) -> list[Call]:
    """Return the calls whose result is a residual."""
    return [call for call in calls if call.name.endswith("_error")]


def _show_error(report: Report, call: Call, *, named: bool) -> str:
    """Show an error with two digits, or as `< 1e-12`, where the digits differ between processors; an exact 0 as `0`."""
    value = report.paper.formulas()[call.name](*call.args)
    shown = f"{value:.1e}" if value >= _ROUNDING else "0" if value == 0 and call in EXACT else f"< {_ROUNDING:.0e}"
    return f"{call.args[0]} {shown}" if named else shown


def list_changes(report: Report) -> str:
    """Tabulate every variant's top-1 and its difference to the unchanged model, for each model and data set."""
    blocks: list[str] = []
    for group in _find_groups(report):
        model, top1, pairs = _find_model(group), _find_scores(group), _compare(group)
        rows = []
        for name in (f"{model}_own", *pairs):
            mean = number(statistics.fmean(top1[name].values()), ".1f")
            row = [CHANGES[name.removeprefix(f"{model}_")], code(name), mean]
            said = ["–", "–", "–"]
            if pair := pairs.get(name):
                tested = [pair.show(2), number(pair.p, ".3f")] if pair.interval else ["–", "–"]
                said = [*tested, pair.name_side("better", "worse")]
            rows.append([*row, *said])
        header = ["", "variant", "top-1 (%)", "difference [95 %]", "p (Holm)", ""]
        sources, m = group.variants.values(), group.common
        power = describe_power(list(pairs.values()), f"{describe_seeds(sources)} and {m['held_out_images']} images")
        blocks += [f"### {_NAMES[model]}: {group.title}", power and strong(power), warn_of_seeds(sources)]
        blocks += [table(header, rows), _count_learners(group), describe_elsewhere(group, group.variants)]
        origin = describe_origin(list(group.variants.values()))
        blocks.append(f"{group.common['held_out_images']} held-out images; {origin}.")
    return join(blocks)


def weigh_learners(report: Report) -> str:
    """Tabulate Vittt's learners: accuracy on embedded data, and time at the largest measured image.

    Raises:
        Missing: the unchanged learner was not timed.
    """
    groups = _find_groups(report, ("vittt",))
    times = {key: rows[-1] for key, rows in find_backbones(report).items()}
    if not times:
        raise Missing("the unchanged learner was not timed", "repro kernels forms")
    own = times["own", "auto"]
    own_ms, side = own["latency_ms"], find_side(own["tokens"])
    # eager PyTorch against compiled loops compares implementations, not learners, so "slower" would mislead
    slower = UNLIKE if own["backend"] in COMPILED else "slower"
    rows = []
    for step in ("plain", "dot"):
        found = [_compare(group).get(f"vittt_{step}") for group in groups]
        words = [pair and pair.name_side("better", "worse") for pair in found]
        tested = [f"{pair.show(1)}, {word}" if pair else "–" for pair, word in zip(found, words, strict=True)]
        ms, form = min((row["latency_ms"], form) for (name, form), row in times.items() if name == step)
        verdict = f"{'faster' if ms < own_ms else slower}, {'worse' if 'worse' in words else 'not separated'}"
        rows.append([code(step), *tested, form, number(ms / own_ms, ".2f"), verdict])
    points = [f"points on {group.common['data']}" for group in groups]
    return table(["learner", *points, f"faster form at {side}²", "its share of the time", ""], rows)


def _find_groups(report: Report, models: Sequence[str] = tuple(_NAMES)) -> list[Group]:
    """Find the groups with the unchanged model and at least one variant, in the order of `_NAMES`.

    Of several groups of one model and data set, `keep_best` chooses.
    """
    groups = find_groups(report.results, report.paper)
    own = (group for group in groups if _find_model(group) in models and len(group.variants) > 1)
    found = [group for group in own if f"{_find_model(group)}_own" in group.variants]
    if not found:
        raise Missing("no variant is trained yet", report.paper.train_command)
    best = keep_best(found, lambda group: (_find_model(group), group.common["data"]))
    return sorted(best, key=lambda group: (list(_NAMES).index(_find_model(group)), group.common["data"] != "digits"))


def _find_model(group: Group) -> str:
    """Return the model's name, the first part of its variants' names."""
    return next(iter(group.variants)).split("_")[0]


def _compare(group: Group) -> dict[str, Pair]:
    """Return variant -> its difference to the unchanged model; empty if they have no seed in common."""
    base, top1 = f"{_find_model(group)}_own", _find_scores(group)
    listed = sorted(top1, key=lambda name: [*CHANGES].index(name.partition("_")[2]))
    orders = [(name, base) for name in listed if name != base]
    m = group.common
    return {pair.better: pair for pair in compare_accuracies(top1, orders, m["held_out_images"], m["classes"])}


def _find_scores(group: Group) -> dict[str, dict[int, float]]:
    return {name: source.by_seed(TOP1) for name, source in group.variants.items()}


def _count_learners(group: Group) -> str:
    """Write how many seeds of each variant passed the midpoint between chance and 100 %; empty if all or none did."""
    learnt = 50 * (1 + 1 / group.common["classes"])
    scores = _find_scores(group).items()
    counts = {name: (sum(value > learnt for value in values.values()), len(values)) for name, values in scores}
    if not any(0 < passed < seeds for passed, seeds in counts.values()):
        return ""
    shown = ", ".join(f"`{name}` {passed} of {seeds}" for name, (passed, seeds) in counts.items())
    return f"Seeds above {learnt:.1f} %: {shown}."


def list_probes(report: Report) -> str:
    """Tabulate accuracy and inner loss with and without the probe, for each model and probe."""

    header = ["model", "data, images", "probe", "top-1", "with it"]
    header += ["inner loss after the steps", "with it", "measured on"]
    rows = []
    for source in _find_probes(report):
        m = source.metrics
        options = ",".join(f"{key}={value}" for key, value in m["options"].items())
        model = code(m["model"] + (f"[{options}]" if options else ""))
        states = (m["unchanged"], m["probed"])
        scores = [number(each["top1_percent"], ".2f", " %") for each in states]
        losses = [number(each["inner_loss_after"], ".3g") for each in states]
        images = f"{m['data']}, {m['unchanged']['held_out_images']} of {m['split']}"
        rows.append([model, images, m["probe"], *scores, *losses, describe_origin([source])])
    return table(header, rows)


def count_probed(report: Report, what: str) -> int:
    """Count the probes with more inner steps: all `rows`, or those with a `lower` loss, a `worse` score, or `both`."""
    rows = [source.metrics for source in _find_probes(report) if source.metrics["probe"].startswith("steps=")]
    lower = [m["probed"]["inner_loss_after"] < m["unchanged"]["inner_loss_after"] for m in rows]
    worse = [_is_worse(m) for m in rows]
    both = [each and other for each, other in zip(lower, worse, strict=True)]
    return {"rows": len(rows), "lower": sum(lower), "worse": sum(worse), "both": sum(both)}[what]


def _find_probes(report: Report) -> list[Source]:
    missing = "nothing is probed yet", "repro explain --probe steps=4 --weights WEIGHTS"
    found = report.results.require(lambda source: {"probe", "probed"} <= source.metrics.keys(), *missing)
    return sorted(found, key=lambda source: [source.metrics[key] for key in ("model", "data", "probe")])


def _is_worse(metrics: Mapping[str, Any]) -> bool:
    """Tell whether the probe lowers the top-1 such that the 95 % intervals over the images do not overlap."""
    states = (metrics["unchanged"], metrics["probed"])
    before, after = (share_interval(each[TOP1], each["held_out_images"]) for each in states)
    return after[1] < before[0]


def list_distributions(report: Report) -> str:
    """Tabulate how well a classifier separates queries from keys, and outputs from values, trained and untrained."""
    missing = "nothing is measured yet", "repro explain --probe distributions --weights WEIGHTS"
    found = report.results.require(lambda source: "told_apart_percent" in source.metrics, *missing)
    pairs = {
        "queries and keys": "queries_keys",
        "outputs and values": "outputs_values",
        "queries of two halves": "queries_queries",
    }
    rows = []
    for source in sorted(found, key=lambda source: [source.metrics[key] for key in ("model", "data")]):
        m = source.metrics
        for state, means in m["told_apart_percent"].items():
            shares = [number(means[pair], ".1f", " %") for pair in pairs.values()]
            rows.append([code(m["model"]), m["data"], state, *shares, describe_origin([source])])
    return table(["model", "data", "weights", *pairs, "measured on"], rows)
