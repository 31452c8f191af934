"""`repro prepare-data`: check a data set, or write an embedded one, and record the manifest that later stages need."""

from typing import Annotated

import typer

from repro.core.config import list_cells, load_section
from repro.core.errors import UserError
from repro.core.paths import find_root
from repro.core.runtime import load_runtime
from repro.data.kinds import KINDS, PrepareData

from . import Stage

STAGE = Stage(params=PrepareData, cells=True)


def command(
    cell: Annotated[
        str | None,
        typer.Option(
            help="One cell of the `prepare_data:` section, or folder:PATH, coco:PATH, boxes:PATH, ade20k:PATH; without it, all cells."
        ),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Get the published files first, where they are free to download.")
    ] = False,
) -> None:
    """Check a data set, or write an embedded one, and record its manifest."""
    from repro.data import prepare as preparing

    paths = find_root()
    runtime = load_runtime(paths)
    if cell and ":" in cell:
        if download:
            raise UserError(f"--download: {cell} is your own; leave it out")
        preparing.prepare_own(cell, paths, runtime)
        return
    for name in [cell] if cell else list_cells(paths, "prepare_data"):
        params = load_section(PrepareData, paths.params, "prepare_data", name)
        if download and (cell or KINDS[params.kind].download):
            preparing.download(params, paths, runtime, name)
        preparing.prepare(params, paths, runtime, name)
