"""The paper's figures in its order, each with our pictures of it or the command that draws them; and example pictures."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from .ablations import drawn_from
from .claims import STATUSES, Verdict, runnable, status_counts
from .sources import Results, Source
from .wording import grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper.

    Args:
        place: e.g. `Fig. 7a`.
        shows: what the paper shows there.
        files: pattern of our pictures, relative to results/; None for a diagram of the method, which no measurement draws.
        command: what makes them.
        shared_with: the figure whose pictures show this one too.
    """

    place: str
    shows: str
    files: str | None = None
    command: str = ""
    shared_with: str | None = None


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
        shows="the same for images of more classes, the top 30 % of the tokens marked",
    ),
    Figure(
        place="Fig. 11",
        files="visualize/fig11_*.png",
        command="repro visualize",
        shows="the inner reconstruction loss of every token in each of 12 layers at epochs 0, 3 and 300, mean of 128 images",
    ),
)
# what a trained model sees; the paper prints no such picture
EXAMPLES = {"boxes and masks": "detect/*/examples/*.png", "label maps": "segment/*/examples/*.png"}


def figures_md(verdicts: Mapping[str, Verdict], results: Results, profile: str) -> str:
    """The section `Figures` of tables.md; links are relative to results/.

    Args:
        verdicts: for what the ledger says of a figure.
        results: the records beside the pictures.
        profile: what params.yaml holds, in words.
    """
    parts = ["## Figures\n\nThe paper's figures in its order, and ours, with the device and the record that each picture is drawn from."]
    parts += [_figure(figure, verdicts, results, profile) for figure in FIGURES]
    return "\n\n".join(parts)


def examples_md(results: Results, profile: str) -> str:
    """The section of what the trained detectors and segmenters see, a row of pictures for each run."""
    title = "## Example pictures\n\nHeld-out images with what trained models see in them. The paper prints none."
    parts = []
    for what, pattern in EXAMPLES.items():
        runs: dict[str, list[str]] = {}
        for name in [*pictures(results, pattern), *pictures(results, f"measured/*/{pattern}")]:
            runs.setdefault(name.rpartition("/examples/")[0], []).append(name)
        for run, names in runs.items():
            images = [f"![{what}, {Path(name).stem}, {run}]({quote(name)})" for name in names]
            parts.append(f"`{run}`, {what}: {_origin(names[0], results, profile)}\n\n" + grid([""] * len(images), [images]))
    return "\n\n".join([title, *(parts or ["None yet: `repro detect`, `repro segment`."])])


def pictures(results: Results, pattern: str) -> list[str]:
    """The files of a pattern, sorted, as paths relative to results/."""
    root = results.paths.results
    return sorted(file.relative_to(root).as_posix() for file in root.glob(pattern))


def _figure(figure: Figure, verdicts: Mapping[str, Verdict], results: Results, profile: str) -> str:
    files = pictures(results, figure.files) if figure.files else []
    shared = next((other for other in FIGURES if other.place == figure.shared_with and pictures(results, other.files)), None)
    if figure.files is None:
        state = "A diagram of the method: nothing to measure."
    elif files or not shared:
        state = f"Ours, {_counted(len(files))}." if files else f"Not drawn yet: `{runnable(figure.command)}`."
    else:
        state = f"The pictures of {shared.place} show it too."
    about = status_counts({name: v for name, v in verdicts.items() if re.search(rf"{re.escape(figure.place)}(?!\w)", v.entry.place)})
    said = ", ".join(f"{about[status]} {status}" for status in STATUSES if about[status])
    lines = [f"### {figure.place}", f"The paper shows: {figure.shows}.", f"{state} The ledger's entries on it: {said or 'none'}."]
    for name in files:
        origin = _origin(name, results, profile)
        lines.append(f"![{figure.place}, ours: {Path(name).stem}]({quote(name)})\n\n`{name}`: {origin}")
    return "\n\n".join(lines)


def _counted(number: int) -> str:
    return "one picture" if number == 1 else f"{number} pictures"


def _origin(name: str, results: Results, profile: str) -> str:
    """Device and profile of the records that a picture is drawn from."""
    sources = _records(name, results)
    how = "run by hand" if all(source.path.startswith("results/measured/") for source in sources) else profile
    devices = ", ".join(dict.fromkeys(source.device for source in sources))
    return f"{devices}; {how}" if sources else "no record beside it"


def _records(name: str, results: Results) -> list[Source]:
    if name.startswith("figures/"):  # drawn by the report itself
        return drawn_from(results).get(Path(name).name, [])
    beside = {f"results/{folder}{end}" for folder in Path(name).parents for end in ("/metrics.json", ".json")}
    return [source for source in results.sources if source.path in beside]
