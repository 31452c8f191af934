"""Registry of models: building by name, and the facts about a model that records need.

Classifiers and backbones are registered with timm. Denoisers map a noisy input, a timestep and a label to noise, which
timm's users do not expect of a model, so they are registered here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import timm
import torch
from torch import nn

from ..core.errors import did_you_mean

# sizes that some models divide by, while others build a model without blocks
_POSITIVE = "depth", "embed_dim", "num_heads", "patch_size", "in_chans", "in_channels", "mlp_ratio"
_DENOISERS: dict[str, Callable[..., nn.Module]] = {}  # name -> function that builds the denoiser


def register_denoisers(model_class: type[nn.Module], sizes: Mapping[str, Mapping[str, Any]]) -> None:
    """Register denoisers: `sizes` maps the name of each to the arguments that build it."""
    _DENOISERS.update({name: partial(model_class, **options) for name, options in sizes.items()})


def denoiser_names() -> list[str]:
    """Return the names of all denoisers."""
    return list(_DENOISERS)


def build_denoiser(name: str, **options: Any) -> nn.Module:
    """Build a registered denoiser, with options that override its own; raises ValueError as `build_model`."""
    if name not in _DENOISERS:
        hint = did_you_mean(name, _DENOISERS)
        raise ValueError(f"{name}: {'not a denoiser' if timm.is_model(name) else 'no such denoiser'}{hint}")
    return build_model(name, **options)


def require_known(name: str) -> None:
    """Raise a ValueError with a suggestion unless a model is registered under this name; a tag of timm's is ignored."""
    if name not in _DENOISERS and not timm.is_model(name):
        hint = did_you_mean(name.partition(".")[0], timm.list_models()) or "; timm.list_models() lists all names"
        raise ValueError(f"{name}: no such model{hint}")


def build_model(name: str, *, img_size: int | tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """Build a model of this project or of timm, or a denoiser; wrong arguments raise one-line errors.

    The model's attribute `built_from` keeps (name, options); `checkpoints.require_same_architecture` compares them with
    those of a weights file. `img_size` is ignored by models without this option.

    Raises:
        ValueError: an unknown name, or options that the model refuses.
    """
    require_known(name)
    size = {} if img_size is None else {"img_size": img_size}
    create = _DENOISERS.get(name) or partial(timm.create_model, name)
    try:
        for key in _POSITIVE:
            if isinstance(value := options.get(key), int | float) and value <= 0:
                raise ValueError(f"{key} {value}: expected more than 0")
        try:
            model = create(**size, **options)
        except TypeError as error:
            if not size or "img_size" not in str(error):
                raise
            model = create(**options)
    except (TypeError, ValueError, AssertionError, ArithmeticError) as error:
        # the overlay holds the tensors of a file
        given = {key: value for key, value in (size | options).items() if key != "pretrained_cfg_overlay"}
        raise ValueError(f"{name}: cannot be built with {given}: {error}") from None
    model.built_from = name, size | options
    return model


def family_module(name: str) -> str:
    """Return the module that defines a registered model, such as `repro.models.vittt` or a module of timm."""
    return _DENOISERS[name].func.__module__ if name in _DENOISERS else timm.model_entrypoint(name).__module__


def kernel_backend(model: nn.Module, dtype: torch.dtype) -> str:
    """Return the backend of the model's operators on its device for activations of `dtype`, as records state it.

    A model without operators of this project returns `torch`.
    """
    return model.selected_backend(dtype) if hasattr(model, "selected_backend") else "torch"
