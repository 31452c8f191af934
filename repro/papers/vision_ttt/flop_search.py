"""A search for the counter behind the paper's 25 FLOPs of its own model: which terms could it have included?

A hypothesis says of every term whether, and how, one counter counted it. It must hold for all tables at once. All combinations of
CHAINED and ADDED are tried for Vittt, and with each all of BASELINE for DeiT, whose remaining terms are counted as Vittt's. The first
choice of each term is Eq. 13 with MLP, patch convolution and head; every other choice is a departure.

A number explains a printed one by rounding, by truncation, or by either; see `repro.report.arithmetic.agreement`. Whatever is found
was chosen by the very numbers that it explains: it is fitted, and never a match.

Two questions cannot be asked. K·W, Q·W and the update of the state have d² multiply-adds per token and head each, so only how many of
them count can be seen; the same holds for the two products b x b, where both halves are one in full. And 8D/3 is whole for D = 192,
384 and 768, so that SwiGLU's 3D·⌊8D/3⌋, 3D·8D/3 and the 2D·4D of DeiT's MLP are one number.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...measure.adapted import adapted_cost
from ...measure.flops import cost
from ...report.arithmetic import agreement
from .formulas import CHUNK, DESIGNS, HEAD_DIM, LAYERS, PATCH, table3_step_g, vittt_design_g

Array = np.ndarray

WIDTHS = {"t": 192, "s": 384, "b": 768}
MODELS = {"t": "vittt_tiny_patch16_224", "s": "vittt_small_patch16_224", "b": "vittt_base_patch16_224"}
CLASSES, TOKENS, TOKENS_1280 = 1000, 196, 6400
SAVED = ("text.abstract.flops_saved_1280_t", "text.1.flops_saved_1280_t", "text.5_3.flops_saved_1280_t")
RULES = ("rounding", "truncation", "either")
TABLE3_PARAMS_M = dict(zip(DESIGNS, ("5.87", "5.43", "5.89", "5.90", "6.96", "6.98"), strict=True))
AS_WRITTEN = ((0, 0, 0, 0, 0), (0, 0), 0)  # the place of the hypothesis of Eq. 13: choices of CHAINED, of BASELINE, number among ADDED
KEPT = 50  # hypotheses that the list of the best shows

NORMS = ("outer", "post", "inner")  # of the two branches and the end; after the inner learners; in each inner learner
# terms on which others depend
CHAINED = {
    "tokens": ("T", "T + 1"),
    "class tokens": ("counted", "left out"),
    "last chunk": ("Tb, as in Eq. 13", "its own length", "filled up to b"),
    "products d x d": ("three", "two", "one", "none"),
    "products b x b": ("both in full", "one in full", "half of one", "none", "triangles of both", "triangle of one"),
}
# terms that add to the others
ADDED = {
    "patch convolution": ("counted", "left out"),
    "head": ("counted", "left out"),
    "Conv1d": ("left out", "counted", "with bias"),
    "DWConv": ("left out", "counted"),
    "learning rate": ("left out", "counted"),
    "inner bias": ("left out", "counted"),
    "norms": (
        "left out",
        *(
            f"{' + '.join(norms)}, {each} per value"
            for each in (1, 2, 5)
            for size in (1, 2, 3)
            for norms in itertools.combinations(NORMS, size)
        ),
    ),
    "gate": ("left out", "once", "per direction"),
    "sum of directions": ("left out", "counted"),
    "biases": ("left out", "counted"),
}
BASELINE = {"DeiT's tokens": ("T + 1", "T"), "DeiT's softmax": ("left out", "1 per score", "5 per score")}
_SCORES = (0, 1, 5)  # multiply-adds per score of the three choices of the softmax


@dataclasses.dataclass(frozen=True)
class Row:
    """A printed number: FLOPs in units of 1e9, or the percent saved against the DeiT of the same width at 1280x1280.

    Args:
        entry: its id in the ledger.
        printed: the paper's digits.
        table: what it belongs to.
        width, patches: of the model and the image.
        design, class_tokens: of Tables 3 and 4.
        adapter: multiply-adds of the ViT-Adapter around it, by its papers' convention; None without one.
    """

    entry: str
    printed: str
    table: str
    width: int
    patches: int
    design: str = "conv2d"
    class_tokens: int = 0
    adapter: int | None = None

    @property
    def is_saving(self) -> bool:
        return self.entry.endswith(("saved_1280_t", "saved_1280_s", "saved_1280_b"))


def list_rows() -> list[Row]:
    """The 25 printed numbers; the two halves of Table 2 count the model's adapters once each, on the meta device."""
    rows = [
        Row(f"table1.vittt_{size}.macs_g", printed, "Table 1", WIDTHS[size], TOKENS)
        for size, printed in zip("tsb", ("1.4", "5.3", "20.3"), strict=True)
    ]
    halves = (
        ("table2_coco", "left", (800, 1344), ("74.3", "206.3", "646.7")),
        ("table2_ade20k", "right", (512, 512), ("17.8", "50.3", "157.7")),
    )
    for table, half, image_size, numbers in halves:
        patches = image_size[0] * image_size[1] // PATCH**2
        for size, printed in zip("tsb", numbers, strict=True):
            adapter = count_adapter(MODELS[size], WIDTHS[size], image_size)
            rows.append(Row(f"{table}.vittt_{size}.macs_g", printed, f"Table 2 ({half})", WIDTHS[size], patches, adapter=adapter))
    for design, printed in zip(DESIGNS, ("1.14", "1.07", "1.15", "1.16", "1.42", "1.44"), strict=True):
        rows.append(Row(f"table3.{design}.macs_g", printed, "Table 3", WIDTHS["t"], TOKENS, design))
    for name, printed, class_tokens in (
        ("head", "1.44", 1),
        ("mid", "1.44", 1),
        ("double", "1.45", 2),
        ("max", "1.44", 0),
        ("mean", "1.44", 0),
    ):
        rows.append(Row(f"table4.{name}.macs_g", printed, "Table 4", WIDTHS["t"], TOKENS, class_tokens=class_tokens))
    savings = [(entry, "79.4", "t") for entry in SAVED]
    savings += [("text.5_3.flops_saved_1280_s", "66.3", "s"), ("text.5_3.flops_saved_1280_b", "48.9", "b")]
    rows += [Row(entry, printed, "saved at 1280×1280", WIDTHS[size], TOKENS_1280) for entry, printed, size in savings]
    return rows


