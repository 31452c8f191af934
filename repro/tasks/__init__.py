"""What is learned: one room for each task, whose `spec.py` tells the training frame how a model and its data are made, scored and shown."""

import importlib
import importlib.util
import pkgutil

from .spec import TaskSpec


def load_tasks() -> dict[str, TaskSpec]:
    """Every task by its name; a room is found by lying here with a `spec.py`."""
    found = {}
    for room in pkgutil.iter_modules(__path__):
        if room.ispkg and importlib.util.find_spec(f"{__name__}.{room.name}.spec"):
            spec = importlib.import_module(f"{__name__}.{room.name}.spec").SPEC
            found[spec.name] = spec
    return found
