"""Whether a layer may be read in the place of being called.

Where several layers are one product, or a kernel takes the place of a block, weights are read and no layer is called. So
that is for layers that are what the model was built with, and that nobody watches. A layer that was replaced, wrapped,
parametrised, quantised or given another `forward`, and one with a hook, is called. What counts FLOPs finds a block whole.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.module_tracker import ModuleTracker


class Built(NamedTuple):
    """What a layer is built as: one of some classes, with a bias or not (None: whatever), and with these options."""

    kinds: tuple[type[nn.Module], ...]
    bias: bool | None = None
    options: tuple[tuple[str, Any], ...] = ()


def built_conv(kind: type[nn.Conv1d] | type[nn.Conv2d], kernel: int, padding: int, *, bias: bool) -> Built:
    """A convolution of stride 1 that pads with zeros."""
    axes = 1 if kind is nn.Conv1d else 2
    numbers = {"kernel_size": kernel, "padding": padding, "stride": 1, "dilation": 1}
    return Built((kind,), bias, (*((name, (n,) * axes) for name, n in numbers.items()), ("padding_mode", "zeros")))


def are_as_built(owner: nn.Module, layers: Mapping[str, Built]) -> bool:
    """Whether these layers of a module, by name, are as built, and calling them does no more than their class does.

    It takes half a microsecond a layer, and is asked in each forward pass, since hooks and layers come and go.
    """
    if has_global_hook():
        return False
    modules = owner._modules
    for name, (kinds, bias, options) in layers.items():
        layer = modules.get(name)
        if type(layer) not in kinds or is_watched(layer):
            return False
        if bias is not None:
            tensors = layer._parameters
            if (tensors.get("bias") is not None) is not bias:
                return False
            # a quantised or distributed tensor computes by itself what a layer asks of it, and joins no other
            kind = type(tensors.get("weight"))
            if kind is not nn.Parameter and hasattr(kind, "__tensor_flatten__"):
                return False
        for option, value in options:
            if getattr(layer, option) != value:
                return False
    return True


def has_global_hook() -> bool:
    """Whether a hook is on all modules, but for those by which FlopCounterMode knows in which module it counts."""
    if not hooks._has_any_global_hook():
        return False
    forward = (*hooks._global_forward_pre_hooks.values(), *hooks._global_forward_hooks.values())
    backward = hooks._global_backward_pre_hooks or hooks._global_backward_hooks
    return bool(backward) or not all(isinstance(getattr(each, "__self__", None), ModuleTracker) for each in forward)


def is_watched(module: nn.Module) -> bool:
    """Whether a module has a hook, or a `forward` of its own that is not its class's."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def find_bias(layer: nn.Module, zeros: Tensor) -> Tensor:
    """What a linear layer adds: its bias, or what another module in its place makes of zeros (inputs,)."""
    own = layer.bias if type(layer) is nn.Linear else None
    return layer(zeros[None])[0] if own is None else own
