"""What each change of an inner learner does to its model: differences to the unchanged model over seeds, with
intervals.
"""

import math
from collections.abc import Sequence

from ...report.claims import Report
from ...report.document import Block, Bullets, Heading, Line, Piece, Section, code, join, number, prose, table
from ...report.gallery import describe_origin
from ...report.ordering import ALPHA, PairedTest, compare_means
from ...report.variants import TOP1, Group, find_groups
from .forms import describe_backbones, find_backbones
from .variants import VARIANTS

NAMES = {"vit3": "ViT³", "lact": "LaCT", "vittt": "Vittt"}
COMMAND = "repro ablate --paper kv_binding --all --data digits --seeds 5"
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


def changes_section(report: Report) -> list[Section]:
    """The section of the paper's page; none without records."""
    return (
        [Section("What each change does, against the unchanged model", describe_changes(report))]
        if _find(report)
        else []
    )


def describe_changes(report: Report) -> list[Block]:
    """For each model and data set a table: every variant, its top-1 and its difference to the unchanged model with 95 %
    interval.
    """
    groups = _find(report)
    if not groups:
        return [prose(f"No variant is trained yet: `{COMMAND}`.")]
    text = (
        "Differences are in points of top-1 to the unchanged model of the same seeds, with the 95 % interval of each and p of the paired "
        "t-test after Holm's correction over the table. *Not separated* does not say that two are equal: the interval says how far apart "
        "they may be. All are small models on embedded data; nothing here is compared with ImageNet-1K."
    )
    blocks: list[Block] = [prose(text)]
    for group in groups:
        blocks += [Heading(f"{NAMES[_model(group)]}: {group.title}"), _differences(group), *_count_learners(group)]
        origin = describe_origin(list(group.variants.values()), report.named)
        blocks.append((f"{group.common['held_out_images']} held-out images; {origin}.",))
    return blocks


def choice_section(report: Report) -> list[Section]:
    """The section of the paper's page on the size of Vittt-T, which the paper does not have; none without records."""
    if not find_backbones(report):
        return []
    text = (
        "Vittt's learner does not reduce to linear attention: its error is taken after a LayerNorm. `plain` has neither LayerNorm nor bias, "
        "and `dot` the dot product for its loss as well. The paper does not ask this. All trainings are of small models, by the recipe of the "
        "unchanged model."
    )
    return [
        Section("Does it hold for Vision-TTT?", [prose(text), *describe_backbones(report), *describe_choice(report)])
    ]


def describe_choice(report: Report) -> list[Block]:
    """Which learner of Vittt a user should take at the largest measured image: accuracy on embedded data against time,
    in sentences.
    """
    groups = _find(report, ("vittt",))
    times = {key: rows[-1] for key, rows in find_backbones(report).items()}
    if not groups or not times:
        return [prose(f"Not decided yet: it needs `{COMMAND}` and `repro forms`.")]
    own_ms, side = times["own", "auto"]["latency_ms"], times["own", "auto"]["image_size"][0]
    lines: list[Line] = []
    is_worse, is_faster = {}, {}
    for step in ("plain", "dot"):
        found = [(group.common["data"], _compare(group, f"vittt_{step}")) for group in groups]
        tested = [(data, each) for data, each in found if each is not None]
        shown = "; ".join(
            f"{data} {each.mean:+.1f} points [{each.low:+.1f}, {each.high:+.1f}], {_word(each)}"
            for data, each in tested
        )
        form, row = min(
            ((form, row) for (name, form), row in times.items() if name == step), key=lambda pair: pair[1]["latency_ms"]
        )
        lines.append(
            (
                code(step),
                f": {shown or 'not trained'}. At {side}² its faster form, {form}, takes {row['latency_ms'] / own_ms:.2f} of the time.",
            )
        )
        is_worse[step], is_faster[step] = any(_word(each) == "worse" for _, each in tested), row["latency_ms"] < own_ms
    for step in ("plain", "dot"):
        if is_faster[step] and not is_worse[step]:
            lines.append(
                (
                    f"So at {side}² on this device `{step}` is the one to try first: faster, and not separated from the unchanged learner.",
                )
            )
            break
    else:
        reasons = {
            (True, True): "faster but worse",
            (False, True): "slower and worse",
            (False, False): "slower and not separated",
        }
        words = "; ".join(f"{step} is {reasons[is_faster[step], is_worse[step]]}" for step in is_faster)
        lines.append((f"So at {side}² on this device the unchanged learner is the one to take: {words}.",))
    return [Bullets(lines)]


def _find(report: Report, models: Sequence[str] = tuple(NAMES)) -> list[Group]:
    """Groups that have the unchanged model and another variant, in the order of `NAMES`; of two of one model and data
    the one with more
    seeds."""
    best: dict[tuple[str, str], Group] = {}
    for group in find_groups(report.results, report.paper.variants):
        model = _model(group)
        if model in models and f"{model}_own" in group.variants and len(group.variants) > 1:
            key = (model, group.common["data"])
            if key not in best or group.most_seeds > best[key].most_seeds:
                best[key] = group
    return [best[key] for key in sorted(best, key=lambda key: (list(NAMES).index(key[0]), key[1] != "digits"))]


def _model(group: Group) -> str:
    """The beginning of its variants' names."""
    return next(iter(group.variants)).split("_")[0]


def _test(group: Group) -> dict[str, PairedTest | None]:
    """Variant -> its difference to the unchanged model; None where they have fewer than two seeds in common."""
    base, images = f"{_model(group)}_own", group.common["held_out_images"]
    top1 = _scores(group)
    others = [name for name in VARIANTS if name in top1 and name != base]
    # accuracies come in whole images
    tests = compare_means(top1, [(name, base) for name in others], 100 / images * math.sqrt(2 / 12))
    return dict(zip(others, tests or [None] * len(others), strict=True))


def _scores(group: Group) -> dict[str, dict[int, float]]:
    return {
        name: {run["seed"]: run[TOP1] for run in source.metrics["by_seed"]} for name, source in group.variants.items()
    }


def _compare(group: Group, name: str) -> PairedTest | None:
    return _test(group).get(name)


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
    text = (
        "Some seeds learn here and others do not, so that a mean and its interval say little. Seeds above half the way from chance to "
        f"100 %, which is {learnt:.1f} %: "
    )
    shown = [(code(name), f" {passed} of {seeds}") for name, (passed, seeds) in counts.items()]
    return [(text, *join(shown, ", "), ".")]


def _mean(values: dict[int, float]) -> Piece:
    return number(f"{sum(values.values()) / len(values):.1f}")
