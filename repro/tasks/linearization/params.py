"""Parameters of a linearisation. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses

from ...core.config import bounded
from ..classification.params import ClassifierParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearizeParams(ClassifierParams):
    """A cell of `linearize:`; `model` and `options` are the student's, and `init` is the softmax ViT.

    By the names `freeze`, `new_lr_factor` and `decay_all`, `repro.papers` tells a linearisation from other trainings.

    Args:
        teacher: registered name of the ViT in `init`, where its file does not name it; null for a file of this project.
        freeze: train only the parameters that are not inherited.
        new_lr_factor: learning rate of new parameters, as a multiple of that of inherited ones.
        decay_all: apply weight decay to every parameter, including biases, norms and position embeddings.
    """

    teacher: str | None = None
    freeze: bool = False
    new_lr_factor: float = bounded(20.0, gt=0)
    decay_all: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is None:
            raise ValueError("init: a linearised model inherits from a softmax ViT; name its weights")
        if self.optim.layer_decay is not None:
            raise ValueError("optim.layer_decay: a linearised model has two rates, see new_lr_factor; leave it out")