def count_adapter(model: str, width: int, image_size: tuple[int, int]) -> int:
    """What a Vittt's ViT-Adapter adds to it by the convention of `repro.measure.adapted`, at (H, W) pixels.

    It is the whole by that convention without the backbone's own terms: its multiply-adds, and what module hooks count in it, the
    bias of the patch convolution and 2 per value of three LayerNorms a block.
    """
    patches = image_size[0] * image_size[1] // PATCH**2
    own = cost(model, {}, image_size).mac_terms
    hooked = patches * width + 2 * LAYERS * 3 * patches * width
    return sum(adapted_cost(model, image_size).paper_terms.values()) - (sum(own.values()) - own["head"]) - hooked


class Counter:
    """The counts of all rows, and of the three DeiTs at T + 1 and T tokens, under any hypothesis.

    A vector has one number per row, then six for DeiT: width by width, T + 1 and T tokens. Counts are exact in fp64.
    """

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows
        self._width = np.array([row.width for row in rows], float)
        self._patches = np.array([row.patches for row in rows], float)
        self._class_tokens = np.array([row.class_tokens for row in rows], float)
        self._adapter = np.array([row.adapter or 0 for row in rows], float)
        self._ends = np.array([row.adapter is None for row in rows], float)  # an adapter removes head and last norm
        parts = np.array([DESIGNS[row.design] for row in rows], float).T
        self._projections, self._directions, self._conv1d, self._dwconv = parts
        self._deit_width = np.repeat(np.array(list(WIDTHS.values()), float), len(BASELINE["DeiT's tokens"]))
        self._deit_tokens = np.tile([TOKENS_1280 + 1.0, TOKENS_1280], len(WIDTHS))

    def count_chained(self, chosen: Sequence[int]) -> Array:
        """What the terms of CHAINED decide, by the indices of their choices: projections, inner learner, SwiGLU and adapter."""
        _, _, last_chunk, squares, pairs = chosen
        D, T = self._width, self._count_tokens(chosen)
        scanned = np.ceil(T / CHUNK) * CHUNK if last_chunk == 2 else T
        whole, rest = np.divmod(scanned, CHUNK)
        full = whole * CHUNK**2 + rest**2 if last_chunk == 1 else CHUNK * scanned
        triangle = (full + scanned) / 2  # n(n + 1)/2 of the n² pairs of a chunk
        pair = (2 * full, full, full / 2, 0 * full, 2 * triangle, triangle)[pairs]
        learner = self._directions * ((3 - squares) * scanned * D * HEAD_DIM + pair * D)
        vittt = LAYERS * (self._projections * T * D**2 + learner + 8 * T * D**2) + self._adapter
        D, T = self._deit_width, self._deit_tokens
        return np.concatenate([vittt, LAYERS * (12 * T * D**2 + 2 * T**2 * D)])

    def count_added(self, chosen: Sequence[int]) -> list[Array]:
        """For each term of ADDED, (choices, rows and DeiTs), where the terms of CHAINED have the choices `chosen`."""
        D, T, R, N = self._width, self._count_tokens(chosen), self._directions, self._patches
        E, S, ends = self._deit_width, self._deit_tokens, self._ends
        per_token = LAYERS * T * D
        none, no_deit = np.zeros(len(D)), np.zeros(len(E))
        patches = np.full(len(E), float(TOKENS_1280))

        def both(vittt: Array, deit: Array = no_deit) -> Array:
            return np.concatenate([vittt, deit])

        nothing = both(none)
        outer, post, inner = both(2 * per_token + ends * T * D, LAYERS * 2 * S * E + S * E), both(per_token), both(2 * R * per_token)
        values = {"outer": outer, "post": post, "inner": inner}
        norms = [nothing]
        norms += [
            each * sum(values[name] for name in found)
            for each in (1, 2, 5)
            for k in (1, 2, 3)
            for found in itertools.combinations(NORMS, k)
        ]
        patch_bias = both(N * D, patches * E)
        linear_bias = both(LAYERS * T * (2 * 8 * D / 3 + D) + ends * CLASSES, LAYERS * S * 9 * E + CLASSES)
        by_term = {
            "patch convolution": [both(3 * PATCH**2 * N * D, 3 * PATCH**2 * patches * E), nothing],
            "head": [both(ends * CLASSES * D, CLASSES * E), nothing],
            "Conv1d": [nothing, both(R * self._conv1d * 4 * per_token), both(R * self._conv1d * 5 * per_token)],
            "DWConv": [nothing, both(LAYERS * self._dwconv * 9 * N * D)],
            "learning rate": [nothing, both(per_token * D / HEAD_DIM)],
            "inner bias": [nothing, both(3 * R * per_token)],  # added to K·W and to Q·W, and itself updated
            "norms": norms,
            "gate": [nothing, both(self._has_gate() * per_token), both(self._has_gate() * R * per_token)],
            "sum of directions": [nothing, both((R - 1) * per_token)],
            "biases": [nothing, patch_bias + linear_bias],
        }
        return [np.stack(by_term[term]) for term in ADDED]

    def finish(self, counts: Array, baseline: Sequence[int]) -> Array:
        """Counts (hypotheses, rows and DeiTs) -> what the paper prints (hypotheses, rows): units of 1e9, and percent saved."""
        tokens, softmax = baseline
        found = counts[:, : len(self.rows)] / 1e9
        for column, row in enumerate(self.rows):
            if row.is_saving:
                at = 2 * list(WIDTHS.values()).index(row.width) + tokens
                scores = LAYERS * self._deit_width[at] / HEAD_DIM * self._deit_tokens[at] ** 2
                found[:, column] = 100 * (1 - counts[:, column] / (counts[:, len(self.rows) + at] + _SCORES[softmax] * scores))
        return found

    def _count_tokens(self, chosen: Sequence[int]) -> Array:
        return self._patches + chosen[0] + (1 - chosen[1]) * self._class_tokens

    def _has_gate(self) -> Array:
        return np.array([row.design not in ("ttt_layer", "share_qk") for row in self.rows], float)


