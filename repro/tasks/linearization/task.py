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
        start: the student before its first step, on the CPU, for the score of the inherited weights alone.
        parts: see `Classification`; its params are `LinearizeParams`.
    """

    def __init__(self, *, start: nn.Module, **parts: Any):
        super().__init__(**parts)
        self.start = start

    def build_optimizer(self, params: OptimParams) -> torch.optim.Optimizer:
        """Build the optimiser; parameters that a softmax model lacks have `new_lr_factor` times the learning rate."""
        rates = {"new": self.model.new_parameters(), "new_factor": self.params.new_lr_factor}
        return build_optimizer(self.model, params, self.batch_size, **rates, decay_all=self.params.decay_all)
