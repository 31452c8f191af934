"""The filters by which a ledger asks for the score of a training, such as `accuracy(..., "36 epochs", "MESA")`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# a filter on trainings by any of `image_size`, `epochs`, `mesa` (taught by the moving average of its weights) and
# `frozen` (whether a linearization kept the weights of its softmax model)
TrainingFilter = Mapping[str, Any]
# word of a ledger -> the filter's key and value
_WORDS = {
    "MESA": ("mesa", True),
    "no MESA": ("mesa", False),
    "linearized": ("frozen", False),
    "linearized, frozen": ("frozen", True),
}


def parse_training(asked: Sequence[int | str]) -> TrainingFilter:
    """Parse the last arguments of `accuracy`: side in pixels, `36 epochs`, or one of `_WORDS`, else a ValueError."""
    found: dict[str, Any] = {}
    for each in asked:
        if isinstance(each, int):
            found["image_size"] = each
        elif match := re.fullmatch(r"(\d+) epochs", each):
            found["epochs"] = int(match[1])
        elif each in _WORDS:
            name, value = _WORDS[each]
            found[name] = value
        else:
            words = "`36 epochs`, `MESA`, `no MESA`, `linearized` or `linearized, frozen`"
            raise ValueError(f"{each!r}: no training; write a side in pixels, {words}")
    return found


def fits_training(about: Mapping[str, Any], asked: TrainingFilter) -> bool:
    """Tell whether a record or a profile's cell matches a filter; a missing `mesa` or `freeze` means False.

    Without `init`, a training from random weights matches neither value of `frozen`.
    """
    said = {
        "epochs": about.get("epochs"),
        "mesa": bool(about.get("mesa")),
        "image_size": about.get("image_size", asked.get("image_size")),  # a cell may state it elsewhere
        "frozen": None if about.get("init") is None else bool(about.get("freeze")),
    }
    return asked.items() <= said.items()
