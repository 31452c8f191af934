"""Parameters of a classifier's training. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses

from ...core.config import bounded
from ...data.settings import TransformSettings
from ...training.params import TrainParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixParams:
    """Softening of targets and images (timm's Mixup; the paper follows DeiT).

    Args:
        mixup, cutmix: alpha of each; 0 switches it off.
        prob: probability that a batch is mixed.
        switch_prob: probability of cutmix for a mixed batch, where both are on.
        label_smoothing: probability mass that is spread over all classes.
    """

    mixup: float = bounded(0.8, ge=0)
    cutmix: float = bounded(1.0, ge=0)
    prob: float = bounded(1.0, ge=0, le=1)
    switch_prob: float = bounded(0.5, ge=0, le=1)
    label_smoothing: float = bounded(0.1, ge=0, le=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MesaParams:
    """MESA: the model is also trained on the logits z' of the moving average of its weights for the same mixed images.

    From an epoch on, the loss includes weight · KL(softmax(z'/T) || softmax(z/T)), averaged over the images. The
    gradient with respect to the model's logits z equals that of the cross-entropy with target softmax(z'/T), the form
    in other implementations.

    Args:
        temperature: T.
        start_fraction: share of the epochs without MESA; it begins with the first epoch that starts at this share or
            later.
    """

    weight: float = bounded(gt=0)
    temperature: float = bounded(1.0, gt=0)
    start_fraction: float = bounded(0.25, ge=0, le=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierParams(TrainParams):
    """A cell of `pretrain:` or `ablate:`.

    Args:
        max_unreadable: training images that may be unreadable before the run stops.
        mesa: training on the logits of the weights' moving average; null for none.
    """

    max_unreadable: int = bounded(0, ge=0)
    mix: MixParams
    mesa: MesaParams | None = None
    transform: TransformSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needs_even_parts and self.batch_size % 2:
            raise ValueError(f"batch_size: {self.batch_size} is odd, and mixup and cutmix pair the images of a batch")
        if self.mesa and self.ema_decay is None:
            raise ValueError("mesa: the teacher is the moving average of the weights; set ema_decay")
        if self.optim.schedule != "cosine":
            raise ValueError(f"optim.schedule: {self.optim.schedule}, but a classifier is trained with the cosine")

    @property
    def needs_even_parts(self) -> bool:
        """Whether mixup or cutmix pairs the images of a forward pass."""
        return bool(self.mix.mixup or self.mix.cutmix)

    @property
    def teacher_from(self) -> float | None:
        """Share of the epochs after which MESA starts; None without it."""
        return self.mesa.start_fraction if self.mesa else None
