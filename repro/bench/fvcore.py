"""What the tool fvcore counts besides multiply-adds, for `macs_g_fvcore`: ViT³'s convention for its models' FLOPs.

fvcore counts products and convolutions as `counter` does. Its default handlers add operations for each value:

- 5 in a LayerNorm or GroupNorm with a learned scale, 4 without one, as in the keys' instance norm of T5;
- 2 in a BatchNorm at inference, 1 without a scale;
- 4 at the output of a bilinear interpolation, 1 at that of a nearest one.

A gradient inside the forward pass counts as the product or convolution that it is; fvcore sees it only where the code
spells it out as one. Operators of this project, such as the selective scan, count by our formulas. VMamba's authors
gave fvcore handlers for theirs; that count is the model's `paper_mac_terms`.
"""

import torch
from torch.overrides import TorchFunctionMode

from ..models.dit import Denoiser
from ..models.inner_mixer import KeyNorm
from .counter import OperatorCounter

_PER_OUTPUT = {"bilinear": 4, "nearest": 1}  # mode of an interpolation -> operations per output


def count_extras(model: torch.nn.Module, image_size: tuple[int, int]) -> dict[str, int]:
    """Count `norms` and `interpolation`, which fvcore adds in a forward pass of one (H, W) input.

    It runs on the model's own device. The input of a denoiser of latents has the size of the latents.
    """
    device = next(model.parameters()).device
    if isinstance(model, Denoiser):
        numbers = torch.zeros(1, dtype=torch.long, device=device)
        inputs = torch.empty(1, model.in_channels, *image_size, device=device), numbers, numbers
    else:
        inputs = (torch.empty(1, 3, *image_size, device=device),)
    counter = _ExtrasCounter()

    def count_keys(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Count T5's norm of the keys: our code spells it out, the release calls one operator, which fvcore sees."""
        if module.kind == "instance":
            counter.extras["norms"] += 4 * out.numel()

    hooks = [module.register_forward_hook(count_keys) for module in model.modules() if isinstance(module, KeyNorm)]
    with torch.no_grad(), counter, _InterpolationCounter(counter.extras):
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return counter.extras


class _ExtrasCounter(OperatorCounter):
    """A counter whose `extras` are what fvcore adds for norms; `interpolation` is left to `_InterpolationCounter`."""

    def __init__(self) -> None:
        super().__init__()
        self.extras = {"norms": 0, "interpolation": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._opname
        if name in ("native_layer_norm", "native_group_norm"):
            scale = args[2 if name == "native_layer_norm" else 1]
            self.extras["norms"] += args[0].numel() * (4 if scale is None else 5)
        elif "batch_norm" in name:
            self.extras["norms"] += args[0].numel() * (1 if args[1] is None else 2)
        return out


class _InterpolationCounter(TorchFunctionMode):
    """A counter that adds to `extras["interpolation"]` at the Python call of `interpolate`.

    A dispatch mode could miss it: once PyTorch's compiler is loaded, the operator is decomposed before it gets there.
    """

    def __init__(self, extras: dict[str, int]) -> None:
        super().__init__()
        self.extras = extras

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.nn.functional.interpolate:
            mode = kwargs.get("mode", args[3] if len(args) > 3 else "nearest")  # the fourth argument, and its default
            self.extras["interpolation"] += out.numel() * _PER_OUTPUT.get(mode, 0)
        return out
