"""Training tasks: a package for each, whose `spec.py` tells training how to build, score and show a model."""

import importlib
from pathlib import Path

from .spec import TaskSpec


def load_tasks() -> dict[str, TaskSpec]:
    """Map each task's name to its spec; a package in this folder with a `spec.py` is a task."""
    packages = sorted(file.parent.name for file in Path(__file__).parent.glob("*/spec.py"))
    specs = [importlib.import_module(f"{__name__}.{package}.spec").SPEC for package in packages]
    return {spec.name: spec for spec in specs}
