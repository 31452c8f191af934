"""The drawing of Fig. 7."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...core.figures import STYLES, new_figure, save_png
from ...report.variants import TOP1, Group


def _draw_fig7(
    path: Path, group: Group, printed: Callable[[str | None, str], str], ticks: dict[str, str], axis: str, note: str
) -> Path:
    """Panels: the paper's only printed number, our accuracies with each seed, and our measured throughputs.

    `ticks`: variant -> its label; `note`: what the paper's panel shows; the rest as in `repro.report.paper`.
    """
    colour, positions = STYLES["vittt"][1], {name: x for x, name in enumerate(ticks)}
    speeds = {name: group.throughput(name) for name in ticks if group.throughput(name) is not None}
    figure, (paper, ours, *rest) = new_figure(3 if speeds else 2)
    top1 = float(printed("table3.conv2d", TOP1))
    paper.plot(positions["conv2d"], top1, "o", color="black")
    paper.annotate(f"{top1} %", (positions["conv2d"], top1), xytext=(8, 6), textcoords="offset points", fontsize=9)
    paper.text(0.03, 0.04, f"{note}\n(no other number is printed)", transform=paper.transAxes, fontsize=8, va="bottom")
    paper.set(title="paper: Vittt-T on ImageNet-1K", ylabel="Top-1 (%)", ylim=(top1 - 3, top1 + 1))
    for name, x in positions.items():
        if name not in group.variants:
            continue
        values = [run[TOP1] for run in group.variants[name].metrics["by_seed"]]
        spread = statistics.stdev(values) if len(values) > 1 else None
        ours.plot([x] * len(values), values, ".", color=colour, alpha=0.5)
        ours.errorbar(x, statistics.mean(values), yerr=spread, fmt="o", color=colour, capsize=4)
    m = group.common
    title = f"ours: {m['model'].split('_patch')[0]} on {m['data']}, {m['epochs']} epochs"
    ours.set(title=title, ylabel="Top-1 (%): mean ± standard deviation, seeds")
    for speed in rest:
        speed.plot([positions[name] for name in speeds], list(speeds.values()), "s", color=colour)
        devices = sorted({group.speeds[name].device for name in speeds})
        speed.set(
            title=f"ours, {'; '.join(devices)}", ylabel="images per second", ylim=(0, 1.15 * max(speeds.values()))
        )
    for panel in (paper, ours, *rest):
        panel.set_xticks(range(len(ticks)), list(ticks.values()))
        panel.set(xlabel=axis, xlim=(-0.5, len(ticks) - 0.5))
        panel.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    figure.tight_layout()
    return save_png(figure, path)


draw_fig7a = partial(
    _draw_fig7,
    ticks={"chunk4": "4", "chunk8": "8", "conv2d": "16", "chunk32": "32", "chunk64": "64", "chunk_all": "all"},
    axis="chunk size b (tokens)",
    note="in words: falls sharply from 4,\nworst at 64, then grows slightly",
)
draw_fig7b = partial(
    _draw_fig7,
    ticks={"w0_frozen": "0: frozen", "w0_shared": "1: shared", "conv2d": "2: per direction"},
    axis="learnable initial states",
    note="in words: more learnable states\nare better",
)
