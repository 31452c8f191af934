"""Stage prepare_data: check a data set, or write an embedded one, and record it as a manifest that later stages depend on."""

import dataclasses
import time
from typing import Annotated, Literal

import typer

from repro.core.config import load_section, section_keys
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, write_record
from repro.core.runtime import Runtime, load_runtime
from repro.data.settings import ConnectSettings, DigitsSettings, ExpectedCounts, ScenesSettings

from . import Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareData:
    """One cell of the `prepare_data` section. The root is `runtime.data_roots.<kind>`.

    Args:
        kind: `digits`, `scenes` and `connect` are written by this stage, the others must be there.
        expected: what the data set must hold.
        generate: how `digits` is written; only there.
        draw: how `scenes` is written; only there.
        curves: how `connect` is written; only there.
    """

    kind: Literal["digits", "imagenet", "scenes", "coco", "ade20k", "connect"]
    expected: ExpectedCounts
    generate: DigitsSettings | None = None
    draw: ScenesSettings | None = None
    curves: ConnectSettings | None = None

    def __post_init__(self) -> None:
        for key, kind in (("generate", "digits"), ("draw", "scenes"), ("curves", "connect")):
            if (self.kind == kind) != (getattr(self, key) is not None):
                raise ValueError(f"{key}: needed for kind {kind}, and for no other")

    @property
    def embedded(self) -> bool:
        """Whether this stage writes the data set."""
        return self.kind in ("digits", "scenes", "connect")


STAGE = Stage(params=PrepareData, cells=True, cost="repro.planning.costs:charge_data")


def command(
    cell: Annotated[str | None, typer.Option(help="One cell of the `prepare_data:` section; all of them without it.")] = None,
) -> None:
    """Check a data set, or write an embedded one, and record its manifest."""
    paths = find_root()
    runtime = load_runtime(paths)
    for name in [cell] if cell else section_keys(paths.params, "prepare_data"):
        run(load_section(PrepareData, paths.params, "prepare_data", name), paths, runtime, name)


def run(params: PrepareData, paths: Paths, runtime: Runtime, cell: str) -> None:
    """Write `manifest.json`, `metrics.json` and `run.json` into `results/prepare_data/<cell>`.

    Raises:
        UserError: the data set is missing, badly laid out or not what `expected` says.
    """
    from repro.data.connect import write_connect
    from repro.data.dense import build_dense_manifest
    from repro.data.digits import write_digits
    from repro.data.manifest import build_manifest, check_expected, write_manifest
    from repro.data.scenes import write_scenes
    from repro.data.tree import scan_tree

    started = time.monotonic()
    root = runtime.data_root(paths, params.kind)
    if params.generate is not None:
        write_digits(root, params.generate)
    if params.draw is not None:
        write_scenes(root, params.draw)
    if params.curves is not None:
        write_connect(root, params.curves)
    if params.kind in ("digits", "imagenet", "connect"):
        manifest = build_manifest(scan_tree(root, params.kind), params.kind, params.generate or params.curves)
    else:
        manifest = build_dense_manifest(root, params.kind, params.draw)
    check_expected(manifest, root, params.expected, f"prepare_data.{cell}.expected")
    folder = paths.cell("prepare_data", cell)
    write_manifest(folder / "manifest.json", manifest)
    metrics = {
        "classes": len(manifest.classes),
        "train_images": manifest.splits["train"].images,
        "val_images": manifest.splits["val"].images,
        "images_mib": round(sum(split.bytes for split in manifest.splits.values()) / 2**20, 1),
        "departures": len(manifest.departures),
    }
    identity = make_identity(
        paths.root, ["stages.prepare_data"], params, data_manifest=folder / "manifest.json", device="cpu", dtype="uint8", backend="none"
    )
    write_record(folder, metrics, identity, time.monotonic() - started)
