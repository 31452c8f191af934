"""The ablations, Tables 3 and 4 and Fig. 7: the paper's rows beside ours, and whether its ordering is seen in our data."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..core.variants import PLACES, VARIANTS
from .figures import STYLES, figure_of, save_png
from .ledger import Ledger
from .ordering import Verdict, judge
from .sources import Results, Source
from .wording import grid

CHANGED = ("design", "pool", "chunk_size", "w0")  # the options that variants are told apart by
TABLES = {"Table 3": "table3", "Table 4": "table4"}
ROW = {("Table 4", "conv2d"): "mean"}  # a variant's row of the paper, where it has another name
# Fig. 7 prints no numbers; its text says which is better (the ledger's text.fig7a.chunk and text.fig7b.initial_states)
ORDERS = {
    "Fig. 7(a)": tuple((name, "chunk64") for name in PLACES["Fig. 7(a)"] if name != "chunk64"),
    "Fig. 7(b)": (("conv2d", "w0_shared"), ("w0_shared", "w0_frozen"), ("conv2d", "w0_frozen")),
}
SAYS = {
    "Fig. 7(a)": "The paper prints no number of this figure but Vittt's own; its text says that b = 64 is the worst.",
    "Fig. 7(b)": "The paper prints no number of this figure but Vittt's own; its text says that more learnable states are better.",
}
FIGURES = {"Fig. 7(a)": "fig7a", "Fig. 7(b)": "fig7b"}
TICKS = {
    "chunk4": "4",
    "chunk8": "8",
    "chunk32": "32",
    "chunk64": "64",
    "chunk_all": "all",
    "w0_frozen": "0: frozen",
    "w0_shared": "1: shared",
}
DENSE = {"detect": ("ap_box_percent", "ap_mask_percent"), "segment": ("miou_percent",)}
SCORES = {"ap_box_percent": "AP^b", "ap_mask_percent": "AP^m", "miou_percent": "mIoU"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Variants that were trained alike.

    Args:
        folder: which holds their records.
        variants: name -> record, in the order of `VARIANTS`.
    """

    folder: str
    variants: Mapping[str, Source]

    @property
    def any(self) -> Mapping[str, Any]:
        """What the records have in common, as one of them says it."""
        return next(source.metrics for source in self.variants.values() if "seeds" in source.metrics)

    @property
    def device(self) -> str:
        """Where, without the threads."""
        return next(iter(self.variants.values())).device.split(",")[0]

    @property
    def title(self) -> str:
        """What was trained, for how long and where."""
        one, seeds = self.any, max(len(top1_of(source)) for source in self.variants.values())
        length = f"{one['epochs']} epoch{'s' if one['epochs'] > 1 else ''}, {seeds} seed{'s' if seeds > 1 else ''}"
        return f"{one['model']} on {one['data_cell']}, {length}, {one['image_size']}² pixels, {self.device}"

    def at(self, place: str) -> dict[str, Source]:
        """Its variants in a table or figure, in the paper's order."""
        return {name: self.variants[name] for name in PLACES[place] if name in self.variants}


def groups(results: Results) -> list[Group]:
    """The ablations under results/: of the stage, then those by hand. Records of other recipes, models or data are other groups."""
    found: dict[tuple, dict[str, Source]] = {}
    for source in results.sources:
        metrics = source.metrics
        if "recipe" not in metrics or (name := variant_of(results, metrics)) is None:
            continue
        folder = PurePosixPath(source.path).parent.parent.as_posix()
        rest = tuple(sorted((key, str(value)) for key, value in metrics["options"].items() if key not in CHANGED))
        found.setdefault((folder, metrics["data_cell"], metrics["model"], rest, metrics["recipe"]), {})[name] = source
    for (_, _, model, rest, _), variants in found.items():
        like = next(iter(variants.values()))
        if "conv2d" not in variants and not rest and results.is_full(like):
            if own := _pretrained(results, model, like):
                variants["conv2d"] = own
    return [
        Group(folder=key[0], variants={name: variants[name] for name in VARIANTS if name in variants}) for key, variants in found.items()
    ]


