"""What each change of an inner learner does to its model: differences to the unchanged model over seeds, with
intervals.
"""

import math
from collections.abc import Sequence

from ...report.claims import Report
from ...report.document import Block, Heading, Line, Piece, code, join, number, table
from ...report.gallery import describe_origin
from ...report.ordering import ALPHA, PairedTest, compare_means
from ...report.results import Missing
from ...report.variants import TOP1, Group, find_groups
from ..variants import load_variants
from .forms import find_backbones

NAMES = {"vit3": "ViT³", "lact": "LaCT", "vittt": "Vittt"}
# the step of a variant -> what it changes, in words
CHANGES = {
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


def list_changes(report: Report) -> list[Block]:
    """For each model and data set a table: every variant, its top-1 and its difference to the unchanged model with 95 %
    interval.
    """
    blocks: list[Block] = []
    for group in _find(report):
        blocks += [Heading(f"{NAMES[_model(group)]}: {group.title}"), _differences(group), *_count_learners(group)]
        origin = describe_origin(list(group.variants.values()), report.named)
        blocks.append((f"{group.common['held_out_images']} held-out images; {origin}.",))
    return blocks


def weigh_learners(report: Report) -> list[Block]:
    """The learners of Vittt at the largest measured image: accuracy on embedded data against time."""
    groups = _find(report, ("vittt",))
    times = {key: rows[-1] for key, rows in find_backbones(report).items()}
    if not times:
        raise Missing("the unchanged learner was not timed", "repro forms")
    own_ms, side = times["own", "auto"]["latency_ms"], times["own", "auto"]["image_size"][0]
    data = [group.common["data"] for group in groups]
    rows: list[list[Piece]] = []
    for step in ("plain", "dot"):
        found = [_test(group).get(f"vittt_{step}") for group in groups]
        tested = [
            f"{each.mean:+.1f} [{each.low:+.1f}, {each.high:+.1f}], {_word(each)}" if each else "–" for each in found
        ]
        form, ms = min(
            ((form, row["latency_ms"]) for (name, form), row in times.items() if name == step), key=lambda pair: pair[1]
        )
        is_worse = any(each and _word(each) == "worse" for each in found)
        verdict = f"{'faster' if ms < own_ms else 'slower'}, {'worse' if is_worse else 'not separated'}"
        rows.append([code(step), *tested, form, number(f"{ms / own_ms:.2f}"), verdict])
    header = [
        "learner",
        *(f"points on {each}" for each in data),
        f"faster form at {side}²",
        "its share of the time",
        "",
    ]
    return [table(header, rows)]


def _find(report: Report, models: Sequence[str] = tuple(NAMES)) -> list[Group]:
    """Groups that have the unchanged model and another variant, in the order of `NAMES`; of two of one model and data
    the one with more seeds.
    """
    best: dict[tuple[str, str], Group] = {}
    for group in find_groups(report.results, report.paper.variants):
        model = _model(group)
        if model in models and f"{model}_own" in group.variants and len(group.variants) > 1:
            key = (model, group.common["data"])
            if key not in best or group.most_seeds > best[key].most_seeds:
                best[key] = group
    if not best:
        raise Missing("no variant is trained yet", "repro ablate --paper kv_binding --all --data digits --seeds 5")
    return [best[key] for key in sorted(best, key=lambda key: (list(NAMES).index(key[0]), key[1] != "digits"))]


def _model(group: Group) -> str:
    """The beginning of its variants' names."""
    return next(iter(group.variants)).split("_")[0]


def _test(group: Group) -> dict[str, PairedTest | None]:
    """Variant -> its difference to the unchanged model; None where they have fewer than two seeds in common."""
    base, images = f"{_model(group)}_own", group.common["held_out_images"]
    top1 = _scores(group)
    others = [name for name in load_variants("kv_binding").variants if name in top1 and name != base]
    # accuracies come in whole images
    tests = compare_means(top1, [(name, base) for name in others], 100 / images * math.sqrt(2 / 12))
    return dict(zip(others, tests or [None] * len(others), strict=True))


def _scores(group: Group) -> dict[str, dict[int, float]]:
    return {
        name: {run["seed"]: run[TOP1] for run in source.metrics["by_seed"]} for name, source in group.variants.items()
    }


def _word(found: PairedTest) -> str:
    return "not separated" if found.p >= ALPHA else "better" if found.mean > 0 else "worse"


def _differences(group: Group) -> Block:
    model, top1 = _model(group), _scores(group)
    rows: list[list[Piece | Line]] = [
        ["the unchanged model", code(f"{model}_own"), _mean(top1[f"{model}_own"]), "–", "–", "–"]
    ]
    for name, found in _test(group).items():
        said: list[Piece] = ["–", "–", "one seed"]
        if found is not None:
            said = [f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]", number(f"{found.p:.3f}"), _word(found)]
        rows.append([CHANGES[name.removeprefix(f"{model}_")], code(name), _mean(top1[name]), *said])
    return table(["", "variant", "top-1 (%)", "difference [95 %]", "p (Holm)", ""], rows)


def _count_learners(group: Group) -> list[Block]:
    """Where the seeds of a variant lie on both sides of half the way from chance to 100 %: how many of each variant's
    seeds learnt.
    """
    learnt = 50 * (1 + 1 / group.common["classes"])
    counts = {
        name: (sum(value > learnt for value in values.values()), len(values)) for name, values in _scores(group).items()
    }
    if not any(0 < passed < seeds for passed, seeds in counts.values()):
        return []
    text = f"Seeds above {learnt:.1f} %: "
    shown = [(code(name), f" {passed} of {seeds}") for name, (passed, seeds) in counts.items()]
    return [(text, *join(shown, ", "), ".")]


def _mean(values: dict[int, float]) -> Piece:
    return number(f"{sum(values.values()) / len(values):.1f}")
