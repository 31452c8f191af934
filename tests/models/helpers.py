"""What the tests of all families share: small models, parameters away from their initial values, and a measure of
error.
"""

import timm
import torch
from torch import Tensor, nn

import repro.models  # noqa: F401  registers the models
from repro.models.weights import adapt_to_size, load_state, translate_official

# families of `Hierarchy`, and those whose tokens have one grid but for timm's own: all that have a nano for these tests
HIERARCHICAL = tuple(name.removesuffix("_nano_144") for name in timm.list_models("*_nano_144"))
OWN = tuple(
    name.removesuffix("_nano_patch16_144")
    for name in timm.list_models("*_nano_patch16_144", exclude_filters=["deit_*", "t5_softmax_*"])
)


def nano_name(family: str) -> str:
    """The registered name of a family's small model for images of 144 x 144 pixels."""
    return f"{family}_nano_144" if family in HIERARCHICAL else f"{family}_nano_patch16_144"


def nano(family: str, **options) -> nn.Module:
    """A family's small model with ten classes, in eval mode; always the same weights."""
    torch.manual_seed(0)
    return timm.create_model(nano_name(family), **{"num_classes": 10, **options}).eval()


def shaken(module: nn.Module) -> nn.Module:
    """Move every parameter away from its initial value, so that zeros and ones hide nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def relative(ours: Tensor, truth: Tensor) -> float:
    """The largest error as a share of the largest true value."""
    assert ours.shape == truth.shape
    return ((ours.double() - truth.double()).abs().max() / truth.double().abs().max()).item()


def load_official(model: nn.Module, state: dict[str, Tensor], trained_size: tuple[int, int] | None = None) -> None:
    """What building a model from an official file does with the tensors of the file."""
    state = translate_official(state, type(model).__module__)
    state = adapt_to_size(model, state, trained_size) if trained_size else state
    load_state(model, state, f"official weights do not fit {type(model).__name__} as built")