def variant_of(results: Results, metrics: Mapping[str, Any]) -> str | None:
    """Which of the 17 a record is of; None for another combination."""
    options = {key: value for key, value in metrics["options"].items() if key in CHANGED and results.defaults.get(key) != str(value)}
    return next((name for name, changes in VARIANTS.items() if changes == options), None)


def top1_of(source: Source) -> dict[int, float]:
    """Seed -> accuracy in percent; empty for a record of one training, which names no seed."""
    return {entry["seed"]: entry["top1_percent"] for entry in source.metrics.get("seeds", ())}


def verdict_of(group: Group, place: str, ledger: Ledger) -> Verdict:
    """Whether the paper's ordering of a table or figure is seen; see `ordering.judge`."""
    there = group.at(place)
    before = {
        name: {entry["seed"]: entry["top1_previous_percent"] for entry in source.metrics.get("seeds", ())} for name, source in there.items()
    }
    top1 = {name: top1_of(source) for name, source in there.items()}
    return judge(top1, before, orders_of(place, ledger), group.any["val_images"], group.any["classes"])


def orders_of(place: str, ledger: Ledger) -> list[tuple[str, str]]:
    """(better, worse) for every two variants that the paper orders: by its Top-1, or by its text where it prints no numbers."""
    if place not in TABLES:
        return list(ORDERS[place])
    top1 = {name: float(_printed(place, name, "top1_percent", ledger)) for name in PLACES[place]}
    ranked = sorted(top1, key=top1.__getitem__, reverse=True)
    return [(better, worse) for i, better in enumerate(ranked) for worse in ranked[i + 1 :] if top1[better] > top1[worse]]


def ablation_parts(results: Results, ledger: Ledger) -> list[str]:
    """Sections of Markdown: the verdicts, then every table and figure of each group of records."""
    title, every = "## The ablations: Tables 3 and 4, Fig. 7", groups(results)
    if not every:
        return [f"{title}\n\nNone is trained yet: `repro ablate`, or `repro ablate --all` for all {len(VARIANTS)} variants."]
    judged = [(group, place, verdict_of(group, place, ledger)) for group in every for place in PLACES if len(group.at(place)) > 1]
    rows = [
        [place, group.title, f"**{verdict.word}**", verdict.why, "–" if verdict.tau is None else f"{verdict.tau:.2f}"]
        for group, place, verdict in judged
    ]
    head = (
        f"{title}\n\nVariants of Vittt, trained alike here. Is the paper's ordering by Top-1 seen? Each pair that the paper orders is judged by\n"
        "its differences over seeds (paired t, Holm's correction over the pairs of a table); τ is Kendall's, over the same pairs.\n"
        "How: `docs/ablations.md`. The paper's numbers are of Vittt-T on ImageNet-1K: only orderings are compared, never numbers.\n"
        "Our Top-1 is the mean over seeds ± their standard deviation; our images/s are of inference on the device that is named.\n\n"
    )
    parts = [head + grid(["", "trained", "verdict", "because", "τ"], rows)]
    drawn = _to_draw(every)
    for group, place, verdict in judged:
        says = f"{SAYS[place]}\n\n" if place in SAYS else ""
        text = f"### {place}: {group.title}\n\n{says}" + _rows_grid(results, group, place, ledger)
        if place in FIGURES and drawn[place, group.any["data_cell"]] is group:
            text += f"\n\n![{place}](figures/{_file(place, group)})"
        if absent := [name for name in PLACES[place] if name not in group.variants]:
            text += f"\n\nNot trained here: {', '.join(absent)}; `repro ablate --all --data {group.any['data_cell']} --epochs {group.any['epochs']}` trains all."
        if verdict.pairs:
            text += "\n\n" + _pairs_grid(place, verdict, ledger)
        parts.append(text)
    return parts


