"""What changes the weights of a frozen `Vittt` of one block, and what does not."""

import copy
import io

import torch
from torch import nn
from torch.nn.utils import parametrize

from kernels.tools import check
from repro.models import fused_block


def set_grads(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def write_each(write):
    """A change of a model that calls `write` with every parameter."""

    def change(model):
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)

    return change


def set_data(parameter, factor=0.9):
    parameter.data = factor * parameter.data


def transpose(model):
    """The same elements at the same address in another order."""
    W0 = model.blocks[0].mixer.W0
    W0.data = W0.data.mT


def load(**options):
    return lambda model: model.load_state_dict({k: 0.9 * x for k, x in model.state_dict().items()}, **options)


def replace_parameter(model):
    projection = model.blocks[0].mixer.in_proj
    projection.weight = nn.Parameter(0.9 * projection.weight.detach())


def replace_layer(model):
    mlp = model.blocks[0].mlp
    mlp.fc1_g = nn.Linear(mlp.fc1_g.in_features, mlp.fc1_g.out_features)


class Doubled(nn.Module):
    """A parametrization that doubles its weight."""

    def forward(self, weight):
        return 2 * weight


def parametrize_one(layer):
    return lambda model: parametrize.register_parametrization(layer(model.blocks[0]), "weight", Doubled())


def swap_averages(model):
    """An exponential moving average changes places with the weights."""
    averages = [0.9 * parameter.detach() for parameter in model.parameters()]
    for parameter, average in zip(model.parameters(), averages, strict=True):
        parameter.data, average.data = average.data, parameter.data


def swap_by_inference_tensors(model):
    model.requires_grad_(False)  # a gradient's node would belong to one of both
    with torch.inference_mode():
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(0.9 * parameter, requires_grad=False))


def step(model, **options):
    set_grads(model)
    torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()


def train(model):
    model.requires_grad_().train()
    model(torch.ones(1, 3, 48, 48)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()


def write_uncounted(write):
    """A write that PyTorch does not count, in training."""

    def change(model):
        model.train()
        write(model)
        model.eval()

    return change


write_data = write_each(lambda parameter: parameter.data.mul_(0.9))
UNCOUNTED = {"data.mul_": write_data, "a fused step": lambda model: step(model, fused=True)}
WRITES = {
    "copy_": write_each(lambda parameter: parameter.copy_(0.9 * parameter)),
    "add_": torch.inference_mode()(write_each(lambda parameter: parameter.add_(0.1))),
    "add_ to a part": write_each(lambda parameter: parameter[:1].detach().add_(0.1)),
    "data": write_each(set_data),
    "data, twice": write_each(lambda parameter: [set_data(parameter), set_data(parameter)]),
    "data, transposed": transpose,
    "load": load(),
    "load and assign": load(assign=True),
    "a new parameter": replace_parameter,
    "a new layer": replace_layer,
    "a parametrized projection": parametrize_one(lambda block: block.mixer.in_proj),
    "a parametrized convolution": parametrize_one(lambda block: block.mixer.conv_k),
    "an average": swap_averages,
    "inference tensors": swap_by_inference_tensors,
    "half": lambda model: model.half(),
    "half and back": lambda model: model.half().float(),
    "a step": step,
    "training": train,
    **{f"{name}, in training": write_uncounted(write) for name, write in UNCOUNTED.items()},
}


def watch_gradients(model):
    model.requires_grad_()
    model(torch.ones(1, 3, 48, 48)).sum().backward()


NO_WRITES = {
    "eval": lambda model: model.eval(),
    "train(False)": lambda model: model.train(False),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "to": lambda model: model.to("cpu", torch.float32),
    "state_dict": lambda model: model.state_dict(),
    "save": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "deepcopy": copy.deepcopy,
    "a forward pass": torch.no_grad()(lambda model: model(torch.ones(2, 3, 48, 48))),
    "gradients": watch_gradients,
    "zero_grad": lambda model: model.zero_grad(),
}


@torch.no_grad()
def run(model, images):
    return model(images.to(next(model.parameters()).dtype))


def require_seen(model, change):
    """A frozen model computes after a change what one does that was never frozen; forgets what it kept."""
    images = torch.randn(1, 3, 48, 48)
    before = run(model.freeze(), images)
    change(model)
    found, expected = run(model, images), run(copy.deepcopy(model).train().eval(), images)
    assert torch.equal(found, expected) and not torch.equal(found, before)


def require_kept(model, change, kind):
    """A frozen model has and uses after a change what it kept."""
    images, block = torch.randn(1, 3, 48, 48), model.blocks[0]
    find = torch.no_grad()(lambda: fused_block.find_constants(block, 9, kind))
    expected = run(model, images)
    model.freeze()
    kept = find()
    change(model)
    assert all(a is b for a, b in zip(find(), kept, strict=True))
    assert check.relative_error(run(model, images), expected) < 1e-5
