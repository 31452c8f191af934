"""The groups of a converted model: which rate and which decay each parameter has, through warm-up and cosine."""

import dataclasses
import math

import pytest
import timm
import torch
from torch import nn

import repro.models  # noqa: F401  registers the models
from repro.training.optim import build_optimizer, build_schedule
from repro.training.params import OptimParams

PARAMS = OptimParams(lr=1e-3, warmup_lr=1e-5, min_lr=1e-4, lr_batch_size=16, warmup_epochs=1, clip_grad_norm=None)
PARAMS = dataclasses.replace(PARAMS, weight_decay=0.05)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old, self.new, self.table = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.zeros(1, 3, 3))

    def no_weight_decay(self) -> set[str]:
        return {"table"}


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


@pytest.mark.parametrize("decay_all", [True, False])
def test_new_parameters_have_their_own_rate_at_every_step(decay_all):
    model = Small()
    optimizer = build_optimizer(model, PARAMS, 32, new={"new.weight", "new.bias"}, new_factor=20.0, decay_all=decay_all)
    schedule = build_schedule(optimizer, PARAMS, 32, epochs=3, steps_per_epoch=10)
    for step in (0, 5, 10, 20, 30):
        schedule.step_update(step)
        # all rates twice, since the batch is: a line up to the peak, then half a cosine down to the last
        falling = 2e-4 + (2e-3 - 2e-4) * (1 + math.cos(math.pi * (step - 10) / 20)) / 2
        rate = 2e-5 + (2e-3 - 2e-5) * step / 10 if step < 10 else falling
        found = groups_of(model, optimizer)
        for name, (value, decay) in found.items():
            assert value == pytest.approx(20 * rate if name.startswith("new") else rate)
            assert decay == (0.05 if decay_all or name in ("old.weight", "new.weight") else 0.0)


def test_frozen_parameters_are_in_no_group():
    model = Small()
    model.old.requires_grad_(False)
    optimizer = build_optimizer(model, PARAMS, 16, new={"new.weight", "new.bias"}, new_factor=20.0, decay_all=True)
    assert set(groups_of(model, optimizer)) == {"new.weight", "new.bias", "table"}


def test_without_a_factor_the_groups_are_timms():
    model = Small()
    found = groups_of(model, build_optimizer(model, PARAMS, 16))
    assert len(found) == 5
    assert found == {name: (1e-3, 0.05 if name in ("old.weight", "new.weight") else 0.0) for name in found}


def test_every_parameter_of_vrwkv_but_norms_and_biases_decays():
    """With layer-wise rates, too: the same rate, with the decay."""
    model = timm.create_model("vrwkv_nano_patch16_144", post_norm=True)
    layered = dataclasses.replace(PARAMS, layer_decay=0.5)
    for params in (PARAMS, layered):
        groups = groups_of(model, build_optimizer(model, params, 16))
        norms = tuple(name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
        for name, (_, decay) in groups.items():
            exempt = name.endswith(".bias") or name.startswith(norms)
            assert decay == (0 if exempt else PARAMS.weight_decay), name
        assert len(groups) == len(list(model.parameters()))
