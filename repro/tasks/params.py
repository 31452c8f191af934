"""The tasks' parts of params sections. Imports nothing heavy: the stage modules need them for `--help`."""

import dataclasses

from ..core.config import bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixParams:
    """How targets and images are softened (timm's Mixup; the paper follows DeiT).

    Args:
        mixup, cutmix: alpha of each; 0 switches it off.
        prob: share of batches that are mixed at all.
        switch_prob: share of the mixed ones that take cutmix where both are on.
        label_smoothing: mass spread over all classes.
    """

    mixup: float = bounded(0.8, ge=0)
    cutmix: float = bounded(1.0, ge=0)
    prob: float = bounded(1.0, ge=0, le=1)
    switch_prob: float = bounded(0.5, ge=0, le=1)
    label_smoothing: float = bounded(0.1, ge=0, le=1)
