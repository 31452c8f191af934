"""The checkout with made-up records that the tests of the report use, and ledgers judged by counts alone."""

import re
from pathlib import Path

from repro.report.claims import Report
from repro.report.paper import Paper
from repro.report.results import Results
from tests.report.conftest import JUDGE, SCORES, Checkout, checkout, paper

__all__ = ["checkout", "find_statuses", "judge_counts", "paper"]

ROOT = Path(__file__).parents[2]


def judge_counts(checkout: Checkout, paper: Paper, rows: dict[str, dict]) -> Report:
    """A ledger judged by rows of `repro complexity` and this project's profile of the paper."""
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
