"""`repro tune`: choose the learning rate and warm-up of a cell by its score on the split `tune`."""

from repro.runs.tune import TuneParams

from . import CellOption, Stage

STAGE = Stage(params=TuneParams, cells=True, hidden=True)


def command(cell: CellOption = None) -> None:
    """Search learning rates and warm-ups on `tune`, and name the best; the rate goes into the cell by hand."""
    from repro.runs.tune import read_searches, run_search

    from . import load_stages

    specs = {name: stage.task for name, stage in load_stages().items() if stage.task and stage.task.scores}
    for search in read_searches(specs, cell):
        run_search(search)
