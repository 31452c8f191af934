"""Building a registered model by name, and facts about a model that results record."""

from typing import Any

import timm
import torch
from torch import nn

from ..core.errors import did_you_mean


def require_known(name: str) -> None:
    """Raise a ValueError with a suggestion unless a model is registered under this name; a tag of timm's is ignored."""
    if not timm.is_model(name):
        hint = did_you_mean(name.partition(".")[0], timm.list_models()) or "; timm.list_models() lists all names"
        raise ValueError(f"{name}: no such model{hint}")


def build_model(name: str, *, img_size: int | tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """`timm.create_model` for this project's families and timm's own; wrong arguments raise one-line errors.

    The model's attribute `built_from` keeps (name, options). Models that take images of any size do without `img_size`.

    Raises:
        ValueError: an unknown name, or options that the model refuses.
    """
    require_known(name)
    size = {} if img_size is None else {"img_size": img_size}
    try:
        try:
            model = timm.create_model(name, **size, **options)
        except TypeError as error:
            if not size or "img_size" not in str(error):
                raise
            model = timm.create_model(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{name}: cannot be built with {size | options}: {error}") from None
    model.built_from = name, size | options
    return model


def family_module(name: str) -> str:
    """The dotted name of the module that defines a registered model: `repro.models.vittt`, or a module of timm."""
    return timm.model_entrypoint(name).__module__


def kernel_backend(model: nn.Module, dtype: torch.dtype) -> str:
    """The implementation of the model's own operators that runs on its device for activations of `dtype`, as results record it.

    `torch` for a model without operators of this project.
    """
    return model.selected_backend(dtype) if hasattr(model, "selected_backend") else "torch"
