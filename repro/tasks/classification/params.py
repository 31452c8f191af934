"""The parameters of a classifier's training. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses

from ...core.config import bounded
from ...data.settings import TransformSettings
from ...training.params import TrainParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixParams:
    """How targets and images are softened (timm's Mixup; the paper follows DeiT).

    Args:
        mixup, cutmix: alpha of each; 0 switches it off.
        prob: share of the batches that are mixed at all.
        switch_prob: share of the mixed batches that take cutmix where both are on.
        label_smoothing: probability mass that is spread over all classes.
    """

    mixup: float = bounded(0.8, ge=0)
    cutmix: float = bounded(1.0, ge=0)
    prob: float = bounded(1.0, ge=0, le=1)
    switch_prob: float = bounded(0.5, ge=0, le=1)
    label_smoothing: float = bounded(0.1, ge=0, le=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MesaParams:
    """MESA: the model also learns the answers of the moving average of its own weights, z', to the same mixed images.

    From an epoch on, weight · KL(softmax(z'/T) || softmax(z/T)), averaged over the images, is added to the loss. The
    gradient of the model's answers z is that of the cross-entropy with softmax(z'/T) as its target, as others write it.

    Args:
        temperature: T.
        start_fraction: share of the epochs that go by before; the first epoch that begins at it or later is the first
            with the divergence.
    """

    weight: float = bounded(gt=0)
    temperature: float = bounded(1.0, gt=0)
    start_fraction: float = bounded(0.25, ge=0, le=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierParams(TrainParams):
    """A cell of `pretrain:` or `ablate:`.

    Args:
        max_unreadable: training images that may be unreadable before the run stops.
        mesa: what the moving average of the weights teaches; null for nothing.
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
        """Mixup and cutmix pair the images of a forward pass."""
        return bool(self.mix.mixup or self.mix.cutmix)

    @property
    def teacher_from(self) -> float | None:
        """Where MESA starts."""
        return self.mesa.start_fraction if self.mesa else None
