"""Checks whether the weights of a layer may be read instead of calling the layer.

Code that joins several layers into one product, or replaces a block by fused kernels, reads their weights and bypasses
`forward`. It may do so only for layers that are still as the model built them and that have no hooks. A layer that was
replaced, wrapped, parametrised, quantised, given another `forward` or given a hook must be called.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.module_tracker import ModuleTracker


class Built(NamedTuple):
    """Description of a layer as built: its class, whether it has a bias (None: either), and its attributes."""

    kinds: tuple[type[nn.Module], ...]
    bias: bool | None = None
    options: Mapping[str, Any] = {}


def built_conv(kind: type[nn.Conv1d] | type[nn.Conv2d], kernel: int, padding: int, *, bias: bool) -> Built:
    """Describe a convolution of stride 1 and dilation 1 that pads with zeros."""
    axes = 1 if kind is nn.Conv1d else 2
    numbers = {"kernel_size": kernel, "padding": padding, "stride": 1, "dilation": 1}
    return Built((kind,), bias, {name: (n,) * axes for name, n in numbers.items()} | {"padding_mode": "zeros"})


def are_as_built(owner: nn.Module, layers: Mapping[str, Built]) -> bool:
    """Return whether these child layers of `owner` are as built and have no hooks.

    Every forward pass asks again, because hooks and layers come and go. It takes half a microsecond per layer.
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
            # a tensor subclass (quantised, distributed) overrides the products itself, and cannot be concatenated
            kind = type(tensors.get("weight"))
            if kind is not nn.Parameter and hasattr(kind, "__tensor_flatten__"):
                return False
        for option, value in options.items():
            if getattr(layer, option) != value:
                return False
    return True


def has_global_hook() -> bool:
    """Return whether a global module hook is set, other than those of FlopCounterMode's module tracker."""
    if not hooks._has_any_global_hook():
        return False
    forward = (*hooks._global_forward_pre_hooks.values(), *hooks._global_forward_hooks.values())
    backward = hooks._global_backward_pre_hooks or hooks._global_backward_hooks
    return bool(backward) or not all(isinstance(getattr(each, "__self__", None), ModuleTracker) for each in forward)


def is_watched(module: nn.Module) -> bool:
    """Return whether a module has a hook, or a `forward` set on the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def find_bias(layer: nn.Module, zeros: Tensor) -> Tensor:
    """Return the bias of a linear layer; without one, or for another module in its place, its output for `zeros`.

    `zeros` has the shape (inputs,).
    """
    own = layer.bias if type(layer) is nn.Linear else None
    return layer(zeros[None])[0] if own is None else own
