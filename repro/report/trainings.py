"""Which training of a model an expression of a ledger asks for."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What a training must have been; None where any will do.

    `mesa`: whether the moving average of the weights taught the model. `frozen`: whether a linearization left the
    weights of its softmax model as they are.
    """

    image_size: int | None = None
    epochs: int | None = None
    mesa: bool | None = None
    frozen: bool | None = None

    @classmethod
    def parse(cls, asked: Sequence[int | str]) -> Self:
        """Of the last arguments of `accuracy`: a side in pixels, `36 epochs`, `MESA`, `no MESA`, `linearized` or
        `linearized, frozen`; another one is a `ValueError`.
        """
        found: dict[str, Any] = {}
        for each in asked:
            if isinstance(each, int):
                found["image_size"] = each
            elif match := re.fullmatch(r"(\d+) epochs", each):
                found["epochs"] = int(match[1])
            elif each in ("MESA", "no MESA"):
                found["mesa"] = each == "MESA"
            elif each in ("linearized", "linearized, frozen"):
                found["frozen"] = each != "linearized"
            else:
                words = "`36 epochs`, `MESA`, `no MESA`, `linearized` or `linearized, frozen`"
                raise ValueError(f"{each!r}: no training; write a side in pixels, {words}")
        return cls(**found)

    @property
    def is_of_recipe(self) -> bool:
        """Whether more is asked than an evaluation of a file of weights can say."""
        return any(each is not None for each in (self.epochs, self.mesa, self.frozen))

    def fits(self, about: Mapping[str, Any]) -> bool:
        """Whether a record of trainings, or a cell, is of such a training; `mesa` and `freeze` are there where used."""
        if self.epochs is not None and about.get("epochs") != self.epochs:
            return False
        if self.mesa is not None and bool(about.get("mesa")) != self.mesa:
            return False
        if self.frozen is not None and (about.get("init") is None or bool(about.get("freeze")) != self.frozen):
            return False
        return self.image_size is None or about.get("image_size", self.image_size) == self.image_size
