"""Fig. 3: training loss and accuracy with inner models of one, two and three layers."""

import statistics
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

from ...core.figures import new_figure, save_png
from ...report.claims import Report
from ...report.document import Block, Heading, Piece, number, table
from ...report.ordering import ALPHA, PairedTest, compare_means
from ...report.results import Missing
from ...report.variants import TOP1, Group, find_groups
from ..variants import load_variants

LAYERS = dict(zip(load_variants("vit3").rows["Fig. 3"], ("one layer", "two layers", "three layers"), strict=True))
LOSS = "train_loss"
# a loss is recorded to eight digits
_LEAST_SPREAD = 1e-8
_COLOURS = ("#0072B2", "#E69F00", "#D55E00")


def draw_depth(path: Path, group: Group, printed: Callable[[str | None, str], str]) -> Path:
    """Training loss and accuracy over the epochs, the means over the seeds; for the arguments see `VariantTable.draw`."""
    figure, panels = new_figure(2)
    for panel, (key, label) in zip(panels, ((LOSS, "training loss"), (TOP1, "Top-1 (%)")), strict=True):
        for colour, (name, layers) in zip(_COLOURS, LAYERS.items(), strict=True):
            of_epoch: dict[int, list[float]] = {}
            for row in group.read_curve(name) if name in group.variants else ():
                if key in row:
                    of_epoch.setdefault(row["epoch"], []).append(row[key])
            panel.plot(
                list(of_epoch),
                [statistics.mean(values) for values in of_epoch.values()],
                color=colour,
                marker="o",
                label=layers,
            )
        panel.set(xlabel="epoch", ylabel=label)
        panel.grid(True, linewidth=0.4, alpha=0.5)
    panels[0].legend(frameon=False)
    figure.suptitle(
        f"Inner models of Fig. 3 on {group.common['data']}, means over seeds; accuracy on the curve's split",
        fontsize=11,
    )
    figure.tight_layout()
    return save_png(figure, path)


def compare_losses(report: Report) -> list[Block]:
    """Whether deeper inner models end with a higher training loss, for each group that has two of them."""
    blocks: list[Block] = []
    for group in find_groups(report.results, report.paper.variants):
        losses = find_losses(group)
        pairs = [(deep, shallow) for shallow, deep in combinations(LAYERS, 2) if deep in losses and shallow in losses]
        if not pairs:
            continue
        means = ", ".join(f"{LAYERS[name]} {statistics.mean(of.values()):.4f}" for name, of in losses.items())
        blocks += [Heading(group.title), (f"Training loss: {means}.",)]
        tests = compare_means(losses, pairs, _LEAST_SPREAD)
        if tests is None:
            blocks.append(("No verdict: the variants have fewer than two seeds in common, which show no spread.",))
        else:
            rows = [_row(pair, found) for pair, found in zip(pairs, tests, strict=True)]
            blocks.append(table(["the paper's order", "ours (loss) [95 %]", "p (Holm)", ""], rows))
    if not blocks:
        raise Missing("no two of these models are trained yet", f"{report.paper.variants.command} --all")
    return blocks


def find_losses(group: Group) -> dict[str, dict[int, float]]:
    """Variant -> seed -> training loss at the last row of its curve, for the variants of Fig. 3 that were trained."""
    found: dict[str, dict[int, float]] = {}
    for name in LAYERS:
        for row in group.read_curve(name) if name in group.variants else ():
            if LOSS in row:
                found.setdefault(name, {})[row["seed"]] = row[LOSS]
    return found


def _row(pair: Sequence[str], found: PairedTest) -> list[Piece]:
    deep, shallow = (LAYERS[name] for name in pair)
    word = "not separated" if found.p >= ALPHA else "ordering seen" if found.mean > 0 else "ordering contradicted"
    ours = f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    return [f"{deep} > {shallow}", ours, number(f"{found.p:.3f}"), word]
