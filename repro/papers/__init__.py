"""One package for each paper, whose module `paper` declares `PAPER`, a `repro.report.paper.Paper`.

The module `paper` imports the report. The module `recipe` must not, because every training prints a recipe.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.config import load_yaml
from .recipe import LINEARIZE, describe


def find_packages() -> list[str]:
    """Return the names of the packages of papers, in alphabetical order."""
    return [package.name for package in pkgutil.iter_modules(__path__) if package.ispkg]


def load_papers() -> dict[str, Any]:
    """Return id -> `Paper`, the primary paper first, then by id."""
    papers = [importlib.import_module(f"{__name__}.{package}.paper").PAPER for package in find_packages()]
    return {paper.id: paper for paper in sorted(papers, key=lambda paper: (not paper.primary, paper.id))}


def describe_recipe(params: Any, facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Compare a classifier's training with the recipe of its family's paper; see `repro.papers.recipe.describe`.

    Every training calls this, so it reads only `paper.yaml` and the modules `recipe` and does not import the report.
    """
    family = params.model.split("_")[0]
    declared = {package: load_yaml(Path(__file__).parent / package / "paper.yaml") for package in find_packages()}
    packages = [name for name, paper in declared.items() if paper.get("primary") or family in paper.get("families", ())]
    # the primary paper comes last: it also compares families of other papers, whose recipes are not its own
    packages.sort(key=lambda name: declared[name].get("primary", False))
    recipes = [importlib.import_module(f"{__name__}.{package}.recipe").PRINTED for package in packages]
    # a recipe with settings of a linearisation is for linearisations alone; the primary paper's has none, and fits always
    asked = {name for name in LINEARIZE if hasattr(params, name)}
    fitting = (printed for printed in recipes if asked >= {*LINEARIZE} & printed.find_values(params.model).keys())
    return describe(params, facts, next(fitting))
