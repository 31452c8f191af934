"""The paper's figures in its order, and the drawing of Fig. 7."""

import statistics
from collections.abc import Callable
from pathlib import Path

from ...core.figures import STYLES, new_figure, save_png
from ...report.paper import Figure
from ...report.variants import TOP1, Group

_SWEEP = "repro efficiency --res 224..1280"
FIGURES = (
    Figure(
        place="Fig. 1",
        files="measured/*/efficiency/fig1_*.png",
        command=_SWEEP,
        shows="DeiT, Vim and Vittt: accuracy, AP and mIoU, and speed and memory at high resolution. Our pictures are of its "
        "multiply-adds, speed and memory; its accuracies are those of Tables 1 and 2",
    ),
    Figure(place="Fig. 2", shows="the hidden state W, updated by a gradient step on each token"),
    Figure(
        place="Fig. 3",
        files="visualize/fig3_*.png",
        command="repro visualize",
        shows="the Gradient Magnitude Map: how large the inner gradient of Eq. 6 is at each patch of an image",
    ),
    Figure(place="Fig. 4", shows="the architecture: patches, Vittt blocks, head"),
    Figure(place="Fig. 5", shows="the Vittt block, from vanilla TTT to the dual data sets and the Conv2d preprocessing"),
    Figure(
        place="Fig. 6",
        files="measured/*/efficiency/fig6_*.png",
        command=_SWEEP,
        shows="multiply-adds, throughput and memory of DeiT, Vim and Vittt from 224×224 to 1280×1280, sizes T, S and B",
    ),
    Figure(
        place="Fig. 7a",
        files="figures/fig7a_*.png",
        command="repro ablate --all",
        shows="Top-1 accuracy against the mini-batch size b, 4 to 196",
    ),
    Figure(
        place="Fig. 7b",
        files="figures/fig7b_*.png",
        command="repro ablate --all",
        shows="Top-1 accuracy against the number of learnable initial states W0: none, one shared, two",
    ),
    Figure(
        place="Fig. 8",
        files="visualize/fig8_*.png",
        command="repro visualize",
        shows="the effective receptive field of the central pixel: ResNet18, DeiT-T, Vim-T, and Vittt-T as vanilla TTT, + Dual, + Conv2d",
    ),
    Figure(
        place="Fig. 9",
        files="visualize/fig9_*.png",
        command="repro visualize",
        shared_with="Fig. 3",
        shows="the Gradient Magnitude Map of Vittt-T before and after training",
    ),
    Figure(
        place="Fig. 10",
        files="visualize/fig10_*.png",
        command="repro visualize",
        shared_with="Fig. 3",
        shows="the same for images of more classes, with the top 30 % of the tokens marked",
    ),
    Figure(
        place="Fig. 11",
        files="visualize/fig11_*.png",
        command="repro visualize",
        shows="the inner reconstruction loss of every token in each of 12 layers at epochs 0, 3 and 300, mean of 128 images",
    ),
)


def draw_fig7a(path: Path, group: Group, printed: Callable[[str | None, str], str]) -> Path:
    """Fig. 7(a), accuracy against the chunk size b; see `_draw_fig7`."""
    ticks = {"chunk4": "4", "chunk8": "8", "conv2d": "16", "chunk32": "32", "chunk64": "64", "chunk_all": "all"}
    note = "in words: falls sharply from 4,\nworst at 64, then grows slightly"
    return _draw_fig7(path, group, printed, ticks, "chunk size b (tokens)", note)


def draw_fig7b(path: Path, group: Group, printed: Callable[[str | None, str], str]) -> Path:
    """Fig. 7(b), accuracy against the number of learnable initial states; see `_draw_fig7`."""
    ticks = {"w0_frozen": "0: frozen", "w0_shared": "1: shared", "conv2d": "2: per direction"}
    return _draw_fig7(path, group, printed, ticks, "learnable initial states", "in words: more learnable states\nare better")


def _draw_fig7(path: Path, group: Group, printed: Callable[[str | None, str], str], ticks: dict[str, str], axis: str, note: str) -> Path:
    """Three panels: the paper's, which prints one number only, our accuracies with each seed, and our throughputs.

    Args:
        path: the PNG.
        group: the trained variants.
        printed: what the paper prints in a row and a column of its tables.
        ticks: variant -> its label on the axis.
        axis: the axis's label.
        note: what the paper's panel shows, in words.
    """
    colour, positions = STYLES["vittt"][1], {name: x for x, name in enumerate(ticks)}
    figure, (paper, ours, speed) = new_figure(3)
    top1 = float(printed("table3.conv2d", TOP1))
    paper.plot(positions["conv2d"], top1, "o", color="black")
    paper.annotate(f"{top1} %", (positions["conv2d"], top1), xytext=(8, 6), textcoords="offset points", fontsize=9)
    paper.text(0.03, 0.04, f"{note}\n(no other number is printed)", transform=paper.transAxes, fontsize=8, va="bottom")
    paper.set(title="paper: Vittt-T on ImageNet-1K", ylabel="Top-1 (%)", ylim=(top1 - 3, top1 + 1))
    devices = set()
    for name, x in positions.items():
        if name not in group.variants:
            continue
        values = [run[TOP1] for run in group.variants[name].metrics["by_seed"]]
        spread = statistics.stdev(values) if len(values) > 1 else None
        ours.plot([x] * len(values), values, ".", color=colour, alpha=0.5)
        ours.errorbar(x, statistics.mean(values), yerr=spread, fmt="o", color=colour, capsize=4)
        if group.throughput(name) is not None:
            speed.plot(x, group.throughput(name), "s", color=colour)
            devices.add(group.speeds[name].device)
    m = group.common
    title = f"ours: {m['model'].split('_patch')[0]} on {m['data']}, {m['epochs']} epochs"
    ours.set(title=title, ylabel="Top-1 (%): mean ± standard deviation, seeds")
    top = 1.15 * speed.dataLim.y1 if speed.has_data() else 1
    speed.set(title=f"ours, {'; '.join(sorted(devices))}", ylabel="images per second", ylim=(0, top))
    for panel in (paper, ours, speed):
        panel.set_xticks(range(len(ticks)), list(ticks.values()))
        panel.set(xlabel=axis, xlim=(-0.5, len(ticks) - 0.5))
        panel.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    figure.tight_layout()
    return save_png(figure, path)
