"""One room for each paper: a folder here, whose module `paper` declares `PAPER`, a `repro.report.paper.Paper`.

Nothing here imports the report, so that code that uses a room's other modules does not depend on it.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from .recipe import LINEARIZE, describe


def find_rooms() -> list[str]:
    """The names of the rooms."""
    return [room.name for room in pkgutil.iter_modules(__path__) if room.ispkg]


def load_papers() -> dict[str, Any]:
    """Id -> `Paper`; the primary paper first, then by name."""
    papers = [importlib.import_module(f"{__name__}.{room}.paper").PAPER for room in find_rooms()]
    return {paper.id: paper for paper in sorted(papers, key=lambda paper: (not paper.primary, paper.id))}


def describe_recipe(params: Any, facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How a classifier is trained against the recipe of the paper of its family; see `repro.papers.recipe.describe`."""
    family, primary = params.model.split("_")[0], load_primary().id
    # the primary paper also compares families of other papers, whose recipes are not its own
    rooms = [paper.id for paper in load_papers().values() if family in paper.families and not paper.primary] + [primary]
    recipes = [importlib.import_module(f"{__name__}.{room}.recipe").PRINTED for room in rooms]
    # the recipe of a linearisation says nothing of a training from the beginning
    asked = {name for name in LINEARIZE if hasattr(params, name)}
    fitting = (printed for printed in recipes if asked >= {*LINEARIZE} & printed.find_values(params.model).keys())
    return describe(params, facts, next(fitting))


def load_primary() -> Any:
    """The `Paper` that results/tables.md is about."""
    return next(iter(load_papers().values()))
