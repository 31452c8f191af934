"""How a model that inherits from a pretrained one is trained. Imports nothing heavy: the stages need it for `--help`."""

import dataclasses

from ..core.config import bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertParams:
    """What differs from a training from random weights; the defaults are those of the paper's release.

    Args:
        freeze: whether only new parameters learn.
        new_lr_factor: the rate of new parameters, as a multiple of that of inherited ones.
        decay_all: whether weight decay exempts nothing, neither biases nor norms nor positions.
    """

    freeze: bool = False
    new_lr_factor: float = bounded(20.0, gt=0)
    decay_all: bool = True
