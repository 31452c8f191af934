"""Optimisers and learning-rate schedules: timm's AdamW, LAMB, layer-wise decay and cosine, and those of dense tasks."""

from bisect import bisect_right
from collections.abc import Set

import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

from ..core.errors import UserError
from .params import OptimParams


def build_optimizer(
    model: nn.Module,
    params: OptimParams,
    batch_size: int,
    *,
    new: Set[str] = frozenset(),
    new_factor: float = 1.0,
    decay_all: bool = False,
) -> torch.optim.Optimizer:
    """Build AdamW or LAMB with timm's weight-decay rule and, if asked for, its layer-wise rates.

    A model's `decayed_vectors` are decayed although timm's rule exempts vectors; the layers are those of its
    `group_matcher`. For a converted model, the parameters named in `new` have `new_factor` times the learning rate, and
    with `decay_all` no parameter is exempt from weight decay; layer-wise rates are then not available.

    Raises:
        UserError: layer-wise rates for a converted model.
        RuntimeError: the groups do not hold every trainable parameter exactly once.
    """
    rate, averages = params.lr * batch_size / params.lr_batch_size, {"betas": tuple(params.betas), "eps": params.eps}
    # timm groups a model by its rule; groups that are made here are taken as they are
    decays = {"weight_decay": params.weight_decay, "layer_decay": params.layer_decay}
    trained = model
    if new_factor != 1 or decay_all:
        if params.layer_decay is not None:
            raise UserError("optim.layer_decay: a converted model has a rate for its new weights instead; leave it out")
        trained = _group(model, params.weight_decay, new, new_factor, decay_all)
        decays = {"weight_decay": params.weight_decay}
    optimizer = create_optimizer_v2(trained, opt=params.optimizer, lr=rate, **averages, **decays)
    if hasattr(model, "decayed_vectors"):
        _decay(optimizer, [model.get_parameter(name) for name in model.decayed_vectors()], params.weight_decay)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if len(grouped) != len(trainable) or set(grouped) != trainable:
        raise RuntimeError("the optimiser's groups do not partition the trainable parameters")
    return optimizer


def _decay(optimizer: torch.optim.Optimizer, vectors: list[nn.Parameter], weight_decay: float) -> None:
    """Move vectors, which timm's rule never decays, to groups with weight decay that keep all other settings."""
    chosen = {id(vector) for vector in vectors}
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in chosen]
        if moved and group["weight_decay"] != weight_decay:
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
            optimizer.add_param_group({**group, "params": moved, "weight_decay": weight_decay})


def _group(model: nn.Module, weight_decay: float, new: Set[str], new_factor: float, decay_all: bool) -> list[dict]:
    """Group parameters by timm's weight-decay rule, and split each group into inherited and new ones.

    The schedule multiplies a group's rate by its `lr_scale`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # groups have no names
    if decay_all:
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": weight_decay}]
    else:
        exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=exempt)
    cut = []
    for group in groups:
        for is_new in (False, True):
            chosen = [p for p in group["params"] if (names[id(p)] in new) == is_new]
            if chosen:
                cut.append({**group, "params": chosen, "lr_scale": new_factor if is_new else 1.0})
    return cut


def build_schedule(
    optimizer: torch.optim.Optimizer, params: OptimParams, batch_size: int, epochs: int, steps_per_epoch: int
) -> Scheduler:
    """Build the learning rate as a function of the step; call `step_update(step)` with the number of finished steps."""
    scale = batch_size / params.lr_batch_size
    if params.schedule == "cosine":
        warmup_steps = params.warmup_steps or min(params.warmup_epochs, epochs) * steps_per_epoch
        warmup = {"warmup_t": warmup_steps, "warmup_lr_init": params.warmup_lr * scale, "warmup_prefix": True}
        steps = max(1, epochs * steps_per_epoch - warmup_steps)
        schedule = CosineLRScheduler(optimizer, steps, lr_min=params.min_lr * scale, **warmup, t_in_epochs=False)
    else:
        schedule = _DenseSchedule(optimizer, params, epochs, steps_per_epoch)
    schedule.step_update(0)
    return schedule


class _DenseSchedule(Scheduler):
    """The learning rates of detection and segmentation: steps, or a linear decay to 0 where there are no milestones.

    During n steps of warm-up, the rate is multiplied by 1 - (1 - t / n)(1 - first / peak).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: OptimParams, epochs: int, steps_per_epoch: int):
        # timm calls `_get_lr` with the number of finished steps; `base_values` are the optimiser's peak rates by group
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self._params, self._steps = params, epochs * steps_per_epoch
        self._milestones = [epoch * steps_per_epoch for epoch in params.milestones]

    def _get_lr(self, t: int) -> list[float]:
        factor = 0.1 ** bisect_right(self._milestones, t) if self._milestones else 1 - t / self._steps
        left = 1 - t / self._params.warmup_steps if t < self._params.warmup_steps else 0.0
        factor *= 1 - left * (1 - self._params.warmup_lr / self._params.lr)
        return [value * factor for value in self.base_values]