def draw_figures(results: Results, ledger: Ledger, folder: Path) -> list[Path]:
    """Fig. 7(a) and (b) of each data set, from the group with most of its variants: fig7a_<data>.png, fig7b_<data>.png."""
    return [_draw(folder / _file(place, group), group, place, ledger) for (place, _), group in _to_draw(groups(results)).items()]


def drawn_from(results: Results) -> dict[str, list[Source]]:
    """File that `draw_figures` makes -> the records that it shows."""
    return {_file(place, group): list(group.at(place).values()) for (place, _), group in _to_draw(groups(results)).items()}


def _pretrained(results: Results, model: str, like: Source) -> Source | None:
    """Vittt itself, where the profile trains it as a cell of `pretrain` by the same recipe, as the paper's does."""
    same = ("data", "epochs", "batch_size", "val_images")
    cells = (source for source in results.sources if source.path.startswith("results/pretrain/"))
    for source in cells:
        metrics = source.metrics
        if results.model_key(metrics, source.path) == model and all(metrics.get(name) == like.metrics.get(name) for name in same):
            return source
    return None


def _to_draw(every: list[Group]) -> dict[tuple[str, str], Group]:
    """(figure, data set) -> the group with most of its variants, two at least, and then with most epochs."""
    found: dict[tuple[str, str], Group] = {}
    for group, place in itertools.product(every, FIGURES):
        if len(group.at(place)) > 1:
            key = (place, group.any["data_cell"])
            found[key] = max(filter(None, (found.get(key), group)), key=lambda each: (len(each.at(place)), each.any["epochs"]))
    return found


def _file(place: str, group: Group) -> str:
    return f"{FIGURES[place]}_{group.any['data_cell']}.png"


def _printed(place: str, name: str, column: str, ledger: Ledger) -> str:
    """What the paper prints of a variant. Of the figures' points it prints none but Vittt's own, in Table 3."""
    table = TABLES.get(place) or ("table3" if name == "conv2d" and column in ("fps", "top1_percent") else None)
    entry = ledger.entries.get(f"{table}.{ROW.get((place, name), name)}.{column}")
    return "–" if entry is None else entry.printed or "–"


def _rows_grid(results: Results, group: Group, place: str, ledger: Ledger) -> str:
    dense = {name: _dense_scores(results, source) for name, source in group.at(place).items()}
    shown = [key for key in SCORES if any(key in scores for scores in dense.values())]
    labels = {"params_m": "#Param. (M)", "macs_g": "FLOPs (G)", "fps": "FPS", "top1_percent": "Top-1 (%)"} | {
        key: SCORES[key] for key in shown
    }
    paper = [key for key in labels if _printed(place, "conv2d", key, ledger) != "–"]
    ours = ["params (M)", "MACs (G)", "images/s", "Top-1 (%)", *(SCORES[key] for key in shown)]
    head = ["", *(f"paper: {labels[key]}" for key in paper), *(f"ours: {label}" for label in ours)]
    rows = []
    for name, source in group.at(place).items():
        m = source.metrics
        spread = m.get("top1_spread_percent")
        speed = m.get("throughput_img_per_s")
        ours = [
            f"{m['params'] / 1e6:.4g}",
            "–" if m.get("macs_g") is None else f"{m['macs_g']:.4g}",
            "–" if speed is None else f"{speed:.0f}",
            f"{m['top1_percent']:.2f}" + (f" ± {spread:.2f}" if spread is not None else ""),
            *("–" if key not in dense[name] else f"{dense[name][key]:.1f}" for key in shown),
        ]
        changes = ", ".join(f"{key} {value or 'all'}" for key, value in VARIANTS[name].items()) or "Vittt"
        rows.append([changes, *(_printed(place, name, key, ledger) for key in paper), *ours])
    return grid(head, rows)


