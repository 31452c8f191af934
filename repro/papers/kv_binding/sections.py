"""The sections of the KV binding's page besides the tables: residuals, changes of an inner learner, and probes.

page.md calls the public functions by name.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence

from ...core.statistics import share_interval
from ...report.claims import Report
from ...report.expressions import Call
from ...report.markdown import code, join, number, show_p, strong, table
from ...report.ordering import Pair, compare_accuracies, describe_power
from ...report.records import Source, describe_origin, describe_seeds, keep_best, warn_of_seeds
from ...report.results import Missing
from ...report.variants import TOP1, Group, describe_elsewhere, find_groups
from .forms import find_backbones, find_side

_ROUNDING = 1e-12  # the digits of smaller errors differ between processors
# calls whose two sides are equal bit for bit on every processor; their error prints as 0
_EXACT = (Call("identity_error", ("negated_loss",)), Call("mirrored_training_error", ()))
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
_COMPILED = ("numba", "triton")  # backends whose loops are compiled; the other learners run in eager PyTorch
UNLIKE = "not comparable (eager PyTorch beside compiled loops)"


def list_residuals(report: Report) -> str:
    """Tabulate, for each equation of the ledger, its largest error in fp64 and that of the repaired equation.

    An error has two digits, or is `< 1e-12`, where the digits differ between processors; an exact 0 is `0`. Errors are
    the results of formulas whose name ends with `_error`; no other formula makes a row. Where an expression has several,
    the first argument of each is its label, so each must have one.
    """
    formulas = report.paper.formulas()

    def show(calls: Iterable[Call]) -> str:
        errors = {call: formulas[call.name](*call.args) for call in calls if call.name.endswith("_error")}
        shown = []
        for call, value in errors.items():
            exact = "0" if value == 0 and call in _EXACT else f"< {_ROUNDING:.0e}"
            text = f"{value:.1e}" if value >= _ROUNDING else exact
            shown.append(f"{call.args[0]} {text}" if len(errors) > 1 else text)
        return "; ".join(shown)

    rows = []
    for verdict in report.all:
        entry = verdict.entry
        if residual := show(entry.ours.calls if entry.ours else ()):
            others = (each.expression.calls for each in entry.explanations if each.expression)
            repaired = show(itertools.chain.from_iterable(others))
            rows.append([entry.place, entry.says, residual, repaired or "–", verdict.status])
    return table(["where", "the paper says", "residual", "repaired", "status"], rows)


def compare_momenta(report: Report) -> str:
    """Tabulate the error of the momenta by the number of chunks, for the authors' parallel code and for ours.

    The authors divide by products of the decays, which vanish in long sequences. Small errors are shown as bounds, because
    their digits depend on the processor.
    """
    find_error = report.paper.formulas()["momentum_error"]

    rows = []
    for chunks in (16, 32, 64, 256):
        divided, ours = find_error(chunks, "divided"), find_error(chunks, "ours")
        shown = f"{100 * divided:.0f} %" if divided > 0.01 else "< 0.1 %" if divided < 0.001 else "< 1 %"
        rows.append([chunks, shown, "< 1e-6" if ours < 1e-6 else f"{ours:.0e}"])
    return table(["chunks", "by division", "ours"], rows)


def list_changes(report: Report) -> str:
    """Tabulate every variant's top-1 and its difference to the unchanged model, for each model and data set."""
    blocks: list[str] = []
    for group in _find_groups(report):
        model, pairs, sources = _find_model(group), _compare(group), list(group.variants.values())
        images = group.common["held_out_images"]
        rows = []
        for name in (f"{model}_own", *pairs):
            mean = statistics.fmean(group.variants[name].by_seed(TOP1).values())
            said = ["–", "–", "–"]
            if pair := pairs.get(name):
                tested = [pair.show(2), show_p(pair.p)] if pair.interval else ["–", "–"]
                said = [*tested, pair.name_side("better", "worse")]
            rows.append([CHANGES[name.removeprefix(f"{model}_")], code(name), f"{mean:.1f}", *said])
        header = ["", "variant", "top-1 (%)", "difference [95 %]", "p (Holm)", ""]
        power = describe_power(list(pairs.values()), f"{describe_seeds(sources)} and {images} images")
        blocks += [f"### {_NAMES[model]}: {group.title}", power and strong(power), warn_of_seeds(sources)]
        blocks += [table(header, rows), _count_learners(group), describe_elsewhere(group, group.variants)]
        blocks.append(f"{images} held-out images; {describe_origin(sources)}.")
    return join(blocks)


