"""`repro complexity`: parameters and multiply-adds of the models of Table 1 to 4 (of Table 2 with adapters) and of Fig. 1 and 6."""

import csv
import dataclasses
import functools
import io
import itertools
import sys
import time
from collections.abc import Iterator

from repro.core.config import bounded, load_section
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, write_record, write_text

from . import Stage

SAVED_AT = 1280  # the side at which the paper states what Vittt saves (Fig. 1)
ADAPTER = "vit_adapter"  # the model of an adapter's rows, whose option `backbone` is what it is around


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows to count: every model at every resolution with every combination of the varied options.

    Args:
        models: registered names.
        resolutions: sides of the square image in pixels.
        vary: option name -> values, e.g. design, pool, chunk_size, w0.
    """

    models: tuple[str, ...]
    resolutions: tuple[int, ...] = bounded(ge=1)
    vary: dict[str, tuple[str | int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizePair:
    """A size of Vittt and the baseline that it is compared with."""

    vittt: str
    baseline: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSize:
    """An image in pixels, both sides multiples of 32."""

    height: int = bounded(ge=32)
    width: int = bounded(ge=32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterRows:
    """Rows of Table 2: every backbone with its ViT-Adapter, without neck and head, on images of every size."""

    backbones: tuple[str, ...] = ()
    images: tuple[ImageSize, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, tuple[int, int]]]:
        return ((name, (image.height, image.width)) for name, image in itertools.product(self.backbones, self.images))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComplexityParams:
    """The `complexity:` section.

    Args:
        sizes: letter of a size (T, S, B) -> the two models whose multiply-adds are compared at 1280 x 1280 (SAVED_AT).
        groups: the rows.
        adapters: the rows with an adapter.
    """

    sizes: dict[str, SizePair]
    groups: tuple[RowGroup, ...]
    adapters: AdapterRows = AdapterRows()


STAGE = Stage(params=ComplexityParams)


def command() -> None:
    """Count parameters and multiply-adds; nothing runs on data."""
    paths = find_root()
    run(load_section(ComplexityParams, paths.params, "complexity"), paths)


def run(params: ComplexityParams, paths: Paths) -> None:
    """Write results/complexity/{metrics.json, rows.csv, terms.csv}.

    metrics: `rows` {row id: {model, options, resolution, params, params_m, macs_g, method}}, with an adapter also
    `macs_g_paper_convention`, see `repro.measure.adapted`; `saved_at_1280_percent`, the MACs that Vittt saves against its baseline
    by size; `dwconv_params_m`, what the 3x3 depth-wise convolution adds by size.

    Raises:
        UserError: an unknown model or option, or a resolution that a model refuses.
    """
    from repro.measure.adapted import AdaptedCost, adapted_cost
    from repro.measure.flops import cost, saved_percent
    from repro.measure.speed import row_id

    started = time.monotonic()

    @functools.cache
    def count(model: str, options: tuple[tuple[str, str | int], ...], resolution: tuple[int, int]):
        try:
            if model == ADAPTER:
                return adapted_cost(dict(options)["backbone"], resolution)
            return cost(model, dict(options), resolution)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"complexity: {row_id(model, dict(options), resolution)}: {error}") from None

    rows, terms = {}, []
    for model, options, resolution in _progress(list(wanted(params))):
        result = count(model, options, resolution)
        name = row_id(model, dict(options), resolution)
        rows[name] = {
            "model": model,
            "options": dict(options),
            "resolution": list(resolution),
            "params": result.num_params,
            "params_m": round(result.num_params / 1e6, 3),
            "macs_g": result.macs_g,
            "method": result.method,
        }
        kinds = {"params": result.param_terms, "macs": result.mac_terms}
        if isinstance(result, AdaptedCost):
            rows[name]["macs_g_paper_convention"] = result.macs_g_paper_convention
            kinds["macs_paper_convention"] = result.paper_terms
        terms.extend([name, kind, term, value] for kind, parts in kinds.items() for term, value in parts.items() if value)
    saved, dwconv = {}, {}
    for size, pair in params.sizes.items():
        ours, baseline = (count(model, (), (SAVED_AT, SAVED_AT)) for model in (pair.vittt, pair.baseline))
        if "dwconv" not in ours.param_terms:
            raise UserError(f"complexity.sizes.{size}.vittt: {pair.vittt} is not a Vittt")
        saved[size] = saved_percent(ours.macs, baseline.macs)
        dwconv[size] = ours.param_terms["dwconv"] / 1e6

    folder = paths.results / "complexity"
    columns = ["row", "model", "resolution", "params_m", "macs_g", "method", "macs_g_paper_convention"]
    table = [{**r, "row": name, "resolution": name.rpartition("@")[2]} for name, r in rows.items()]
    write_text(folder / "rows.csv", _csv([columns, *([r.get(column) for column in columns] for r in table)]))
    write_text(folder / "terms.csv", _csv([["row", "kind", "term", "value"], *terms]))
    metrics = {"rows": rows, f"saved_at_{SAVED_AT}_percent": saved, "dwconv_params_m": dwconv}
    identity = make_identity(
        paths.root, ["stages.complexity"], params, device="none: counted, not run", dtype="fp32", backend="none: counted, not run"
    )
    write_record(folder, metrics, identity, time.monotonic() - started)
    savings = ", ".join(f"{size} {value:.1f} %" for size, value in saved.items())
    print(f"complexity: {len(rows)} rows; MACs saved at {SAVED_AT}: {savings}")


def wanted(params: ComplexityParams) -> Iterator[tuple[str, tuple[tuple[str, str | int], ...], tuple[int, int]]]:
    """Model, options and (H, W) of every row."""
    for group in params.groups:
        for model, side, *values in itertools.product(group.models, group.resolutions, *group.vary.values()):
            yield model, tuple(zip(group.vary, values, strict=True)), (side, side)
    for backbone, resolution in params.adapters:
        yield ADAPTER, (("backbone", backbone),), resolution


def _progress(rows: list):
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        return track(rows, "counting", console=Console(stderr=True))
    print(f"complexity: counting {len(rows)} rows")
    return rows


def _csv(rows: list[list]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()
