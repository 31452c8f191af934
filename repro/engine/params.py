"""The optimiser part of a params section. Imports nothing heavy: the stage modules need it for `--help`."""

import dataclasses

from ..core.config import bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimParams:
    """AdamW and its schedule (Appendix D; what it leaves open is Swin's default).

    Args:
        lr: peak learning rate at a total batch of `lr_batch_size`; the three rates scale linearly with the batch.
        warmup_lr, min_lr: first and last rate, at the same batch.
        lr_batch_size: the batch that the rates are stated for.
        weight_decay: of every parameter that timm's rule and the model's `no_weight_decay()` do not exempt.
        betas, eps: AdamW's.
        warmup_epochs: linear warm-up; the cosine takes the epochs after it.
        clip_grad_norm: global L2 norm; null switches clipping off.
    """

    lr: float = bounded(gt=0)
    warmup_lr: float = bounded(1e-6, ge=0)
    min_lr: float = bounded(1e-5, ge=0)
    lr_batch_size: int = bounded(1024, ge=1)
    weight_decay: float = bounded(0.05, ge=0)
    betas: tuple[float, ...] = bounded((0.9, 0.999), ge=0, le=1)
    eps: float = bounded(1e-8, gt=0)
    warmup_epochs: int = bounded(20, ge=0)
    clip_grad_norm: float | None = bounded(5.0, gt=0)

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"betas: expected two numbers, got {len(self.betas)}")
