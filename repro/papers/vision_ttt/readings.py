"""The readings (interpretations) of the paper and the printed counts that each fits; docs/readings.md explains them."""

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

_FILE = Path(__file__).with_name("readings.yaml")
_LEDGER_FILE = Path(__file__).with_name("ledger.yaml")
_SIZES = {"t": "vittt_tiny_patch16_224", "s": "vittt_small_patch16_224", "b": "vittt_base_patch16_224"}
# switches, or values of them, that change variants only and leave Vittt itself the same model
_SAME_VITTT = {"conv1d_arrival", "dwconv_class_tokens", "positions=patches_and_class"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A choice that the paper leaves open; the head of readings.yaml describes the fields."""

    switch: str
    asks: str
    says: tuple[tuple[str, ...], ...]
    because: str
    refuted_by: str
    values: dict[str, str]

    @property
    def default(self) -> str:
        """Return the value that this project takes, as text."""
        return next(iter(self.values))

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Return the other values, each as the text of a reading, `switch=value`."""
        return tuple(f"{self.switch}={value}" for value in list(self.values)[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """The content of readings.yaml, whose hash is part of the record's identity."""

    choices: tuple[Choice, ...]


@functools.cache
def load_choices() -> tuple[Choice, ...]:
    """Read every choice, in the order of readings.yaml."""
    return build(_File, {"choices": load_yaml(_FILE, list)}, _FILE.name).choices


def list_alternatives() -> list[str]:
    """Return the text of each reading that differs from ours in one switch."""
    return [text for choice in load_choices() for text in choice.alternatives]


def pair_readings(texts: Iterable[str]) -> list[str]:
    """Combine the texts of readings into pairs of alternatives of two different switches."""
    pairs = itertools.combinations(texts, 2)
    return [f"{a},{b}" for a, b in pairs if a.partition("=")[0] != b.partition("=")[0]]


def list_trained() -> dict[str, str]:
    """Return name -> text of the readings that change Vittt itself and not only its variants, with `ours` first.

    The cells of their trainings are named by them, see `readings_page.find_trained`.
    """
    texts = [text for text in list_alternatives() if _SAME_VITTT.isdisjoint((text, text.partition("=")[0]))]
    return {"ours": ""} | {text.replace("=", "_"): text for text in texts}


def count_reading(reading: Any) -> dict[str, dict[str, float]]:
    """Count {params_m, macs_g} of the models of a `repro.models.reading.Reading`, each by the id of the ledger's entry.

    Parameters (1e6) are counted for the six designs of Table 3, for Vittt-S and Vittt-B, for the 3×3 convolution of
    each size, and for the saving by sharing Q and K. Multiply-adds (1e9, at 224×224) are counted for the designs, Vittt-S
    and Vittt-B. The models are built with our reading, and only their closed forms see another one, so a closed form
    must not count the parameters of modules that a reading changes.
    """
    params, macs, dwconv = {}, {}, {}
    for name, model in _build_models().items():
        read = copy.copy(model)  # the same weights; only `reading` differs
        read.reading = reading
        terms = read.param_terms()
        params[name], dwconv[name] = sum(terms.values()) / 1e6, terms["dwconv"] / 1e6
        macs[name] = sum(read.mac_terms((224, 224)).values()) / 1e9
    rows = {(f"table1.vittt_{name}" if name in _SIZES else f"table3.{name}"): name for name in macs}
    counted = {f"{row}.params_m": params[name] for row, name in rows.items()}
    counted |= {f"text.4_3.dwconv_params_{size}": dwconv["conv2d" if size == "t" else size] for size in "tsb"}
    counted["text.5_4.share_params_t"] = params["ttt_layer"] - params["share_qk"]
    return {"params_m": counted, "macs_g": {f"{row}.macs_g": macs[name] for row, name in rows.items()}}


def fit_readings(ledger: Ledger) -> dict[str, Any]:
    """Count the printed numbers that each reading fits, by rounding or by truncation.

    Returns:
        `readings`: text -> {params_m, params_fit, params_truncated, macs_g, macs_fit, macs_truncated, missed}: the
            counts of Vittt-T, how many entries of the ledger fit, how many of those by truncation alone, and the ids of
            the entries that do not fit. The text of our reading is empty.
        `pairs`: the same for pairs of those alternatives that change a count.
        `params_entries`, `macs_entries`: the numbers of entries.
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
    """Write results/readings/metrics.json (see `fit_readings`), and print how many readings fit."""
    started = time.monotonic()
    ledger = load_ledger(_LEDGER_FILE)
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
    """Return what `fit_readings` states of one reading."""
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
    """Build the six designs of Vittt-T by name, and Vittt-S and Vittt-B as `s` and `b`, on the meta device."""
    import torch

    from ...models.registry import build_model
    from ...models.ttt_mixer import DESIGNS

    with torch.device("meta"):
        designs = {name: build_model(_SIZES["t"], design=name) for name in DESIGNS}
        return designs | {size: build_model(_SIZES[size]) for size in "sb"}
