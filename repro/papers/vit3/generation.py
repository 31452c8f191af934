"""DiT³ on the embedded digits, beside DiT with and without its convolution: what was trained by hand, in numbers and
samples.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.statistics import Sample, describe_sample
from ...report.claims import Report
from ...report.document import Block, Bullets, Line, Picture, Piece, code, number, table
from ...report.gallery import describe_origin, find_pictures
from ...report.records import Source, describe_seeds
from ...report.results import Missing

LOSS, JUDGED, REAL = "held_out_mse", "judged_percent", "real_judged_percent"
HEADER = (
    "denoiser",
    "parameters",
    "seeds",
    "held-out MSE of the noise",
    "samples judged as asked",
    "real images",
    "measured on",
)
# what must agree before two losses are compared; the noise of a held-out image follows from its number alone
_ALIKE = ("data", "image_size", "split", "held_out_images", "epochs", "steps", "batch_size")


def list_denoisers(report: Report) -> list[Block]:
    """For each denoiser its held-out loss, its judged samples and their picture; and which losses differ."""
    groups = _find_groups(report)
    if not groups:
        raise Missing("no denoiser is trained yet", "repro generate --cell dit3_nano_digits --seeds 3")
    blocks: list[Block] = []
    for group in groups:
        m = group[0].metrics
        size, sampling = m["image_size"], m["by_seed"][0]["sampling"]
        about = (
            f"Trained on {m['data']} at {size}×{size} pixels, {m['steps']:,} steps of {m['batch_size']} images, {describe_seeds(group)}; "
            f"scored on the {m['held_out_images']} images of {m['split']}{_count_judged(group)}; samples by "
            f"{sampling['steps']} steps of {sampling['sampler'].upper()} with guidance {sampling['guidance']:g}."
        )
        blocks += [(about,), table(HEADER, [_row(source, report) for source in group])]
        if lines := [_compare(*pair, report) for pair in itertools.combinations(group, 2)]:
            blocks.append(Bullets(lines))
        blocks += _pictures(group, report)
    return blocks


def _find_groups(report: Report) -> list[list[Source]]:
    """The trained denoisers that can be compared, in order of their losses; of one model the record with the most
    seeds.
    """
    groups: dict[tuple, dict[str, Source]] = {}
    for source in report.results.sources:
        m = source.metrics
        if source.is_trained and LOSS in m:
            own = groups.setdefault((source.path.split("/")[2], *(m.get(key) for key in _ALIKE)), {})
            name = _name(source, report)
            if name not in own or len(m["by_seed"]) > len(own[name].metrics["by_seed"]):
                own[name] = source
    return [sorted(own.values(), key=lambda source: source.metrics[LOSS]) for own in groups.values()]


def _count_judged(group: Sequence[Source]) -> str:
    counts = {
        run["judged_samples"] for source in group for run in source.metrics["by_seed"] if run.get(JUDGED) is not None
    }
    return f", and by {' or '.join(map(str, sorted(counts)))} samples of each seed" if counts else ""


def _name(source: Source, report: Report) -> str:
    return report.results.model_key(source.metrics, source.path)


def _row(source: Source, report: Report) -> list[Piece | Line]:
    runs: Sequence[Mapping[str, Any]] = source.metrics["by_seed"]
    judged = [run[JUDGED] for run in runs if run.get(JUDGED) is not None]
    share = _format(describe_sample(judged, is_share=True), 1, " %") if judged else "–"
    real = number(f"{runs[0][REAL]:.1f} %") if judged else "–"  # the judge and the images are the same for all seeds
    loss = _format(describe_sample([run[LOSS] for run in runs]), 4)
    counts = number(f"{source.metrics['num_params']:,}"), number(len(runs))
    return [code(_name(source, report)), *counts, loss, share, real, describe_origin([source], report.named)]


def _format(sample: Sample, places: int, unit: str = "") -> Piece:
    """The mean and its interval."""
    low, high = sample.ci95 or (0.0, 0.0)
    spread = f" [{low:.{places}f}, {high:.{places}f}]" if sample.ci95 else ""
    return number(f"{sample.mean:.{places}f}{unit}{spread}")


def _compare(better: Source, worse: Source, report: Report) -> Line:
    """A sentence about two losses, seed by seed: both saw the same held-out images with the same noise."""
    ours, theirs = ({run["seed"]: run[LOSS] for run in source.metrics["by_seed"]} for source in (better, worse))
    shared = sorted(ours.keys() & theirs.keys())
    pair = code(_name(better, report)), " against ", code(_name(worse, report))
    if not shared:
        return *pair, ": no seed in common."
    sample = describe_sample([theirs[seed] - ours[seed] for seed in shared])
    if sample.ci95 is None:
        return (
            *pair,
            f": the loss is lower by {sample.mean:.4f}; one seed has no interval, and another may say otherwise.",
        )
    low, high = sample.ci95
    word = "the loss is lower by" if low > 0 else "the losses are not separated; they differ by"
    return *pair, f": {word} {sample.mean:.4f} [{low:.4f}, {high:.4f}] over {len(shared)} seeds."


def _pictures(group: Sequence[Source], report: Report) -> list[Block]:
    """Samples of the first seed of each denoiser, beside each other."""
    found = [
        (source, find_pictures(report.results, f"{source.folder.removeprefix('results/')}/examples/*.png"))
        for source in group
    ]
    shown = [(source, name) for source, names in found for name in names]
    if not shown:
        return []
    pictures = [(Picture(name, f"samples of {_name(source, report)}"),) for source, name in shown]
    return [table([_name(source, report) for source, _ in shown], [pictures])]
