"""The record of parameters and multiply-adds, written by `repro complexity`."""

import time
from collections.abc import Mapping
from typing import Any

from ..core.csvfile import write_csv
from ..core.errors import UserError, blame
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.ui import track
from .adapted import adapted_cost
from .flops import Cost, cost
from .params import ADAPTER, ComplexityParams, SizePair
from .speed import row_id

_SAVED_AT = 1280  # the image size of the paper's statement on savings (Fig. 1); `report.results` names its key
COLUMNS = ("row", "model", "image_size", "params_m", "macs_g", "method", "macs_g_paper_convention", "macs_g_fvcore")


def run_complexity(params: ComplexityParams, paths: Paths) -> None:
    """Write results/complexity/{metrics.json, rows.csv, terms.csv}.

    metrics.json has these keys:
        `rows`: row id -> {model, options, image_size, num_params, params_m (1e6), macs_g (1e9), method}. Some rows have
            further counts of the same forward pass: `macs_g_paper_convention` by the convention of the family's authors
            or, for a backbone with its adapter, of Table 2 (see `repro.bench.flops.Cost`). In groups with `fvcore` they
            also have `macs_g_fvcore`, the count of the tool fvcore without added handlers (see `repro.bench.fvcore`).
        `saved_at_1280_percent`: size -> share of multiply-adds that the model saves against its baseline.
        `dwconv_params_m`: size -> parameters (1e6) of the 3x3 depth-wise convolution.

    Raises:
        UserError: an unknown model or option, or an image size that a model refuses.
    """
    started = time.monotonic()
    wanted = {row_id(*row): row for row in params.rows()}
    print(f"complexity: counting {len(wanted)} rows")
    with_fvcore = {row_id(*row) for group in params.groups if group.fvcore for row in group.rows()}
    costs = {
        name: _count_row(*row, fvcore=name in with_fvcore)
        for name, row in track(list(wanted.items()), "counting", unit="rows")
    }
    saved, dwconv = _compare_pairs(params.sizes)

    folder = paths.results / "complexity"
    rows = {name: _make_row(*wanted[name], counted) for name, counted in costs.items()}
    table = [{**row, "row": name, "image_size": name.rpartition("@")[2]} for name, row in rows.items()]
    write_csv(folder / "rows.csv", table, COLUMNS)
    terms = [line for name, counted in costs.items() for line in _list_terms(name, counted)]
    write_csv(folder / "terms.csv", terms)
    metrics = {"rows": rows, f"saved_at_{_SAVED_AT}_percent": saved, "dwconv_params_m": dwconv}
    counted_only = "none: counted, not run"
    identity = make_identity(paths.root, params, device=counted_only, dtype="fp32", backend=counted_only)
    write_record(folder / "metrics.json", metrics, identity, time.monotonic() - started)
    savings = ", ".join(f"{size} {value:.1f} %" for size, value in saved.items())
    print(f"complexity: {len(rows)} rows; multiply-adds saved at {_SAVED_AT}: {savings}")


def _count_row(model: str, options: Mapping[str, Any], image_size: tuple[int, int], *, fvcore: bool = False) -> Cost:
    """Count a row of `ComplexityParams.rows`, by fvcore too if asked; a UserError names one that cannot be counted."""
    with blame(f"complexity: {row_id(model, options, image_size)}", TypeError, ValueError, AssertionError):
        if model == ADAPTER:
            if fvcore:
                raise ValueError("has no count by fvcore; leave `fvcore` out of this group")
            return adapted_cost(options["backbone"], image_size)
        return cost(model, options, image_size, fvcore=fvcore)


def _compare_pairs(sizes: Mapping[str, SizePair]) -> tuple[dict[str, float], dict[str, float]]:
    """Return size -> multiply-adds saved in percent, and size -> parameters (1e6) of the depth-wise convolution."""
    saved, dwconv = {}, {}
    for size, pair in sizes.items():
        ours, baseline = (_count_row(model, {}, (_SAVED_AT, _SAVED_AT)) for model in (pair.model, pair.baseline))
        if "dwconv" not in ours.param_terms:
            raise UserError(f"complexity.sizes.{size}.model: {pair.model} has no depth-wise convolution")
        saved[size] = 100 * (1 - ours.macs / baseline.macs)
        dwconv[size] = ours.param_terms["dwconv"] / 1e6
    return saved, dwconv


def _make_row(model: str, options: Mapping[str, Any], image_size: tuple[int, int], counted: Cost) -> dict[str, Any]:
    """Return a value of `rows` in metrics.json, see `run_complexity`."""
    row = {"model": model, "options": dict(options), "image_size": list(image_size), "num_params": counted.num_params}
    row |= {"params_m": round(counted.num_params / 1e6, 3), "macs_g": counted.macs_g, "method": counted.method}
    if counted.paper_terms:
        row["macs_g_paper_convention"] = counted.macs_g_paper_convention
    if counted.fvcore_terms:
        row["macs_g_fvcore"] = sum(counted.fvcore_terms.values()) / 1e9
    return row


def _list_terms(name: str, counted: Cost) -> list[dict[str, Any]]:
    """Return the lines of terms.csv of a row: each term of each of its sums that is not 0."""
    kinds = {"num_params": counted.param_terms, "macs": counted.mac_terms}
    kinds |= {"macs_paper_convention": counted.paper_terms, "macs_fvcore": counted.fvcore_terms}
    return [
        {"row": name, "kind": kind, "term": term, "value": value}
        for kind, terms in kinds.items()
        for term, value in terms.items()
        if value
    ]