def _dense_scores(results: Results, source: Source) -> dict[str, float]:
    """AP and mIoU of the detector and segmenter that began from these weights."""
    weights = f"{PurePosixPath(source.path).parent}/weights.safetensors"
    began = [other for other in results.score_cells if other.metrics.get("initial") == weights]
    return {
        key: other.metrics[key]
        for stage, keys in DENSE.items()
        for other in began
        if f"/{stage}/" in other.path
        for key in keys
        if key in other.metrics
    }


def _pairs_grid(place: str, verdict: Verdict, ledger: Ledger) -> str:
    rows = []
    for pair in verdict.pairs:
        theirs = "–"
        if place in TABLES:
            theirs = f"+{float(_printed(place, pair.better, 'top1_percent', ledger)) - float(_printed(place, pair.worse, 'top1_percent', ledger)):.1f}"
        needed = "–" if pair.word != "not separated" else "over 1000" if pair.needed is None else str(pair.needed)
        ours = f"{pair.difference:+.2f} [{pair.low:+.2f}, {pair.high:+.2f}]"
        rows.append([f"{pair.better} > {pair.worse}", theirs, ours, f"{pair.p:.3f}", pair.word, needed])
    return grid(["the paper's order", "paper (points)", "ours (points) [95 %]", "p (Holm)", "", "seeds needed"], rows)


def _draw(path: Path, group: Group, place: str, ledger: Ledger) -> Path:
    """The paper's panel, our accuracies with each seed, our throughputs. The paper's has the only number that it prints."""
    there, colour = group.at(place), STYLES["vittt"][1]
    names = PLACES[place]
    ticks = [TICKS.get(name, "16" if place == "Fig. 7(a)" else "2: per direction") for name in names]
    figure, (paper, ours, speed) = figure_of(3)
    place_of = {name: x for x, name in enumerate(names)}
    printed = float(_printed(place, "conv2d", "top1_percent", ledger))
    paper.plot(place_of["conv2d"], printed, "o", color="black")
    paper.annotate(f"{printed} %", (place_of["conv2d"], printed), xytext=(8, 6), textcoords="offset points", fontsize=9)
    note = (
        "in words: falls sharply from 4,\nworst at 64, then grows slightly"
        if place == "Fig. 7(a)"
        else "in words: more learnable states\nare better"
    )
    paper.text(0.03, 0.04, f"{note}\n(no other number is printed)", transform=paper.transAxes, fontsize=8, va="bottom")
    paper.set(title="paper: Vittt-T on ImageNet-1K", ylabel="Top-1 (%)", ylim=(printed - 3, printed + 1))
    for name, source in there.items():
        values, x = list(top1_of(source).values()) or [source.metrics["top1_percent"]], place_of[name]
        ours.plot([x] * len(values), values, ".", color=colour, alpha=0.5)
        ours.errorbar(
            x, statistics.mean(values), yerr=statistics.stdev(values) if len(values) > 1 else None, fmt="o", color=colour, capsize=4
        )
        if source.metrics.get("throughput_img_per_s") is not None:
            speed.plot(x, source.metrics["throughput_img_per_s"], "s", color=colour)
    one = group.any
    measured_on = "; ".join(
        sorted({source.metrics["throughput_device"] for source in there.values() if "throughput_device" in source.metrics})
    )
    ours.set(
        title=f"ours: {one['model'].split('_patch')[0]} on {one['data_cell']}, {one['epochs']} epochs",
        ylabel="Top-1 (%): mean ± spread, seeds",
    )
    speed.set(title=f"ours, {measured_on}", ylabel="images per second", ylim=(0, 1.15 * speed.dataLim.y1 if speed.has_data() else 1))
    label = "chunk size b (tokens)" if place == "Fig. 7(a)" else "learnable initial states"
    for panel in (paper, ours, speed):
        panel.set_xticks(range(len(ticks)), ticks)
        panel.set(xlabel=label, xlim=(-0.5, len(ticks) - 0.5))
        panel.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    figure.tight_layout()
    return save_png(figure, path)
