"""The optimiser part of a params section. Imports nothing heavy: the stage modules need it for `--help`."""

import dataclasses
from typing import Any, Literal

from ..core.config import bounded
from ..core.runtime import torch_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopParams:
    """How the loop runs; a stage makes it of its own section and of `runtime:`.

    Args:
        epochs: passes over the training data.
        evaluate_every: epochs between evaluations; the last is always evaluated.
        precision: `fp32`, or `bf16` or `fp16` for autocast, `fp16` with a loss scale that adapts.
        accumulate: parts into which each batch of a rank is cut, one after the other; gradients are averaged.
        ema_decay: of the moving average of the weights, which is then what is evaluated and saved; null for none.
        max_bad_steps: steps in a row with a loss or gradient that is not finite, after which the run stops.
        save_every_steps: steps between two states saved within an epoch.
    """

    epochs: int
    evaluate_every: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    ema_decay: float | None = None
    max_bad_steps: int = 20
    save_every_steps: int = 200

    def autocast(self, device_type: str) -> Any:
        """A context manager for a forward pass in this precision."""
        import torch

        return torch.autocast(device_type, torch_dtype(self.precision), enabled=self.precision != "fp32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimParams:
    """AdamW and its schedule (Appendix D; for classification what it leaves open is Swin's default).

    Args:
        lr: peak learning rate at a total batch of `lr_batch_size`; the three rates scale linearly with the batch.
        warmup_lr, min_lr: first rate, and the cosine's last, at the same batch.
        lr_batch_size: the batch that the rates are stated for.
        weight_decay: of every parameter that timm's rule and the model's `no_weight_decay()` do not exempt.
        betas, eps: AdamW's.
        schedule: `cosine`; `step`, a tenth after each of the milestones; or `poly`, linear to 0 over all steps.
        milestones: finished epochs, of `step`.
        warmup_epochs: linear warm-up; the cosine takes the epochs after it.
        warmup_steps: in place of it with `step` and `poly`, whose rates it multiplies.
        layer_decay: factor between the rates of neighbouring layers, from the last, which has 1, down; null for one rate.
        clip_grad_norm: global L2 norm; null switches clipping off.
    """

    lr: float = bounded(gt=0)
    warmup_lr: float = bounded(1e-6, ge=0)
    min_lr: float = bounded(1e-5, ge=0)
    lr_batch_size: int = bounded(1024, ge=1)
    weight_decay: float = bounded(0.05, ge=0)
    betas: tuple[float, ...] = bounded((0.9, 0.999), ge=0, le=1)
    eps: float = bounded(1e-8, gt=0)
    schedule: Literal["cosine", "step", "poly"] = "cosine"
    milestones: tuple[int, ...] = bounded((), ge=1)
    warmup_epochs: int = bounded(20, ge=0)
    warmup_steps: int = bounded(0, ge=0)
    layer_decay: float | None = bounded(None, gt=0, le=1)
    clip_grad_norm: float | None = bounded(5.0, gt=0)

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise ValueError(f"betas: expected two numbers, got {len(self.betas)}")
        if bool(self.milestones) != (self.schedule == "step"):
            raise ValueError(
                f"milestones: {list(self.milestones)} with schedule {self.schedule}; `step` needs some, and no other takes them"
            )
        if self.warmup_steps and self.schedule == "cosine":
            raise ValueError("warmup_steps: the cosine takes warmup_epochs")
