"""The readings of the paper: what each alternative does to the printed counts; docs/readings.md explains them."""

import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...core.config import build, load_yaml
from ...core.paths import Paths
from ...core.record import make_identity, write_record
from ...report.arithmetic import agreement
from ...report.ledger import Ledger, load_ledger

FILE = Path(__file__).with_name("readings.yaml")
LEDGER_FILE = Path(__file__).with_name("ledger.yaml")
_DESIGNS = ("ttt_layer", "share_qk", "gating", "conv1d", "dual", "conv2d")
_SIZES = {"t": "vittt_tiny_patch16_224", "s": "vittt_small_patch16_224", "b": "vittt_base_patch16_224"}


# switches, or values of them, by which Vittt itself stays the same model
_SAME_VITTT = {"conv1d_arrival", "dwconv_class_tokens", "positions=patches_and_class"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice, as readings.yaml explains it; the head of that file describes the keys."""

    switch: str
    asks: str
    says: tuple[tuple[str, ...], ...]
    because: str
    refuted_by: str
    values: dict[str, str]

    @property
    def default(self) -> str:
        """The value that was taken, as text."""
        return next(iter(self.values))

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The other values, each as the text of a reading."""
        return tuple(f"{self.switch}={value}" for value in list(self.values)[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    choices: tuple[Choice, ...]


@functools.cache
def load_choices() -> tuple[Choice, ...]:
    """Every choice, in the order of readings.yaml."""
    return build(_File, {"choices": load_yaml(FILE, list)}, FILE.name).choices


def list_alternatives() -> list[str]:
    """The text of each reading that differs from ours in one switch."""
    return [text for choice in load_choices() for text in choice.alternatives]


def pair_readings(texts: Iterable[str]) -> list[str]:
    """The texts of readings that take two of some alternatives, of two switches."""
    pairs = itertools.combinations(texts, 2)
    return [f"{a},{b}" for a, b in pairs if a.partition("=")[0] != b.partition("=")[0]]


def list_trained() -> dict[str, str]:
    """Name -> text of the readings, `ours` first, that make Vittt itself, and not its variants alone, another model."""
    texts = [
        text for text in list_alternatives() if text not in _SAME_VITTT and text.partition("=")[0] not in _SAME_VITTT
    ]
    return {"ours": ""} | {text.replace("=", "_"): text for text in texts}


def count_reading(reading: Any) -> dict[str, dict[str, float]]:
    """The {params_m, macs_g} of the models of a `repro.models.reading.Reading`, each by the id of the ledger's entry.

    The parameters are those of Table 3's six designs, of Vittt-S and Vittt-B, of the 3×3 convolution of each size, and
    those that sharing Q and K saves; the multiply-adds are those of the designs and of Vittt-S and Vittt-B at 224×224.
    """
    params, macs, dwconv = {}, {}, {}
    for name, model in _build_models().items():
        read = copy.copy(model)
        read.reading = reading
        terms = read.param_terms()
        params[name], dwconv[name] = sum(terms.values()) / 1e6, terms["dwconv"] / 1e6
        macs[name] = sum(read.mac_terms((224, 224)).values()) / 1e9
    rows = {f"table3.{name}": name for name in _DESIGNS} | {f"table1.vittt_{size}": size for size in "sb"}
    counted = {f"{row}.params_m": params[name] for row, name in rows.items()}
    counted |= {f"text.4_3.dwconv_params_{size}": dwconv["conv2d" if size == "t" else size] for size in "tsb"}
    counted["text.5_4.share_params_t"] = params["ttt_layer"] - params["share_qk"]
    return {"params_m": counted, "macs_g": {f"{row}.macs_g": macs[name] for row, name in rows.items()}}


def fit_readings(ledger: Ledger) -> dict[str, Any]:
    """How many of the printed counts each reading fits, by rounding or by truncation.

    Returns:
        {readings: {text: {params_m, params_fit, params_truncated, macs_g, macs_fit, macs_truncated, missed}}, pairs:
        the same for the pairs of those alternatives that change a count, params_entries, macs_entries}: numbers of
        Vittt-T, how many entries fit, how many of those by truncation alone, and the ids of those that do not. The text
        of our reading is empty.
    """
    from ...models.reading import Reading

    alternatives = list_alternatives()
    found = {text: _fit(Reading.of(text), ledger) for text in ("", *alternatives)}
    ours = count_reading(Reading())
    changing = [text for text in alternatives if count_reading(Reading.of(text)) != ours]
    pairs = {text: _fit(Reading.of(text), ledger) for text in pair_readings(changing)}
    counted = {f"{kind.partition('_')[0]}_entries": len(counts) for kind, counts in ours.items()}
    return {"readings": found, "pairs": pairs, **counted}


def record_fits(paths: Paths) -> None:
    """Write results/readings/metrics.json, see `fit_readings`, and print how many readings fit."""
    started = time.monotonic()
    ledger = load_ledger(LEDGER_FILE)
    found = fit_readings(ledger)
    counted_only = "none: counted, not run"
    choices = _File(choices=load_choices())
    identity = make_identity(paths.root, choices, device=counted_only, dtype="fp32", backend=counted_only)
    write_record(paths.results / "readings" / "metrics.json", found, identity, time.monotonic() - started)
    entries, rows = found["params_entries"], found["readings"].values()
    fitting = sum(row["params_fit"] == entries for row in rows)
    print(
        f"readings: {fitting} of {len(rows)} fit all {entries} printed counts of parameters; `repro report` writes docs/readings.md"
    )


def _fit(reading: Any, ledger: Ledger) -> dict[str, Any]:
    found: dict[str, Any] = {"missed": []}
    for kind, counts in count_reading(reading).items():
        how = {name: agreement(value, ledger.entries[name].printed or "") for name, value in counts.items()}
        stem = kind.partition("_")[0]
        found[kind] = counts[f"table3.conv2d.{kind}"]
        found[f"{stem}_fit"] = sum(each is not None for each in how.values())
        found[f"{stem}_truncated"] = sum(each == "truncation" for each in how.values())
        found["missed"] += [name for name, each in how.items() if each is None]
    return found


@functools.cache
def _build_models() -> dict[str, Any]:
    """The six designs of Vittt-T, by name, and Vittt-S and Vittt-B as `s` and `b`, without memory for their weights."""
    import torch

    from ...models.registry import build_model

    with torch.device("meta"):
        designs = {name: build_model(_SIZES["t"], design=name) for name in _DESIGNS}
        return designs | {size: build_model(_SIZES[size]) for size in "sb"}
