"""What each change of an inner learner does to its model: differences to the unchanged model over seeds, with intervals."""

import math
from collections.abc import Sequence

from ...report.claims import Report
from ...report.document import Block, Heading, Line, Piece, Section, code, number, prose, table
from ...report.gallery import describe_origin
from ...report.ordering import ALPHA, compare_means
from ...report.variants import TOP1, Group, find_groups
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
    return [Section("What each change does, against the unchanged model", describe_changes(report))] if _find(report) else []


def describe_changes(report: Report, models: Sequence[str] = tuple(NAMES)) -> list[Block]:
    """For each model and data set a table: every variant, its top-1 and its difference to the unchanged model with 95 % interval."""
    groups = _find(report, models)
    if not groups:
        return [prose(f"No variant is trained yet: `{COMMAND}`.")]
    text = (
        "Differences are in points of top-1 to the unchanged model of the same seeds, with the 95 % interval of each and p of the paired "
        "t-test after Holm's correction over the table. *Not separated* does not say that two are equal: the interval says how far apart "
        "they may be. All are small models on embedded data; nothing here is compared with ImageNet-1K."
    )
    blocks: list[Block] = [prose(text)]
    for group in groups:
        blocks += [Heading(f"{_name(group)}: {group.title}"), _differences(group)]
        origin = describe_origin(list(group.variants.values()), report.named)
        blocks.append((f"{group.common['held_out_images']} held-out images; {origin}.",))
    return blocks


def describe_vittt(report: Report) -> list[Block]:
    """`describe_changes` of Vittt alone."""
    return describe_changes(report, ("vittt",))


def _find(report: Report, models: Sequence[str] = tuple(NAMES)) -> list[Group]:
    """Groups that have the unchanged model and another variant, in the order of `NAMES`; of two of one model and data the one with more
    seeds."""
    best: dict[tuple[str, str], Group] = {}
    for group in find_groups(report.results, report.paper.variants):
        model = next(iter(group.variants)).split("_")[0]
        if model in models and f"{model}_own" in group.variants and len(group.variants) > 1:
            key = (model, group.common["data"])
            if key not in best or group.most_seeds > best[key].most_seeds:
                best[key] = group
    return [best[key] for key in sorted(best, key=lambda key: (list(NAMES).index(key[0]), key[1] != "digits"))]


def _name(group: Group) -> str:
    return NAMES[next(iter(group.variants)).split("_")[0]]


def _differences(group: Group) -> Block:
    model = next(iter(group.variants)).split("_")[0]
    top1 = {name: {run["seed"]: run[TOP1] for run in source.metrics["by_seed"]} for name, source in group.variants.items()}
    base, images = f"{model}_own", group.common["held_out_images"]
    others = [name for name in VARIANTS if name in top1 and name != base]
    # accuracies come in whole images
    tests = compare_means(top1, [(name, base) for name in others], 100 / images * math.sqrt(2 / 12))
    rows: list[list[Piece | Line]] = [["the unchanged model", code(base), _mean(top1[base]), "–", "–", "–"]]
    for place, name in enumerate(others):
        found = tests[place] if tests else None
        said: list[Piece] = ["–", "–", "one seed" if found is None else ""]
        if found is not None:
            word = "not separated" if found.p >= ALPHA else "better" if found.mean > 0 else "worse"
            said = [f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]", number(f"{found.p:.3f}"), word]
        rows.append([CHANGES[name.removeprefix(f"{model}_")], code(name), _mean(top1[name]), *said])
    return table(["", "variant", "top-1 (%)", "difference [95 %]", "p (Holm)", ""], rows)


def _mean(values: dict[int, float]) -> Piece:
    return number(f"{sum(values.values()) / len(values):.1f}")