class Best:
    """The hypotheses that explain the most of some rows by some rule, and among them the first of those with the fewest departures."""

    def __init__(self) -> None:
        self.explained, self.hypotheses, self.departures, self.place = -1, 0, 0, ()

    def update(self, explained: Array, departures: Array, frame: tuple) -> None:
        """Take in hypotheses: how many rows each explains, how many departures it has, and where all of them lie."""
        most = int(explained.max())
        if most < self.explained:
            return
        if most > self.explained:
            self.explained, self.hypotheses, self.departures = most, 0, np.iinfo(int).max
        at = np.flatnonzero(explained == most)
        self.hypotheses += len(at)
        first = at[departures[at].argmin()]
        if departures[first] < self.departures:
            self.departures, self.place = int(departures[first]), (*frame, int(first))


def run_flop_search(frames: Iterable[tuple[int, ...]] | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Try every hypothesis on the rows of `list_rows`.

    Args:
        frames: combinations of CHAINED to try, as indices of choices; all if None.

    Returns:
        The record, and the KEPT hypotheses that explain most by either rule, then by rounding, then with the fewest departures.
    """
    counter = Counter(list_rows())
    groups = _group(counter.rows)
    best = {(group, rule): Best() for group in groups for rule in RULES}
    lower, upper = _bounds(counter.rows)
    index = _list_indices()
    added_departures = (index > 0).sum(1)
    kept: list[tuple[tuple[int, int, int], tuple]] = []
    tried, explained_once = 0, np.zeros(len(counter.rows), bool)
    for chained in _combine(CHAINED) if frames is None else frames:
        counts = _add_up(counter.count_chained(chained), counter.count_added(chained))
        for baseline in _combine(BASELINE):
            found = counter.finish(counts, baseline)
            departures = added_departures + sum(choice > 0 for choice in (*chained, *baseline))
            reached = {rule: (found >= lower[rule]) & (found < upper[rule]) for rule in RULES}
            tried += len(found)
            scores = {}
            for (group, rule), leader in best.items():
                scores[group, rule] = reached[rule][:, groups[group]].sum(1)
                leader.update(scores[group, rule], departures, (chained, baseline))
            explained_once |= reached["either"].any(0)
            kept = _keep(kept, scores["all", "either"], scores["all", "rounding"], departures, (chained, baseline))
    record = {
        "status": "fitted: every hypothesis is chosen by the numbers that it explains, so that none is evidence, and none a match",
        "entries": len(counter.rows),
        "hypotheses": tried,
        "choices": {term: list(choices) for term, choices in (CHAINED | ADDED | BASELINE).items()},
        "as_written": _judge(counter, AS_WRITTEN),
        "best": {rule: _summarise(best["all", rule], index) | {"rows": _judge(counter, best["all", rule].place, rule)} for rule in RULES},
        "never_explained": [row.entry for row, found in zip(counter.rows, explained_once, strict=True) if not found],
        "by_table": {
            group: {"entries": len(columns), **{rule: _summarise(best[group, rule], index) for rule in RULES}}
            for group, columns in groups.items()
            if group != "all"
        },
        "table3_steps": list_table3_steps(counter.rows),
    }
    return record, [_list_hypothesis(counter, place, index) for _, place in kept]


def list_table3_steps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each step of Table 3, whether a counter can have printed it that counts each weight once per token that it meets.

    All `_g` are in units of 1e9. `weights_g` is what the step adds by its projections and convolutions, 196 per weight;
    `printed_params_g` is the least and the largest such number by the parameters that the table itself prints. `full_g` also has the
    inner learner of `dual`, the only step that adds one. `printed_g` are the least and the largest step that the two printed FLOPs
    allow if both are rounded or both cut, `printed_mixed_g` if each may be either; the ends are excluded.

    `impossible` and `impossible_mixed` say that no number from `weights_g` to `full_g` lies within these, `impossible_by_table` that
    none does from `printed_params_g` (for `dual`, none at or above), `impossible_for_eq13` that Eq. 13's own step does not.
    """
    printed = {row.design: float(row.printed) for row in rows if row.table == "Table 3"}
    steps = []
    for before, after in itertools.pairwise(DESIGNS):
        weights, eq13 = float(table3_step_g(after)), float(vittt_design_g(after) - vittt_design_g(before))
        learner = eq13 - (DESIGNS[after][0] - DESIGNS[before][0]) * LAYERS * WIDTHS["t"] ** 2 * TOKENS / 1e9
        full, step = weights + learner, round(printed[after] - printed[before], 2)
        near, wide = ([round(step - slack, 3), round(step + slack, 3)] for slack in (0.01, 0.015))
        params_m = round(float(TABLE3_PARAMS_M[after]) - float(TABLE3_PARAMS_M[before]), 2)
        least, most = ((params_m + slack) * TOKENS / 1e3 for slack in (-0.01, 0.01))
        steps.append(
            {
                "step": after,
                "printed_step_g": step,
                "printed_g": near,
                "printed_mixed_g": wide,
                "weights_g": weights,
                "full_g": full,
                "eq13_g": eq13,
                "printed_params_g": [least, most],
                "impossible": not (weights < near[1] and full > near[0]),
                "impossible_mixed": not (weights < wide[1] and full > wide[0]),
                "impossible_by_table": not (least < near[1] and (after == "dual" or most > near[0])),
                "impossible_for_eq13": not near[0] < eq13 < near[1],
            }
        )
    return steps


def _group(rows: Sequence[Row]) -> dict[str, list[int]]:
    """`all`, and each table -> the columns of its rows."""
    groups = {"all": list(range(len(rows)))}
    for column, row in enumerate(rows):
        groups.setdefault(row.table, []).append(column)
    return groups


def _bounds(rows: Sequence[Row]) -> tuple[dict[str, Array], dict[str, Array]]:
    """By rule, the least number that becomes each row's printed one, and the least above it that does not."""
    printed = np.array([float(row.printed) for row in rows])
    unit = np.array([10.0 ** -len(row.printed.partition(".")[2]) for row in rows])
    half, whole = unit / 2, unit
    lower = {"rounding": printed - half, "truncation": printed, "either": printed - half}
    upper = {"rounding": printed + half, "truncation": printed + whole, "either": printed + whole}
    return lower, upper


def _list_indices() -> Array:
    """The indices of the choices of ADDED (hypotheses, terms), in the order of `_add_up`."""
    return np.indices([len(choices) for choices in ADDED.values()]).reshape(len(ADDED), -1).T


def _add_up(base: Array, terms: Sequence[Array]) -> Array:
    """Every sum of `base` (columns) and one choice of each term (choices, columns): (hypotheses, columns)."""
    total = base[None]
    for term in terms:
        total = (total[:, None] + term[None]).reshape(-1, len(base))
    return total


def _keep(kept: list, either: Array, rounding: Array, departures: Array, frame: tuple) -> list:
    """The KEPT best of those kept so far and of new hypotheses, best first; equal ones in the order in which they come."""
    floor = kept[-1][0] if len(kept) == KEPT else (-1, -1, -np.iinfo(int).max)
    candidates = np.flatnonzero(either >= floor[0])
    order = candidates[np.lexsort((departures[candidates], -rounding[candidates], -either[candidates]))[:KEPT]]
    new = [((int(either[i]), int(rounding[i]), -int(departures[i])), (*frame, int(i))) for i in order]
    return sorted([*kept, *new], key=lambda item: item[0], reverse=True)[:KEPT]


def _combine(terms: Mapping[str, Sequence[str]]) -> Iterator[tuple[int, ...]]:
    """All combinations of the choices of terms, as indices."""
    return itertools.product(*(range(len(choices)) for choices in terms.values()))


def _choices(place: tuple, index: Array) -> dict[str, str]:
    """Term -> choice of a hypothesis."""
    chained, baseline, at = place
    picked = (*chained, *index[at], *baseline)
    return {term: choices[i] for (term, choices), i in zip((CHAINED | ADDED | BASELINE).items(), picked, strict=True)}


def _depart(choices: Mapping[str, str]) -> dict[str, str]:
    """The choices that depart from Eq. 13 as it is written."""
    known = CHAINED | ADDED | BASELINE
    return {term: choice for term, choice in choices.items() if choice != known[term][0]}


def count_hypothesis(counter: Counter, place: tuple) -> Array:
    """What the paper would print for each row under one hypothesis, at full precision."""
    chained, baseline, at = place
    counts = _add_up(counter.count_chained(chained), counter.count_added(chained))[at : at + 1]
    return counter.finish(counts, baseline)[0]


def _judge(counter: Counter, place: tuple, rule: str = "either") -> list[dict[str, Any]]:
    """Row by row, what a hypothesis counts, how that agrees with the printed number, and by how much it misses it by `rule`."""
    lower, upper = _bounds(counter.rows)
    rows = []
    for row, found, low, high in zip(counter.rows, count_hypothesis(counter, place), lower[rule], upper[rule], strict=True):
        computed = float(found)
        judged = {"entry": row.entry, "printed": row.printed, "computed": computed, "agreement": agreement(computed, row.printed) or "none"}
        rows.append({**judged, "off_by": float(min(computed - low, 0.0) + max(computed - high, 0.0))})
    return rows


def _summarise(leader: Best, index: Array) -> dict[str, Any]:
    departures = _depart(_choices(leader.place, index))
    return {"explained": leader.explained, "hypotheses": leader.hypotheses, "fewest_departures": len(departures), "departures": departures}


def _list_hypothesis(counter: Counter, place: tuple, index: Array) -> dict[str, Any]:
    rows, choices = _judge(counter, place), _choices(place, index)
    found = [row["agreement"] for row in rows]
    missed = " ".join(row["entry"] for row in rows if row["agreement"] == "none")
    counts = {"by_rounding": found.count("rounding"), "by_either": len(found) - found.count("none"), "departures": len(_depart(choices))}
    return {**counts, **choices, "unexplained": missed}
