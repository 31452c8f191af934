"""The parameters of a linearisation. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses

from ..classification.params import ClassifierParams
from ..conversion import ConvertParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearizeParams(ClassifierParams):
    """A cell of `linearize:`; `model` and `options` are the student's, and `init` is the softmax ViT.

    Args:
        teacher: registered name of the ViT in `init`, where its file does not say it; null for a file of this project.
        convert: how the training differs from one from random weights.
    """

    teacher: str | None = None
    convert: ConvertParams = ConvertParams()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is None:
            raise ValueError("init: a linearised model inherits from a softmax ViT; name its weights")
        if self.optim.layer_decay is not None:
            raise ValueError("optim.layer_decay: a linearised model has two rates, see convert.new_lr_factor; leave it out")
