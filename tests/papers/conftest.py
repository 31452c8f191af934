"""The checkout with made-up records that the tests of the report use, and ledgers judged by counts alone."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro.bench.flops import cost
from repro.core.config import build, load_yaml
from repro.core.paths import Paths
from repro.report.claims import Report
from repro.report.paper import Paper
from repro.report.results import Results
from repro.tasks.classification.params import ClassifierParams
from stages import load_stages
from tests.conftest import ROOT
from tests.report.conftest import JUDGE, SCORES, Checkout, checkout, paper

__all__ = ["checkout", "count_model", "find_keys", "find_statuses", "judge", "judge_counts", "paper", "read_key"]

TABLE = load_stages()


def judge(checkout: Checkout, paper: Paper) -> Report:
    """What the records of a checkout say of a paper that is not the first."""
    return JUDGE(paper, Results(checkout.paths, [checkout.paper, paper], SCORES))


@functools.cache
def _load_digits() -> dict[str, Any]:
    return load_yaml(ROOT / "profiles" / "digits.yaml")


def load_variants(paper: Paper, cells: str) -> dict[str, ClassifierParams]:
    """Variant -> its cell of profiles/digits.yaml, of the suite with these `cells`."""
    (suite,) = [each for each in paper.suites if cells in each.cells]
    found = {}
    for place, variant in suite.list_places(paper.variants).items():
        section, _, name = place.partition("/")
        found[variant] = build(TABLE[section].params, _load_digits()[section][name], f"{section}.{name}")
    return found


def find_keys(paper: Paper) -> Iterator[str]:
    """What the ledger asks `repro complexity` for: `model[option=value]@side`."""
    traced = (each for entry in paper.ledger.entries.values() for each in paper.ledger.trace(entry) if each.ours)
    asked = {str(call.args[0]) for each in traced for call in each.ours.calls if call.args}
    return (key for key in sorted(asked) if "@" in key)


def read_key(key: str) -> tuple[str, dict[str, Any], int]:
    """The model, its options and the side of an image, 224 where the key says none."""
    name, listed, side = re.fullmatch(r"(\w+)(?:\[(.*)\])?(?:@(\d+))?", key).groups()
    pairs = (pair.split("=") for pair in listed.split(",")) if listed else ()
    options = {option: json.loads(value) if re.fullmatch(r"[\d.]+", value) else value for option, value in pairs}
    return name, options, int(side or 224)


@functools.cache
def count_model(key: str) -> dict[str, Any]:
    """The row of `repro complexity` of a model of this project."""
    name, options, side = read_key(key)
    counted = cost(name, options, (side, side), fvcore=True)
    row = {"model": name, "options": options, "image_size": [side, side], "method": "analytic"}
    counts = {
        "num_params": counted.num_params,
        "macs_g": counted.macs_g,
        "macs_g_fvcore": sum(counted.fvcore_terms.values()) / 1e9,
    }
    return row | counts


def judge_counts(root: Path, paper: Paper, rows: dict[str, dict]) -> Report:
    """A ledger judged by rows of `repro complexity`, in an empty folder, and this project's profile of the paper."""
    checkout = Checkout(Paths(root), paper)
    checkout.record("complexity", {"rows": rows, "saved_at_1280_percent": {}, "dwconv_params_m": {}})
    checkout.write("profiles/paper.yaml", (ROOT / "profiles" / "paper.yaml").read_text(encoding="utf-8"))
    return JUDGE(paper, Results(checkout.paths, [paper], SCORES))


def find_statuses(report: Report, *patterns: str) -> dict[str, list[str]]:
    """Status -> the ids of the entries with it that one of the patterns matches."""
    found: dict[str, list[str]] = {}
    for name, verdict in report.verdicts.items():
        if any(re.fullmatch(pattern, name) for pattern in patterns):
            found.setdefault(verdict.status, []).append(name)
    return found


def count_statuses(report: Report, *patterns: str) -> dict[str, int]:
    """Status -> how many entries with it match one of the patterns."""
    return {status: len(names) for status, names in find_statuses(report, *patterns).items()}
