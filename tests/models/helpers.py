"""Helpers for the tests of all families: small models, files of tensors and of weights, and measures of error."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.optim._param_groups import param_groups_layer_decay
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import repro.models  # noqa: F401  registers the models
from repro.models.registry import build_denoiser, build_model
from repro.models.weights import METADATA_KEY, adapt_to_size, load_state, save_weights, translate_official

# families of `Hierarchy`, and those whose tokens have one grid but for timm's own: all that have a nano for these tests
HIERARCHICAL = tuple(name.removesuffix("_nano_144") for name in timm.list_models("*_nano_144"))
PLAIN = "_nano_patch16_144"
OWN = tuple(n.removesuffix(PLAIN) for n in timm.list_models(f"*{PLAIN}", exclude_filters=["deit_*", "t5_softmax_*"]))
DENOISERS = [(f"{name}_nano_patch4", {}) for name in ("dit", "dit3", "dit5")]
DENOISERS += [("dit_nano_patch4", {"cpe": True, "learn_sigma": True})]
PREPROCESSING = {"input_size": [3, 144, 144], "interpolation": "bicubic", "crop_pct": 1.0}
PREPROCESSING |= dict.fromkeys(("mean", "std"), [0.5] * 3)


class Named(torch.Tensor):
    """A kind of tensor of its own."""


class Calls(TorchFunctionMode):
    """A mode that sees each function that is called."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def nano_name(family: str) -> str:
    """The registered name of a family's small model for images of 144 x 144 pixels."""
    return f"{family}_nano_144" if family in HIERARCHICAL else f"{family}_nano_patch16_144"


def nano(family: str, **options) -> nn.Module:
    """A family's small model with ten classes, in eval mode; always the same weights."""
    torch.manual_seed(0)
    return timm.create_model(nano_name(family), **{"num_classes": 10, **options}).eval()


def small_vittt(**options) -> nn.Module:
    """A Vittt of one narrow block, with no parameter as at the start."""
    return shaken(nano("vittt", **{"depth": 1, "embed_dim": 32, "img_size": 48, "drop_path_rate": 0.0} | options))


def count(module: nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in module.parameters())


def shaken(module: nn.Module) -> nn.Module:
    """Move every parameter away from its initial value, so that zeros and ones hide nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def denoiser(name: str = "dit3_nano_patch4", **options) -> nn.Module:
    """A small denoiser for images of one channel; always the same weights, none as at the start."""
    torch.manual_seed(0)
    return shaken(build_denoiser(name, **{"embed_dim": 24, "depth": 2, **options}))


def draw_noisy(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Images of noise for a denoiser, their steps and their classes."""
    torch.manual_seed(1)
    return torch.randn(batch, 1, 12, 20), torch.randint(1000, (batch,)), torch.arange(batch)


class DenseModel(nn.Module):
    """A model that is built on a pyramid."""

    def __init__(self, pyramid: nn.Module):
        super().__init__()
        self.pyramid, self.head = pyramid, nn.Linear(3, 3)

    def group_matcher(self, coarse: bool = False) -> dict:
        return self.pyramid.group_matcher(coarse, prefix="pyramid.")


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of timm's layer decay for the learning rate of each parameter."""
    groups = param_groups_layer_decay(model, layer_decay=decay)
    scales = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    return {name: scales[id(parameter)] for name, parameter in model.named_parameters()}


def frozen_statistics(model: nn.Module) -> nn.Module:
    """The model in training mode, but for batch norms, whose statistics would mix the images of a batch."""
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


@contextmanager
def state_unchanged(model: nn.Module) -> Iterator[None]:
    """Fail where the block changes a tensor of the model's state."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def relative(ours: Tensor, truth: Tensor) -> float:
    """The largest error as a share of the largest true value."""
    assert ours.shape == truth.shape
    return ((ours.double() - truth.double()).abs().max() / truth.double().abs().max()).item()


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Return the gradient of the sum of all squared outputs, by parameter."""
    model.zero_grad()
    out = model(*inputs)
    sum(each.square().sum() for each in ([out] if isinstance(out, Tensor) else out)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_recomputing_changes_nothing(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Of the gradients, which it returns, in the backward pass of a model with stochastic depth or without."""
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        found.append(gradients(model, *inputs))
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, msg=lambda text, name=name: f"{name}: {text}")
    return found[0]


def read_data(file: str, prefix: str = "") -> dict[str, Tensor]:
    """The tensors in a file of tests/data whose names begin with the prefix, without it."""
    with np.load(Path(__file__).parents[1] / "data" / file) as stored:
        names = [name for name in stored if name.startswith(prefix) and stored[name].dtype.kind != "U"]
        return {name.removeprefix(prefix): torch.from_numpy(np.asarray(stored[name])) for name in names}


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load_official(model: nn.Module, state: dict[str, Tensor], trained_size: tuple[int, int] | None = None) -> None:
    """Load the tensors of an official file into a model in the way that building a model from the file does."""
    state = translate_official(state, type(model).__module__)
    state = adapt_to_size(model, state, trained_size) if trained_size else state
    load_state(model, state, f"official weights do not fit {type(model).__name__} as built")


def save_model(path: Path, name: str, *, model=None, side: int = 144, classes=10, task=None, **options) -> nn.Module:
    """Write the file that a training leaves, of random weights or of a model built so; returns the model."""
    names = [f"class {i}" for i in range(classes)] if isinstance(classes, int) else classes
    options = {**options, "num_classes": len(names), "img_size": side}
    if model is None:
        torch.manual_seed(1)
        model = shaken(build_model(name, **options)).eval()
    preprocessing = PREPROCESSING | {"input_size": [3, side, side]}
    save_weights(path, model, name=name, options=options, preprocessing=preprocessing, classes=names, task=task)
    return model


def assert_official_part(part: nn.Module, data: dict[str, Tensor], *, run=None, rename=None, backward=1e-5) -> Tensor:
    """The part has the output of the release and the gradients of its input and of the parameters that are stored.

    `run` calls the part in place of `part(x)`; `rename` translates the keys of the release. Returns the output.
    """
    rename = rename or (lambda state: state)
    part.load_state_dict(rename(below(data, "state_dict/")))
    x = data["x"].clone().requires_grad_()
    out = run(part, x) if run else part(x)
    out.backward(data["grad_out"] if "grad_out" in data else data["cot"])
    assert relative(out, data["out"]) < 1e-5
    assert relative(x.grad, data["grad_x"]) < backward
    stored = rename(below(data, "grads/"))
    errors = {name: relative(part.get_parameter(name).grad, expected) for name, expected in stored.items()}
    assert errors and max(errors.values()) < backward, errors
    return out


def rewrite_description(path: Path, change: Callable[[dict], Any] = lambda described: None) -> dict:
    """Change how a weights file describes its model, as a version of this project without checksums would have."""
    with safe_open(path, framework="pt") as stream:
        described = json.loads(stream.metadata()[METADATA_KEY])
    del described["checksum"]
    change(described)
    save_file(load_file(path), path, metadata={METADATA_KEY: json.dumps(described)})
    return described
