"""Helpers for the tests of several tasks: batches, a backbone of two convolutions, and a hierarchical one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.models.pyramid import build_pyramid
from repro.tasks.segmentation.params import UperNetParams
from repro.training.loop import Task

NARROW = UperNetParams(channels=8, aux_channels=4, pool_scales=(1, 2))
SWIN = {"embed_dim": 8, "depths": (1, 2, 1, 1), "num_heads": (1, 1, 2, 2)}


def build_swin(features: str = "last") -> nn.Module:
    """A pyramid whose four maps have the widths 8, 16, 32 and 64."""
    return build_pyramid("swin_tiny_patch4_window7_224", options=SWIN, features=features, drop_path_rate=0.1)


class Batches(list):
    """A list of batches with the attributes of a loader that a task reads."""

    dataset = None


class Pyramid(nn.Module):
    """Four maps of strides 4 to 32, of width `embed_dim`."""

    def __init__(self, embed_dim: int = 8):
        super().__init__()
        self.channels = (embed_dim,) * 4
        self.stem = nn.Conv2d(3, embed_dim, 4, stride=4)
        self.mix = nn.Conv2d(embed_dim, embed_dim, 3, padding=1)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.mix(self.stem(images).relu())
        return [F.avg_pool2d(x, 2**i) if i else x for i in range(4)]


def list_unreached(model: nn.Module, *exempt: str) -> list[str]:
    """The parameters without a gradient, or with one that is zero or not finite; those that end in `exempt` may be."""
    own = {name: p for name, p in model.named_parameters() if not name.endswith(exempt)}
    return [name for name, p in own.items() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]


def fit(task: Task, batch: Any, lr: float, steps: int) -> list[dict[str, float]]:
    """Train on one batch, and return the losses of each step."""
    optimizer, losses = torch.optim.AdamW(task.model.train().parameters(), lr=lr), []
    for _ in range(steps):
        found = task.loss(task.model, batch)
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        losses.append({name: loss.item() for name, loss in found.items()})
    return losses