def weigh_learners(report: Report) -> str:
    """Tabulate Vittt's learners: accuracy on embedded data, and time at the largest measured image.

    Raises:
        Missing: the unchanged learner was not timed at an image size of the others.
    """
    groups = _find_groups(report, ("vittt",))
    if not (times := find_backbones(report)):
        raise Missing("the learners were not timed at one image size", "repro kernels forms")
    own = times["own", "auto"]
    own_ms, side = own["latency_ms"], find_side(own["tokens"])
    # eager PyTorch against compiled loops compares implementations, not learners, so "slower" would mislead
    slower = UNLIKE if own["backend"] in _COMPILED else "slower"
    rows = []
    for step in sorted({name for name, _ in times} - {"own"}, reverse=True):
        found = [_compare(group).get(f"vittt_{step}") for group in groups]
        words = [pair and pair.name_side("better", "worse") for pair in found]
        tested = [f"{pair.show(1)}, {word}" if pair else "–" for pair, word in zip(found, words, strict=True)]
        ms, form = min((row["latency_ms"], form) for (name, form), row in times.items() if name == step)
        # a loss or a gain on any data set counts more than "not separated" on the others
        word = next((each for each in ("worse", "better", *words) if each in words and each), "not trained")
        verdict = f"{'faster' if ms < own_ms else slower}, {word}"
        rows.append([code(step), *tested, form, number(ms / own_ms, ".2f"), verdict])
    points = [f"points on {group.common['data']}" for group in groups]
    return table(["learner", *points, f"faster form at {side}²", "its share of the time", ""], rows)


def _find_groups(report: Report, models: Sequence[str] = tuple(_NAMES)) -> list[Group]:
    """Find the groups with the unchanged model and at least one variant, in the order of `_NAMES`.

    Of several groups of one model and data set, `keep_best` chooses; without any, it raises `Missing`.
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
    """Return variant -> its difference to the unchanged model, as `CHANGES` orders them; empty without common seeds."""
    base = f"{_find_model(group)}_own"
    top1 = {name: source.by_seed(TOP1) for name, source in group.variants.items()}
    listed = sorted(top1, key=lambda name: [*CHANGES].index(name.partition("_")[2]))
    orders = [(name, base) for name in listed if name != base]
    m = group.common
    return {pair.better: pair for pair in compare_accuracies(top1, orders, m["held_out_images"], m["classes"])}


def _count_learners(group: Group) -> str:
    """Write how many seeds of each variant passed the midpoint between chance and 100 %; empty if all or none did."""
    learnt = 50 * (1 + 1 / group.common["classes"])
    shown, is_mixed = [], False
    for name, source in group.variants.items():
        passed = [value > learnt for value in source.by_seed(TOP1).values()]
        shown.append(f"`{name}` {sum(passed)} of {len(passed)}")
        is_mixed |= any(passed) and not all(passed)
    return f"Seeds above {learnt:.1f} %: {', '.join(shown)}." if is_mixed else ""


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
    counted = []
    for source in _find_probes(report):
        if not source.metrics["probe"].startswith("steps="):
            continue
        before, after = source.metrics["unchanged"], source.metrics["probed"]
        lower = after["inner_loss_after"] < before["inner_loss_after"]
        was, became = (share_interval(each[TOP1], each["held_out_images"]) for each in (before, after))
        worse = became[1] < was[0]  # the 95 % intervals over the images do not overlap
        counted.append({"rows": True, "lower": lower, "worse": worse, "both": lower and worse}[what])
    return sum(counted)


def _find_probes(report: Report) -> list[Source]:
    """Return the records of probes that change an inner learner of a trained model, sorted for the table."""
    missing = "nothing is probed yet", "repro explain --probe steps=4 --weights WEIGHTS"
    found = report.results.require(lambda source: {"probe", "probed"} <= source.metrics.keys(), *missing)
    return sorted(found, key=lambda source: [source.metrics[key] for key in ("model", "data", "probe")])


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
