"""Optimiser and learning-rate schedule: AdamW and a cosine with warm-up, both timm's."""

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from .params import OptimParams


def build_optimizer(model: nn.Module, params: OptimParams, batch_size: int) -> torch.optim.Optimizer:
    """AdamW with timm's weight-decay rule; the groups are checked to hold every trainable parameter exactly once."""
    optimizer = create_optimizer_v2(
        model,
        opt="adamw",
        lr=params.lr * batch_size / params.lr_batch_size,
        weight_decay=params.weight_decay,
        betas=tuple(params.betas),
        eps=params.eps,
    )
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if len(grouped) != len(trainable) or set(grouped) != trainable:
        raise RuntimeError("the optimiser's groups do not partition the trainable parameters")
    return optimizer


def build_schedule(
    optimizer: torch.optim.Optimizer, params: OptimParams, batch_size: int, epochs: int, steps_per_epoch: int
) -> CosineLRScheduler:
    """Linear warm-up, then a cosine over the remaining steps; call `step_update(step)` with the number of finished steps."""
    scale = batch_size / params.lr_batch_size
    warmup_steps = min(params.warmup_epochs, epochs) * steps_per_epoch
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=max(1, epochs * steps_per_epoch - warmup_steps),
        lr_min=params.min_lr * scale,
        warmup_t=warmup_steps,
        warmup_lr_init=params.warmup_lr * scale,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    schedule.step_update(0)
    return schedule
