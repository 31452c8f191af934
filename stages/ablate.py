"""`repro ablate`: trainings of every task whose weights no other stage uses: variants, more seeds, long curves."""

from typing import Annotated

import typer

from repro.core.config import load_sections, section_keys
from repro.core.errors import UserError, did_you_mean
from repro.core.paths import find_root
from repro.tasks.classification.spec import SPEC
from repro.tasks.detection.spec import SPEC as DETECTION
from repro.tasks.generation.spec import SPEC as GENERATION
from repro.tasks.linearization.spec import SPEC as LINEARIZATION
from repro.tasks.segmentation.spec import SPEC as SEGMENTATION

from . import GpusOption, Stage

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC)
SECTIONS = {
    f"ablate_{name}": Stage(params=spec.params, cells=True, task=spec)
    for name, spec in {
        "linearize": LINEARIZATION,
        "detect": DETECTION,
        "segment": SEGMENTATION,
        "generate": GENERATION,
        "inherit": GENERATION,
    }.items()
}


def command(
    cell: Annotated[
        str | None, typer.Option(help="One cell, or SECTION.CELL where two sections have its name; without it, all.")
    ] = None,
    gpus: GpusOption = None,
) -> None:
    """Train the cells of `ablate` and `ablate_*`: variants, seeds and long curves; a stopped run continues."""
    from repro.papers import describe_recipe
    from repro.runs.cells import read_cells, train_cells

    params, specs = find_root().params, {name: stage.task for name, stage in {"ablate": STAGE, **SECTIONS}.items()}
    sections = load_sections(params)
    known = [(section, name) for section in specs if section in sections for name in section_keys(params, section)]
    chosen = [(section, name) for section, name in known if cell in (None, name, f"{section}.{name}")]
    if not chosen:
        names = [name for _, name in known]
        what = f"ablate: --cell {cell}: no such cell{did_you_mean(cell, names)}" if cell else "ablate: has no cell"
        raise UserError(f"{what}; `repro profile use digits` has those of the papers")
    if cell and len(chosen) > 1:
        raise UserError(f"ablate: --cell {cell}: is in two sections; write {' or '.join(map('.'.join, chosen))}")
    cells = []
    for section, name in chosen:
        recipe = describe_recipe if specs[section] in (SPEC, LINEARIZATION) else None
        cells += read_cells(section, specs[section], name, recipe=recipe)
    train_cells(cells, gpus)
