"""Figures of speed, memory and multiply-adds over the image size, as Fig. 1 and 6 of Vision-TTT."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.figures import STYLES, new_figure, save_png
from .pooling import RANGES

# quantity of Fig. 1 and 6 of Vision-TTT -> label of its axis
LABELS = {
    "macs_g": "multiply-adds per image (10⁹)",
    "throughput_img_per_s": "images per second",
    "peak_memory_mib": "peak memory (MiB)",
}
_ALL_LABELS = {**LABELS, "latency_ms": "time of a step (ms)"}
_SPEEDS = ("latency_ms", "throughput_img_per_s")  # quantities that show the host where its time hides the device's


def against_resolution(
    path: Path, series: Mapping[str, Sequence[Mapping[str, Any]]], title: str, quantities: Sequence[str] = tuple(LABELS)
) -> None:
    """Draw quantities against the image size on logarithmic axes, one panel each, as Fig. 6 of Vision-TTT does.

    A row that ran out of memory or time is a cross on the upper edge (the lower one for throughput) with the reason.
    The band around a time or a peak of memory is its range over several processes. A time that is, or may be, the
    host's has a hollow marker.

    Args:
        path: the PNG file.
        series: family, a key of `core.figures.STYLES` -> its rows, see `pooling.pool_runs` and `mark_host`.
        quantities: keys of `LABELS`, or `latency_ms`.
    """
    figure, axes = new_figure(len(quantities))
    has_hollow = False
    for panel, key in zip(axes, quantities, strict=True):
        failed = []
        for family, rows in series.items():
            label, colour, marker, line = STYLES[family]
            style = {"color": colour, "marker": marker, "markersize": 5}
            measured = [row for row in rows if row[key] is not None]
            if points := sorted((row["image_size"][0], row[key]) for row in measured):
                panel.plot(*zip(*points), **style, linestyle=line, label=label)
            ranges = sorted((row["image_size"][0], *(row.get(RANGES.get(key)) or (math.nan,) * 2)) for row in measured)
            if ranges:  # NaN for rows of one process, where fill_between leaves a gap
                panel.fill_between(*zip(*ranges), color=colour, alpha=0.2, linewidth=0)
            hosts = [row for row in measured if key in _SPEEDS and row["host"]]
            if points := [(row["image_size"][0], row[key]) for row in hosts]:
                panel.plot(*zip(*points), **style, linestyle="none", markerfacecolor="white")
                has_hollow = True
            if key != "macs_g":
                failed += [(row["image_size"][0], row["status"], colour) for row in rows if row["status"] != "ok"]
        panel.set(xscale="log", yscale="log", xlabel="image size (pixels)", ylabel=_ALL_LABELS[key])
        _label_sizes(panel, sorted({row["image_size"][0] for rows in series.values() for row in rows}))
        _mark_failures(panel, failed, edge=0.03 if key == "throughput_img_per_s" else 0.97)
        panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
    named: dict[str, Any] = {}
    for panel in axes:  # a family may be measured in some panels alone
        handles, labels = panel.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True)) | named
    figure.legend(named.values(), named, loc="lower center", ncols=min(len(named), 6), frameon=False, fontsize=9)
    figure.suptitle(title + ("; hollow: host" if has_hollow else ""), fontsize=11)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    save_png(figure, path)


def at_largest(path: Path, bars: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Draw a panel for each quantity with a bar for each family, like the panels of Fig. 1 of Vision-TTT.

    `bars` maps a quantity, a key of `LABELS`, to family -> value; see also `against_resolution`.
    """
    figure, axes = new_figure(len(bars))
    for panel, (key, values) in zip(axes, bars.items(), strict=True):
        for place, (family, value) in enumerate(values.items()):
            panel.barh(place, value, color=STYLES[family][1])
            text = f" {value:.0f}" if value >= 100 else f" {value:.3g}"
            panel.annotate(text, (value, place), va="center", fontsize=8)
        panel.set_yticks(range(len(values)), [STYLES[family][0].replace(", ", "\n") for family in values], fontsize=8)
        panel.invert_yaxis()
        panel.set_xlabel(LABELS[key])
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    save_png(figure, path)


def _label_sizes(panel: Any, sizes: Sequence[int]) -> None:
    """Mark every size of the ascending `sizes` on the x axis, and label the largest and all that have room."""
    shown: list[int] = []
    for size in reversed(sizes):
        if not shown or shown[-1] / size > 1.12:  # nearer ones would touch
            shown.append(size)
    panel.set_xticks(shown, map(str, shown), fontsize=8)
    panel.set_xticks(sizes, [""] * len(sizes), minor=True)


def _mark_failures(panel: Any, failed: Sequence[tuple[int, str, str]], edge: float) -> None:
    """Draw a cross for each (image size, status, colour) at `edge`, a share of the panel's height."""
    for place, (size, status, colour) in enumerate(failed):
        panel.plot(size, edge, "x", color=colour, transform=panel.get_xaxis_transform(), markersize=7, clip_on=False)
        panel.annotate(
            "out of memory" if status == "oom" else status,
            (size, edge),
            xycoords=panel.get_xaxis_transform(),
            xytext=(-6, -4 - 9 * place if edge > 0.5 else 4 + 9 * place),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=7,
            color=colour,
        )
