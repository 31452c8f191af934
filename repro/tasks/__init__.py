"""Training tasks: a package for each, whose `spec.py` tells training how to build, score and show a model."""

import importlib
import importlib.util
import pkgutil

from .spec import TaskSpec


def load_tasks() -> dict[str, TaskSpec]:
    """Map each task's name to its spec; a package in this folder with a `spec.py` is a task."""
    found = {}
    for package in pkgutil.iter_modules(__path__):
        if package.ispkg and importlib.util.find_spec(f"{__name__}.{package.name}.spec"):
            spec = importlib.import_module(f"{__name__}.{package.name}.spec").SPEC
            found[spec.name] = spec
    return found
