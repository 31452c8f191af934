"""Linearisation as a task of the engine: classification with two rates, since new parameters have more to learn than inherited ones."""

from typing import Any

import torch
from torch import nn

from ...training.optim import build_optimizer
from ...training.params import OptimParams
from ..classification.task import Classification
from ..conversion import ConvertParams


class Linearization(Classification):
    """The training of a student.

    Args:
        start: the student before its first step.
        convert: its rates and weight decay.
        parts: see `Classification`.
    """

    def __init__(self, *, start: nn.Module, convert: ConvertParams, **parts: Any):
        super().__init__(**parts)
        self.start, self.convert = start, convert

    def build_optimizer(self, params: OptimParams) -> torch.optim.Optimizer:
        """Parameters that a softmax model lacks have `new_lr_factor` times the rate."""
        new = self.model.new_parameters()
        return build_optimizer(
            self.model, params, self.batch_size, new=new, new_factor=self.convert.new_lr_factor, decay_all=self.convert.decay_all
        )
