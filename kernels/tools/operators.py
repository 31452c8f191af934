"""The operators that the tools and the tests know, each by its `cases.Cases`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from . import around_cases, bi_wkv_cases, ms_deform_attn_cases, selective_scan_cases, ttt_linear_cases
from .cases import Cases
from .resources import source_hash

_ALL = ttt_linear_cases, selective_scan_cases, bi_wkv_cases, ms_deform_attn_cases
OPERATORS: dict[str, Cases] = {cases.NAME: cases for cases in (*(module.CASES for module in _ALL), *around_cases.CASES)}
INTERPRETED = ttt_linear_cases.triton_fwd.INTERPRETED  # whether Triton runs all kernels in its interpreter


def merge_rows(
    before: Mapping[str, Any], chosen: Collection[Cases], rows: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The rows of a record, operator by operator, and the `source_hash` of each: of the `chosen` ones as now, of the
    others as before.

    Args:
        before: the record until now, {rows, source_hash}; empty if there is no record.
        chosen: the cases of the operators that `rows` are about.
        rows: their rows, each with its `operator`.
    """
    names = {cases.NAME for cases in chosen}
    hashes = {name: value for name, value in before.get("source_hash", {}).items() if name not in names}
    kept = [row for row in before.get("rows", []) if row["operator"] in hashes]
    order = list(OPERATORS)
    hashes |= {cases.NAME: source_hash(cases) for cases in chosen}
    return {"rows": sorted([*kept, *rows], key=lambda row: order.index(row["operator"])), "source_hash": hashes}
