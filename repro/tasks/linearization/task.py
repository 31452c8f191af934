"""The training task of linearisation: classification with a second, higher learning rate for new parameters."""

from typing import Any

import torch
from torch import nn

from ...training.optim import build_optimizer
from ...training.params import OptimParams
from ..classification.task import Classification


class Linearization(Classification):
    """Training of a student.

    Args:
        start: the student before its first step, on the CPU.
        new_lr_factor, decay_all: see `LinearizeParams`.
        parts: see `Classification`.
    """

    def __init__(self, *, start: nn.Module, new_lr_factor: float, decay_all: bool, **parts: Any):
        super().__init__(**parts)
        self.start, self.new_lr_factor, self.decay_all = start, new_lr_factor, decay_all

    def build_optimizer(self, params: OptimParams) -> torch.optim.Optimizer:
        """Build the optimiser; parameters that a softmax model lacks have `new_lr_factor` times the learning rate."""
        new = self.model.new_parameters()
        return build_optimizer(
            self.model, params, self.batch_size, new=new, new_factor=self.new_lr_factor, decay_all=self.decay_all
        )
