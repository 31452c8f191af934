"""Figures drawn from records: PNG to look at, SVG to print. The same records give the same bytes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.record import atomic

# one colour and marker for a family in every figure (Okabe and Ito's palette, told apart by most eyes)
STYLES = {
    "vittt": ("Vittt", "#D55E00", "o", "-"),
    "deit": ("DeiT, unfused attention", "#0072B2", "s", "--"),
    "deit_fused": ("DeiT, fused attention", "#56B4E9", "s", "-"),
    "vim": ("Vim", "#009E73", "^", "-"),
    "vrwkv": ("VRWKV", "#CC79A7", "v", "-"),
    "vit3": ("ViT³", "#E69F00", "D", "-"),
}
LABELS = {"macs_g": "multiply-adds of an image (10⁹)", "throughput_img_per_s": "images per second", "peak_memory_mib": "peak memory (MiB)"}


def against_resolution(path: Path, series: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> list[Path]:
    """Fig. 6: multiply-adds, throughput and peak memory against the side of the image, logarithmic axes.

    A row that ran out of memory or of time is a cross on the upper (memory) or lower (throughput) edge, labelled with what happened.

    Args:
        path: without suffix; `.png` and `.svg` are written.
        series: family, one of `STYLES` -> its rows, see `repro.measure.speed.measure`.
        title: above the panels.

    Returns:
        The files.
    """
    figure, axes = figure_of(len(LABELS))
    for panel, (key, label) in zip(axes, LABELS.items(), strict=True):
        failed = []
        for family, rows in series.items():
            name, colour, marker, line = STYLES[family]
            there = sorted((row["resolution"][0], row[key]) for row in rows if row[key] is not None)
            if there:
                panel.plot(*zip(*there), color=colour, marker=marker, linestyle=line, label=name, markersize=5)
            if key != "macs_g":
                failed += [(row["resolution"][0], row["status"], colour) for row in rows if row["status"] != "ok"]
        panel.set(xscale="log", yscale="log", xlabel="image side (pixels)", ylabel=label)
        _sides(panel, sorted({row["resolution"][0] for rows in series.values() for row in rows}))
        edge = 0.97 if key == "peak_memory_mib" else 0.03
        for place, (side, status, colour) in enumerate(failed):
            panel.plot(side, edge, "x", color=colour, transform=panel.get_xaxis_transform(), markersize=7, clip_on=False)
            shift = (-4 - 9 * place) if edge > 0.5 else 4 + 9 * place
            panel.annotate(
                "out of memory" if status == "oom" else status,
                (side, edge),
                xycoords=panel.get_xaxis_transform(),
                xytext=(-6, shift),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=7,
                color=colour,
            )
        panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(len(labels), 6), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return _save(figure, path)


def at_largest(path: Path, bars: Mapping[str, Mapping[str, float]], title: str) -> list[Path]:
    """Fig. 1's panels: a bar for each family, one panel for each quantity.

    Args:
        path: without suffix.
        bars: quantity, one of `LABELS` -> family -> value.
        title: above the panels.
    """
    figure, axes = figure_of(len(bars))
    for panel, (key, values) in zip(axes, bars.items(), strict=True):
        for place, (family, value) in enumerate(values.items()):
            panel.bar(place, value, color=STYLES[family][1])
            panel.annotate(f"{value:.0f}" if value >= 100 else f"{value:.3g}", (place, value), ha="center", va="bottom", fontsize=8)
        panel.set_xticks(range(len(values)), [STYLES[family][0].replace(", ", "\n") for family in values], fontsize=8, rotation=30)
        panel.set_ylabel(LABELS[key])
        panel.margins(y=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    return _save(figure, path)


def figure_of(panels: int) -> tuple[Any, Any]:
    """A figure with its panels in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "vision-ttt"  # else the ids in the file are new each time
    figure, axes = pyplot.subplots(1, panels, figsize=(4.6 * panels, 4.2), squeeze=False)
    return figure, axes[0]


def _sides(panel: Any, sides: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    shown = [side for i, side in enumerate(sides) if i in (0, len(sides) - 1) or side == 640 or math.log2(side / 256) % 1 == 0]
    panel.xaxis.set_major_locator(FixedLocator(shown))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xticks(shown, [str(side) for side in shown])


def save_png(figure: Any, path: Path) -> Path:
    """Write a PNG without a date, and close the figure."""
    from matplotlib import pyplot

    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _save(figure: Any, path: Path) -> list[Path]:
    svg = path.with_name(path.name + ".svg")
    with atomic(svg) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
    return [save_png(figure, path.with_name(path.name + ".png")), svg]
