"""Which rate and which decay each parameter has at each step, and the first step of LAMB."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from repro.core.errors import UserError
from repro.training.optim import build_optimizer, build_schedule
from repro.training.params import OptimParams

PARAMS = OptimParams(lr=1e-3, warmup_lr=1e-5, min_lr=1e-4, lr_batch_size=16, warmup_epochs=1, weight_decay=0.05)


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


def warm(step, rate):
    """mmengine's chained schedulers: in the warm-up of w steps, rate times 1 - (1 - s/w)(1 - ratio)."""
    return 2e-4 * rate * (1 - (1 - step / 50) * (1 - 1e-3) if step < 50 else 1.0)


# s -> rate(s) of 10 epochs of 7 steps; the cosine's is min + (peak - min)(1 + cos(pi (s - w)/(S - w)))/2 after w steps
DENSE = {"lr": 1e-4, "warmup_lr": 1e-7, "warmup_steps": 50, "lr_batch_size": 16}
SCHEDULES = {
    "cosine": (
        {"lr": 1e-3, "warmup_lr": 1e-6, "min_lr": 1e-5, "warmup_epochs": 2, "lr_batch_size": 64},
        lambda step: (
            (1e-6 + (1e-3 - 1e-6) * step / 14) / 2
            if step < 14
            else (1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * (step - 14) / 56)) / 2) / 2
        ),
    ),
    "poly": (DENSE, lambda step: warm(step, 1 - step / 70)),
    "step": (DENSE | {"milestones": (6, 9)}, lambda step: warm(step, 1.0 if step < 42 else 0.1 if step < 63 else 0.01)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_follow_the_formula_scaled_by_the_batch(schedule):
    options, rate = SCHEDULES[schedule]
    params = OptimParams(schedule=schedule, **options)
    optimizer = build_optimizer(nn.Linear(2, 2), params, batch_size=32)
    stepped = build_schedule(optimizer, params, 32, epochs=10, steps_per_epoch=7)
    for step in range(71):
        stepped.step_update(step)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate(step), rel=1e-9), step


@pytest.mark.parametrize(
    ("more", "what"),
    [({"schedule": "step"}, "milestones"), ({"milestones": (8,)}, "milestones"), ({"warmup_steps": 5}, "warmup_steps")],
)
def test_schedules_that_mean_nothing_are_refused(more, what):
    with pytest.raises(ValueError, match=what):
        OptimParams(lr=1e-4, **more)


def test_rates_decay_by_layer():
    """timm's rule: the stem is layer 0, block i layer i + 1, the rest the last; each rate is half the next one's."""

    class Layered(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(2, 2)
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.top = nn.Linear(2, 2)

        def group_matcher(self, coarse=False):
            return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}

    model = Layered()
    params = OptimParams(lr=1.0, lr_batch_size=1, schedule="poly", layer_decay=0.5)
    optimizer = build_optimizer(model, params, batch_size=1)
    build_schedule(optimizer, params, 1, epochs=1, steps_per_epoch=4).step_update(1)
    factors = {"stem": 1 / 16, "blocks.0": 1 / 8, "blocks.1": 1 / 4, "blocks.2": 1 / 2, "top": 1.0}
    found = groups_of(model, optimizer)
    assert {name.rpartition(".")[0] for name in found} == factors.keys() and len(found) == 10
    for name, (rate, _) in found.items():
        assert rate == pytest.approx(0.75 * factors[name.rpartition(".")[0]])


def test_the_first_step_of_lamb():
    """Both averages are the gradient's own then: a step along sign(g) + λw, as long as the weight; biases follow."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    params = OptimParams(optimizer="lamb", lr=0.01, weight_decay=0.1, lr_batch_size=8)
    optimizer = build_optimizer(model, params, batch_size=8)
    weight, bias = (p.detach().clone() for p in model.parameters())
    model(x).square().sum().backward()
    optimizer.step()
    direction = model.weight.grad.sign() + 0.1 * weight
    expected = weight - 0.01 * weight.norm() / direction.norm() * direction
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.bias.detach(), bias - 0.01 * model.bias.grad.sign(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("decay_all", [True, False])
def test_new_parameters_have_their_own_rate_at_every_step(decay_all):
    model = Small()
    optimizer = build_optimizer(model, PARAMS, 32, new={"new.weight", "new.bias"}, new_factor=20.0, decay_all=decay_all)
    plain = build_optimizer(Small(), PARAMS, 32)
    schedules = [build_schedule(each, PARAMS, 32, epochs=3, steps_per_epoch=10) for each in (optimizer, plain)]
    for step in (0, 5, 10, 20, 30):
        for schedule in schedules:
            schedule.step_update(step)
        rate = plain.param_groups[0]["lr"]
        for name, (value, decay) in groups_of(model, optimizer).items():
            assert value == pytest.approx(20 * rate if name.startswith("new") else rate)
            assert decay == (0.05 if decay_all or name in ("old.weight", "new.weight") else 0.0)


def test_a_converted_model_has_no_layer_wise_rates():
    params = dataclasses.replace(PARAMS, layer_decay=0.7)
    with pytest.raises(UserError, match="layer_decay"):
        build_optimizer(Small(), params, 16, new={"new.weight"}, new_factor=2.0)


def test_frozen_parameters_are_in_no_group():
    model = Small()
    model.old.requires_grad_(False)
    optimizer = build_optimizer(model, PARAMS, 16, new={"new.weight", "new.bias"}, new_factor=20.0, decay_all=True)
    assert set(groups_of(model, optimizer)) == {"new.weight", "new.bias", "table"}
