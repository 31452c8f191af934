"""The sections of ViT³'s page besides the tables: the losses of Fig. 3, and denoisers from outside the pipeline.

page.md calls `compare_losses` and `list_denoisers` by name.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...core.figures import new_figure, save_png
from ...report.claims import Report
from ...report.markdown import bullets, code, join, number, show_interval, show_p, tabulate
from ...report.ordering import ALPHA, compare_pairs, describe_power, holm
from ...report.records import (
    Source,
    average_curves,
    describe_origin,
    describe_seeds,
    find_common,
    group_by,
    keep_best,
    show_mean,
    warn_of_seeds,
)
from ...report.results import Missing
from ...report.variants import TOP1, Group, find_groups

# the variants of Fig. 3, from shallow to deep: `compare_losses` reads its pairs from this order
_LAYERS = {"fc": "one layer", "mlp": "two layers", "layers3": "three layers"}
_LOSS = "train_loss"
_LEAST_SPREAD = 1e-8  # a loss is recorded to eight digits
_COLOURS = ("#0072B2", "#E69F00", "#D55E00")
_HELD_OUT, _JUDGED, _REAL = "held_out_mse", "judged_percent", "real_judged_percent"


def draw_depth(path: Path, groups: Mapping[str, Group], printed: Callable[[str | None, str], str]) -> Path:
    """Draw training loss and accuracy over the epochs, as means over the seeds.

    The arguments are those of `repro.report.paper.DrawVariants`.
    """
    (group,) = groups.values()
    figure, panels = new_figure(2)
    for panel, (key, label) in zip(panels, ((_LOSS, "training loss"), (TOP1, "Top-1 (%)")), strict=True):
        for colour, (name, layers) in zip(_COLOURS, _LAYERS.items(), strict=True):
            means = average_curves(group.read_curve(name, key))
            panel.plot(list(means), list(means.values()), color=colour, marker="o", label=layers)
        panel.set(xlabel="epoch", ylabel=label)
        panel.grid(True, linewidth=0.4, alpha=0.5)
    panels[0].legend(frameon=False)
    about = "means over seeds; accuracy on the curve's split"
    figure.suptitle(f"Inner models of Fig. 3 on {group.common['data']}, {about}", fontsize=11)
    figure.tight_layout()
    return save_png(figure, path)


def compare_losses(report: Report) -> str:
    """Write whether deeper inner models end with a higher training loss, for each group with at least two of them.

    Raises:
        Missing: no group has two trained models.
    """
    columns = {
        "the paper's order": lambda pair: f"{_LAYERS[pair.better]} > {_LAYERS[pair.worse]}",
        "ours (loss) [95 %]": lambda pair: pair.show(4),
        "p (Holm)": lambda pair: show_p(pair.p),
        "": lambda pair: pair.word,
    }
    blocks: list[str] = []
    for group in find_groups(report.results, report.paper):
        losses = find_losses(group)
        orders = [(deep, shallow) for shallow, deep in itertools.combinations(losses, 2)]
        if orders:
            means = ", ".join(f"{_LAYERS[name]} {statistics.mean(of.values()):.4f}" for name, of in losses.items())
            blocks += [f"### {group.title}", f"Training loss: {means}."]
            pairs = compare_pairs(losses, orders, _LEAST_SPREAD)
            blocks.append(describe_power(pairs, describe_seeds(group.variants.values())))
            blocks.append(tabulate(columns, pairs) if pairs else "No verdict: the variants have no seed in common.")
    if not blocks:
        raise Missing("no two of these models are trained yet", report.paper.train_command)
    return join(blocks)


def find_losses(group: Group) -> dict[str, dict[int, float]]:
    """Return variant -> seed -> training loss at the end of its curve, for the trained variants of Fig. 3."""
    curves = {name: group.read_curve(name, _LOSS) for name in _LAYERS}
    return {name: {seed: [*of.values()][-1] for seed, of in own.items()} for name, own in curves.items() if own}


def list_denoisers(report: Report) -> str:
    """Tabulate held-out loss and judged samples of each denoiser, and write which losses differ.

    Raises:
        Missing: no denoiser is trained.
    """

    def name(source: Source) -> str:
        return report.results.model_key(source.metrics, source.path)

    def alike(source: Source) -> tuple:
        """Return what two losses must share; the noise of a held-out image is seeded by its number alone."""
        training = (source.metrics.get(key) for key in ("image_size", "epochs", "steps", "batch_size"))
        return source.machine, source.scored_on, *training

    columns = {
        "denoiser": lambda source: code(name(source)),
        "parameters": lambda source: number(source.metrics["num_params"], ","),
        "seeds": lambda source: len(source.metrics["by_seed"]),
        "held-out MSE of the noise": lambda source: show_mean(source, _HELD_OUT, ".4f"),
        "samples judged as asked": lambda source: number(show_mean(source, _JUDGED, ".1f", " %", is_share=True) or "–"),
        # the judge and the images are the same for all seeds
        "real images": lambda source: number(show_mean(source, _REAL, ".1f", " %").partition(" [")[0] or "–"),
        "measured on": lambda source: describe_origin([source]),
    }
    trained = report.results.require(
        lambda source: source.most_seeds and _HELD_OUT in source.metrics,
        "no denoiser is trained yet",
        "repro generate --cell dit3_nano_digits --seeds 3",
    )
    best = keep_best(trained, lambda source: (alike(source), name(source)))
    blocks: list[str] = []
    for of_key in group_by(best, alike).values():
        group = sorted(of_key, key=lambda each: each.metrics[_HELD_OUT])
        m = group[0].metrics
        size, sampling = m["image_size"], m["by_seed"][0]["sampling"]
        judged = [run for source in group for run in source.metrics["by_seed"] if run.get(_JUDGED) is not None]
        counts = " or ".join(map(str, sorted({run["judged_samples"] for run in judged})))
        by_samples = f", and by {counts} samples of each seed" if counts else ""
        about = (
            f"Trained on {m['data']} at {size}×{size} pixels, {m['steps']:,} steps of {m['batch_size']} images, "
            f"{describe_seeds(group)}; scored on the {m['held_out_images']} images of {m['split']}{by_samples}; "
            f"samples by {sampling['steps']} steps of {sampling['sampler'].upper()} with guidance "
            f"{sampling['guidance']:g}."
        )
        blocks += [warn_of_seeds(group), about, tabulate(columns, group)]
        blocks.append(bullets(_compare(group, name)))
    return join(blocks)


def _compare(group: Sequence[Source], name: Callable[[Source], str]) -> list[str]:
    """Write a sentence on each two held-out losses, paired by seed: both saw the same images with the same noise.

    `group` has the lowest loss first. Holm's correction is over the pairs that have an interval.
    """
    compared = []
    for better, worse in itertools.combinations(group, 2):
        losses = {name(source): source.by_seed(_HELD_OUT) for source in (worse, better)}
        pairs = compare_pairs(losses, [tuple(losses)], _LEAST_SPREAD)  # of two alone: the others may lack its seeds
        said = f"{code(name(better))} against {code(name(worse))}"
        compared.append((said, pairs[0] if pairs else None, len(find_common(losses))))
    corrected = iter(holm([pair.p for _, pair, _ in compared if pair and pair.interval]))
    lines = []
    for said, pair, seeds in compared:
        if pair is None:
            lines.append(f"{said}: no seed in common.")
            continue
        shown = show_interval(pair.difference, pair.interval, ".4f")
        if pair.interval is None:
            warning = "one seed has no interval, and another may say otherwise"
            lines.append(f"{said}: the loss is lower by {shown}; {warning}.")
            continue
        p = next(corrected)
        is_lower = pair.side > 0 and p < ALPHA
        word = "the loss is lower by" if is_lower else "the losses are not separated; they differ by"
        lines.append(f"{said}: {word} {shown} over {seeds} seeds, p {show_p(p)} (Holm).")
    return lines
