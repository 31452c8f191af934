"""The page of choices that the paper leaves open: the value taken, the reason, and the effect of the alternatives.

readings.md calls most public functions by name.
"""

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.config import build, load_yaml
from ...report.claims import Report
from ...report.markdown import bullets, code, join, number, strong, table
from ...report.measured import format_scores
from ...report.ordering import TOP1, Pair, compare_trainings, describe_power, sampling_noise
from ...report.records import Source, describe_seeds
from ...report.results import Missing
from .readings import Choice, list_trained, load_choices

_FIXED_FILE = Path(__file__).with_name("fixed_choices.yaml")
# the choices whose value was chosen to fit the paper's printed parameters; their `because` says so
BY_COUNTS = ("conv1d_arrival", "dwconv_bias", "learning_rate", "swiglu_bias")
_Trained = Mapping[str, Source]  # text of a reading -> the record of its training


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedChoice:
    """A choice without a switch; the head of fixed_choices.yaml describes the fields."""

    asks: str
    says: tuple[tuple[str, ...], ...]
    takes: str
    because: str
    instead: str
    means: str
    refuted_by: str


@functools.cache
def load_fixed_choices() -> tuple[FixedChoice, ...]:
    """Read every choice without a switch, in the order of fixed_choices.yaml."""
    listed = enumerate(load_yaml(_FIXED_FILE, list))
    return tuple(build(FixedChoice, each, f"{_FIXED_FILE.name}.choices[{place}]") for place, each in listed)


def describe_choices(report: Report) -> str:
    """Write each choice under a heading, those with a switch first: the paper's words, our value, the reason, and the
    alternatives.
    """
    blocks: list[str] = []
    for choice in load_choices():
        others = zip(choice.alternatives, list(choice.values)[1:], strict=True)
        shown = "; ".join(f"`{text}`, {choice.values[value]}" for text, value in others)
        blocks += _describe_choice(choice, choice.values[choice.default], f"{shown}.")
    for fixed in load_fixed_choices():
        same = f"no switch; `{fixed.instead}` comes to {fixed.means}."
        blocks += _describe_choice(fixed, fixed.takes, same if fixed.instead else "no switch.")
    return join(blocks)


def _describe_choice(choice: Choice | FixedChoice, taken: str, instead: str) -> list[str]:
    """Return the blocks of one choice; `taken` and `instead` are its value and its alternatives in words."""
    return [
        f"### {choice.asks}",
        bullets(f"{strong(place)}: {text}." for place, text in choice.says) or "The paper says nothing.",
        f"**We take** {taken}. {choice.because}",
        f"**Instead**: {instead}",
        f"**Refuted by** {choice.refuted_by}.",
    ]


def describe_fitted(report: Report) -> str:
    """Write in a clause how much of the model was chosen to fit the printed parameters; a `but` of paper.yaml."""
    return f"{len(BY_COUNTS)} of {len(load_choices())} documented readings, and the MLP's width, were chosen by these counts"


def list_readings(report: Report) -> str:
    """Tabulate each value of each choice: its counts, and its accuracy if it was trained."""
    fits, trained = _find_fits(report), find_trained(report)
    pairs = _compare_trained(trained)
    header = ["reading", "", "parameters of Vittt-T (M)", "printed counts that fit", "multiply-adds (G)", "that fit"]
    header += ["Top-1 (%)", "against ours (points)"] if trained else []
    rows = []
    for choice in load_choices():
        for value, says in choice.values.items():
            text = "" if value == choice.default else f"{choice.switch}={value}"
            found = fits["readings"][text]
            row = [f"`{choice.switch}={value}`{'' if text else ' (ours)'}", says]
            for count, kind in (("params_m", "params"), ("macs_g", "macs")):
                row.append(number(found[count], ".4f"))
                row.append(number(found[f"{kind}_fit"], "", f" of {fits[f'{kind}_entries']}"))
            if trained:
                source, pair = trained.get(text), pairs.get(text)
                row.append(number(format_scores(source.metrics, {TOP1: ""}, 1) if source else None))
                row.append(number(f"{pair.show(1)}, p {pair.p:.2f}" if pair else None))
            rows.append(row)
    return table(header, rows)


