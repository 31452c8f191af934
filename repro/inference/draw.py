"""Figures of interpretability: PNG files at `path` with `caption` below. Equal numbers give equal bytes."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..core.figures import save_png
from .erf import FieldShape, describe_field

_WIDTH = 9.0  # width of every figure in inches
DECADES = 4  # range of the colours of a receptive field, in powers of ten
MARK = np.array([0.90, 0.35, 0.0])  # RGB of marked tokens
# Okabe and Ito's palette, which most people with colour blindness can tell apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")


def draw_gradients(
    path: Path,
    pictures: Sequence[np.ndarray],
    maps: Mapping[str, ArrayLike],
    tops: Mapping[str, Mapping[str, ArrayLike]],
    caption: str,
) -> None:
    """Draw Fig. 3, 9 and 10: a row per picture and state of the weights.

    A row has the layers' maps, their mean, and the marked tokens.

    Args:
        pictures: (H,W,3) uint8, resized and cropped for the model.
        maps: state of the weights -> gradient magnitudes (N,L,h,w), in the order of the rows.
        tops: state of the weights -> `all` and `later` -> masks (N,h,w), see `repro.inference.inner.mark_tokens`.
    """
    maps = {state: np.asarray(found) for state, found in maps.items()}
    layers = next(iter(maps.values())).shape[1]
    rows, columns = len(pictures) * len(maps), layers + 4
    side = (_WIDTH - 0.9) / columns
    figure = _new_figure(rows * side + 1.0)
    axes = figure.subplots(rows, columns, squeeze=False)
    relative = {state: np.concatenate([m, m.mean(1, keepdims=True)], 1) for state, m in maps.items()}
    # relative to the mean over a picture's tokens: all layers then share one scale
    relative = {state: m / m.mean((2, 3), keepdims=True) for state, m in relative.items()}
    # the 99th percentile instead of the maximum, which a single token can set
    top = max(2.0, float(np.percentile(np.concatenate([m.ravel() for m in relative.values()]), 99)))
    for row, (n, state) in enumerate((n, state) for n in range(len(pictures)) for state in maps):
        picture = pictures[n] / 255
        axes[row, 0].imshow(picture)
        axes[row, 0].set_ylabel(state, fontsize=8)
        for column, values in enumerate(relative[state][n]):
            shown = axes[row, 1 + column].imshow(values, cmap="viridis", vmin=0, vmax=top)
        for panel, name in zip(axes[row, -2:], ("all", "later"), strict=True):
            chosen = np.asarray(tops[state][name][n])
            cell = [side // count for side, count in zip(picture.shape[:2], chosen.shape, strict=True)]  # pixels
            panel.imshow(np.where(np.kron(chosen, np.ones(cell))[..., None] > 0, 0.45 * picture + 0.55 * MARK, picture))
    titles = "picture", *(f"layer {i + 1}" for i in range(layers)), "mean", "top 30 %", "… later chunks"
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title, fontsize=8)
    _hide_ticks(axes.flat)
    bar = figure.colorbar(shown, ax=axes, fraction=0.02, pad=0.01, extend="max")
    bar.set_label("‖K‖·‖G‖ / mean over the picture's tokens", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    _save(figure, path, caption)


def draw_fields(
    path: Path, fields: Mapping[str, np.ndarray | str], shapes: Mapping[str, FieldShape], caption: str
) -> None:
    """Draw Fig. 8: receptive fields on a logarithmic scale up to each model's largest contribution.

    Below, a plot shows the share of the contributions within a distance of the centre.

    Args:
        fields: label -> contributions (H,W), or the reason why they are missing.
        shapes: label -> the field in numbers, where there is one.
    """
    columns = min(4, len(fields))
    rows = -(-len(fields) // columns)
    heights = 0.4 + rows * (min(4.0, _WIDTH / columns) + 0.4), 3.4
    figure = _new_figure(sum(heights))
    upper, lower = figure.subfigures(2, 1, height_ratios=heights)
    axes = upper.subplots(rows, columns, squeeze=False)
    for panel in axes.flat[len(fields) :]:
        panel.remove()
    axes = axes.flat[: len(fields)]
    shown = None
    for panel, (label, field) in zip(axes, fields.items(), strict=True):
        panel.set_title(label, fontsize=10)
        panel.set_box_aspect(1)
        if isinstance(field, str):
            panel.text(
                0.5, 0.5, textwrap.fill(field, 24), ha="center", va="center", fontsize=8, transform=panel.transAxes
            )
            continue
        values = np.log10(np.maximum(field / field.max(), 10.0**-DECADES))
        shown = panel.imshow(values, cmap="viridis", vmin=-DECADES, vmax=0)
        shape = shapes[label]
        size = f"{field.shape[0]} × {field.shape[1]} px"
        radii = f"{shape.radius_50_px:.0f} / {shape.radius_90_px:.0f} px"
        panel.set_xlabel(f"{size}\n50 / 90 % within {radii}\nanisotropy {shape.anisotropy:.2f}", fontsize=8)
    _hide_ticks(axes)
    if shown is not None:
        bar = upper.colorbar(shown, ax=list(axes), fraction=0.03, pad=0.02, extend="min", panchor=False)
        bar.set_ticks(range(-DECADES, 1), labels=[f"$10^{{{n}}}$" if n else "1" for n in range(-DECADES, 1)])
        bar.set_label("contribution / largest", fontsize=9)
    panel = lower.subplots()
    height, width = next((field.shape for field in fields.values() if not isinstance(field, str)), (1, 1))
    even = describe_field(torch.ones(height, width, dtype=torch.float64), ((height - 1) / 2, (width - 1) / 2))
    panel.plot(even.share_within, color="grey", linestyle=":", label=f"even over {height} × {width} px")
    for colour, (label, shape) in zip(itertools.cycle(COLOURS), shapes.items(), strict=False):
        panel.plot(shape.share_within, color=colour, label=label)
    panel.set(xlabel="distance from the centre (pixels)", ylabel="share of the contributions within it")
    panel.set(xlim=(0, None), ylim=(0, 1.02))
    panel.grid(alpha=0.3)
    panel.legend(fontsize=9, loc="lower right")
    _save(figure, path, caption)


def draw_losses(path: Path, losses: Mapping[str, ArrayLike], caption: str) -> None:
    """Draw Fig. 11: a panel for each layer, with a line for each state of the weights.

    `losses` maps the state to (L,T).
    """
    layers = len(next(iter(losses.values())))
    columns = min(4, layers)
    rows = -(-layers // columns)
    figure = _new_figure(1.2 + 2.4 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for layer, panel in enumerate(axes.flat):
        if layer >= layers:
            panel.remove()
            continue
        for colour, (state, values) in zip(itertools.cycle(COLOURS), losses.items(), strict=False):
            panel.plot(range(1, values.shape[1] + 1), values[layer], color=colour, linewidth=1.2, label=state)
        panel.set_title(f"layer {layer + 1}", fontsize=9)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
        if layer % columns == 0:
            panel.set_ylabel("reconstruction loss", fontsize=9)
        if layer + columns >= layers:
            panel.set_xlabel("token, in scan order", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    _save(figure, path, caption)


def find_central(tokens: Sequence[int], grid: tuple[int, int]) -> int:
    """Return the index of the token nearest to the middle of an (h, w) grid, the first of equally near ones."""
    places = np.stack(np.unravel_index(tokens, grid), 1)
    # doubled, so that distances are whole numbers and ties are exact
    return int(np.abs(2 * places - np.array(grid) + 1).sum(1).argmin())


def draw_attention(
    path: Path,
    pictures: Sequence[np.ndarray],
    shares: Mapping[str, ArrayLike],
    numbers: Mapping[str, Mapping[str, Sequence[float]]],
    grid: tuple[int, int],
    tokens: Sequence[int],
    caption: str,
) -> None:
    """Draw the attention of the query token of `find_central`: a row per picture and state, with a map per layer.

    Below, plots show the numbers by layer.

    Args:
        pictures: (H,W,3) uint8, resized and cropped for the model.
        shares: state -> (L,B,h,n,N) for at least these images; the maps are means over the heads.
        numbers: state -> name -> (L,), see `repro.inference.attention.summarise_looks`.
        grid: (h, w) of the N patches.
        tokens: indices of the n query patches.
    """
    shares = {state: np.asarray(found).mean(2) for state, found in shares.items()}
    layers = next(iter(shares.values())).shape[0]
    central = find_central(tokens, grid)
    token = tokens[central]
    rows, side = len(pictures) * len(shares), (_WIDTH - 0.9) / max(layers + 1, 8)  # inches; 8: few maps stay small
    labels = {"shift_ratio": "shift ratio of the keys", "reach_patches": "reach (patches)", "peak_percent": "peak (%)"}
    if any("overlap_percent" in own for own in numbers.values()):
        labels["overlap_percent"] = "overlap with the teacher (%)"
    heights = rows * side + 0.6, 2.6
    figure = _new_figure(sum(heights))
    upper, lower = figure.subfigures(2, 1, height_ratios=heights)
    axes = upper.subplots(rows, layers + 1, squeeze=False)
    for row, (n, state) in enumerate((n, state) for n in range(len(pictures)) for state in shares):
        high, wide = (size / count for size, count in zip(pictures[n].shape[:2], grid, strict=True))
        axes[row, 0].imshow(pictures[n])
        axes[row, 0].plot(
            (token % grid[1] + 0.5) * wide, (token // grid[1] + 0.5) * high, "s", color=MARK, markersize=4
        )
        axes[row, 0].set_ylabel(state, fontsize=8)
        for layer in range(layers):
            shown = axes[row, 1 + layer].imshow(shares[state][layer, n, central].reshape(grid), cmap="viridis", vmin=0)
    for panel, title in zip(axes[0], ("picture", *(f"layer {i + 1}" for i in range(layers))), strict=True):
        panel.set_title(title, fontsize=8)
    _hide_ticks(axes.flat)
    bar = upper.colorbar(shown, ax=axes, fraction=0.02, pad=0.01, ticks=[0, shown.get_clim()[1]])
    bar.ax.set_yticklabels(["0", "max"], fontsize=8)
    for panel, (key, label) in zip(lower.subplots(1, len(labels)), labels.items(), strict=True):
        for colour, (state, own) in zip(itertools.cycle(COLOURS), numbers.items(), strict=False):
            if key in own:
                panel.plot(range(1, layers + 1), own[key], marker=".", color=colour, label=state)
        panel.set_title(label, fontsize=8)
        panel.set_xlabel("layer", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    # of the second panel: the state `even` has no shift ratio, so the first panel lacks it
    lower.legend(
        *lower.axes[1].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(numbers),
        frameon=False,
        fontsize=8,
    )
    _save(figure, path, caption)


def _new_figure(height: float) -> Any:
    """Return an empty figure of a height in inches; it needs no window system, unlike those of pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _hide_ticks(axes: Any) -> None:
    """Remove the ticks and their labels from each of some axes."""
    for panel in axes:
        panel.set(xticks=[], yticks=[])


def _save(figure: Any, path: Path, caption: str) -> None:
    """Write a figure with its caption below as a PNG."""
    figure.supxlabel(caption, fontsize=8, color="0.35")
    save_png(figure, path)
