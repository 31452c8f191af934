"""`repro ablate`: trainings of every task whose weights no other stage uses: variants, more seeds, long curves."""

from typing import Annotated

import typer

from repro.core.config import load_sections, section_keys
from repro.core.errors import UserError, did_you_mean
from repro.core.paths import find_root
from repro.tasks import load_tasks
from repro.tasks.classification.spec import SPEC, Classify

from . import GpusOption, Stage

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC)
_TASKS = load_tasks()
# in the order in which one call trains them; `ablate_inherit` has denoisers that start from the weights of others
_TASKS |= {"inherit": _TASKS["generate"]}
SECTIONS = {
    f"ablate_{name}": Stage(params=_TASKS[name].params, cells=True, task=_TASKS[name])
    for name in ("linearize", "detect", "segment", "generate", "inherit")
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
        # the papers' recipes are those of classifiers
        recipe = describe_recipe if isinstance(specs[section], Classify) else None
        cells += read_cells(section, specs[section], name, recipe=recipe)
    train_cells(cells, gpus)