def count_fits(report: Report, what: str) -> int:
    """Return a count of the fits, or a field of our own reading's fit.

    `alternatives` counts all alternatives; `as_many` and `fewer` count those that fit at least as many printed
    parameters as our reading, or fewer. `best` is the largest number of fitting multiply-adds of any reading or pair.
    `params_entries` and `macs_entries` are the numbers of printed counts.
    """
    fits = _find_fits(report)
    ours = fits["readings"][""]
    alternatives = [row for text, row in fits["readings"].items() if text]
    as_many = sum(row["params_fit"] >= ours["params_fit"] for row in alternatives)
    found = {
        "alternatives": len(alternatives),
        "as_many": as_many,
        "fewer": len(alternatives) - as_many,
        "best": max(row["macs_fit"] for row in (*fits["readings"].values(), *fits["pairs"].values())),
        "params_entries": fits["params_entries"],
        "macs_entries": fits["macs_entries"],
    }
    return (ours | found)[what]


def name_rounded(report: Report) -> str:
    """List the readings with which all printed parameters fit by rounding alone."""
    fits = _find_fits(report)
    rows, exact = {**fits["readings"], **fits["pairs"]}, (fits["params_entries"], 0)
    texts = [text for text, row in rows.items() if text and (row["params_fit"], row["params_truncated"]) == exact]
    return "; ".join(map(code, texts)) or "none"


def describe_trained(report: Report) -> str:
    """Write what was trained, which alternatives differ from ours, and how large a spread chance alone would give.

    Raises:
        Missing: no two readings are trained over two seeds.
    """
    trained = find_trained(report)
    pairs = _compare_trained(trained)
    if not pairs:
        raise Missing("no two readings are trained with two seeds yet", "repro profile use digits && dvc repro ablate")
    ours = trained[""]
    m, images = ours.metrics, ours.metrics["held_out_images"]
    about = (
        f"{m['model']} on {m['data']}, {m['epochs']} epochs, {len(m['by_seed'])} seeds, {images} held-out images, "
        f"{len(pairs)} alternatives, {ours.device}."
    )
    separated = [f"`{text}` ({pair.difference:+.1f} points)" for text, pair in pairs.items() if pair.side]
    verdict = strong(describe_power(list(pairs.values()), f"{describe_seeds([ours])} and {images} images"))
    if separated:
        counted = f"**{len(separated)} of {len(pairs)} alternatives differ significantly from ours:**"
        verdict = f"{counted} {'; '.join(separated)}."
    means = [source.metrics[TOP1] for source in trained.values()]
    noise, spread = sampling_noise(statistics.fmean(means), images), max(means) - min(means)
    said = f"The means are within {spread:.1f} points; chance alone makes {noise:.1f} on {images} images"
    said += ", so this task cannot tell them apart." if spread < noise else "."
    return join([about, verdict, said])


def _find_fits(report: Report) -> Mapping[str, Any]:
    """Return the metrics of the stage `readings`, see `readings.fit_readings`."""
    asked = "nothing is counted yet", "dvc repro readings"
    return report.results.require(lambda source: source.stage == "readings", *asked)[0].metrics


def find_trained(report: Report) -> _Trained:
    """Return text of a reading -> record of the cell `reading_<name>_digits_3s`, if its recipe is that of our reading.

    The result is empty if our reading has no record. Of two records of a cell, the pipeline's counts.
    """
    found = {source.place: source for source in reversed(report.results.sources)}
    cells = {text: f"ablate/reading_{name.replace('.', '_')}_digits_3s" for name, text in list_trained().items()}
    trained = {text: found[place] for text, place in cells.items() if place in found}
    recipe = trained[""].metrics["recipe_hash"] if "" in trained else None
    return {text: source for text, source in trained.items() if source.metrics["recipe_hash"] == recipe}


def _compare_trained(trained: _Trained) -> dict[str, Pair]:
    """Return text of a reading -> its difference to ours over their common seeds; empty without two seeds."""
    others = [(text, "") for text in trained if text]
    found = compare_trainings(trained, others) if others else ()
    return {pair.better: pair for pair in found if pair.interval}
