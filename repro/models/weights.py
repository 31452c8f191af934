"""Weights on disk: safetensors with the architecture and the preprocessing inside, loaded strictly."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..core.errors import UserError
from ..core.record import atomic
from .registry import build_model

_KEY = "vision_ttt_repro"  # the one metadata key; several would be written in an order that changes from run to run


def save_weights(path: Path, model: nn.Module, *, name: str, options: dict[str, Any], preprocessing: dict[str, Any], classes: list[str]) -> None:
    """Write a model's state atomically, with what is needed to build and use it.

    Args:
        path: the .safetensors file.
        model: any model of the registry.
        name: its registered name.
        options: keyword arguments that `timm.create_model` was given beside the name (JSON values).
        preprocessing: evaluation transform: input_size, interpolation, crop_pct, mean, std (as timm names them).
        classes: class names, by output index.
    """
    metadata = {"model": name, "options": options, "preprocessing": preprocessing, "classes": classes}
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    with atomic(path) as temporary:
        save_file(state, temporary, metadata={_KEY: json.dumps(metadata, sort_keys=True)})


def read_metadata(path: Path) -> dict[str, Any]:
    """What `save_weights` put beside the tensors: model, options, preprocessing, classes.

    Raises:
        UserError: no such file, not a readable safetensors file (for instance cut short), or not written by this project.
    """
    with _open(path) as stream:
        metadata = stream.metadata() or {}
    if _KEY not in metadata:
        raise UserError(f"{path}: a safetensors file without this project's metadata; it cannot say which model it belongs to")
    return json.loads(metadata[_KEY])


def load_weights(path: Path, model: nn.Module, *, name: str) -> dict[str, Any]:
    """Load weights into a model, strictly: every key used, none missing, every shape equal.

    Args:
        path: file written by `save_weights`.
        model: the model to fill.
        name: the registered name that the weights must belong to.

    Returns:
        The file's metadata.

    Raises:
        UserError: an unreadable file, weights of another model, or of the same model with other options.
    """
    metadata = read_metadata(path)
    if metadata["model"] != name:
        raise UserError(f"{path}: holds weights of {metadata['model']}, not of {name}")
    with _open(path) as stream:
        state = {key: stream.get_tensor(key) for key in stream.keys()}
    own = model.state_dict()
    problems = [f"{key} missing" for key in own if key not in state]
    problems += [f"{key} not used" for key in state if key not in own]
    problems += [
        f"{key} is {tuple(state[key].shape)}, expected {tuple(own[key].shape)}" for key in own if key in state and state[key].shape != own[key].shape
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise UserError(f"{path}: does not fit {name} as built: {shown}; its options were {metadata['options']}")
    model.load_state_dict(state)
    return metadata


def build_from_weights(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that a weights file describes, filled with it and in eval mode, and the file's metadata."""
    metadata = read_metadata(path)
    model = build_model(metadata["model"], **metadata["options"])
    load_weights(path, model, name=metadata["model"])
    return model.eval(), metadata


def _open(path: Path):
    if not path.is_file():
        raise UserError(f"{path}: no such weights file")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); it may have been cut short while copying") from None
