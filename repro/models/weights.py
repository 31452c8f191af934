"""Weights on disk, loaded strictly: this project's own files, and those that the authors of a family publish.

Our own are safetensors with the architecture and the preprocessing inside. Official ones are checkpoints of PyTorch (or bare
safetensors) that say neither; the family's module translates their names by its `official_state_dict`.
"""

import argparse
import json
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from ..core.errors import UserError
from ..core.record import atomic
from .backbone import insert_tokens, remove_tokens
from .registry import build_model

_KEY = "vision_ttt_repro"  # the one metadata key; several would be written in an order that changes from run to run
# run settings that training code saves beside the weights, read as data: argparse's, and yacs' CfgNode (Swin's, and ViT3's)
_SETTINGS = [argparse.Namespace, (OrderedDict, "yacs.config.CfgNode")]


def save_weights(
    path: Path,
    model: nn.Module,
    *,
    name: str,
    options: dict[str, Any],
    preprocessing: dict[str, Any],
    classes: list[str],
    task: dict[str, Any] | None = None,
) -> None:
    """Write a model's state atomically, with what is needed to build and use it.

    Args:
        path: the .safetensors file.
        model: any model of the registry.
        name: its registered name.
        options: keyword arguments that `timm.create_model` was given beside the name (JSON values).
        preprocessing: evaluation transform: input_size, interpolation, crop_pct, mean, std (as timm names them).
        classes: class names, by output index.
        task: of a dense model, whose backbone has that name: its `name` and the params of which the rest is built; None for a classifier.
    """
    metadata = {"model": name, "options": options, "preprocessing": preprocessing, "classes": classes} | ({"task": task} if task else {})
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    with atomic(path) as temporary:
        save_file(state, temporary, metadata={_KEY: json.dumps(metadata, sort_keys=True)})


def read_metadata(path: Path) -> dict[str, Any]:
    """What `save_weights` put beside the tensors: model, options, preprocessing, classes, and of a dense model its task.

    Raises:
        UserError: no such file, not a readable safetensors file (for instance cut short), or not written by this project.
    """
    with _open(path) as stream:
        metadata = stream.metadata() or {}
    if _KEY not in metadata:
        raise UserError(f"{path}: a safetensors file without this project's metadata; it cannot say which model it belongs to")
    return json.loads(metadata[_KEY])


def is_official(path: Path) -> bool:
    """Whether a file is one of another project: any but a .safetensors file with this project's metadata.

    Raises:
        UserError: no such file, or a .safetensors file that cannot be read.
    """
    if path.suffix != ".safetensors" and path.is_file():
        return True
    with _open(path) as stream:
        return _KEY not in (stream.metadata() or {})


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
    state = _read_safetensors(path)
    problems = _misfits(model, state)
    if problems:
        raise UserError(f"{path}: does not fit {name} as built: {problems}; its options were {metadata['options']}")
    model.load_state_dict(state)
    return metadata


def build_from_weights(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier that a weights file describes, filled with it and in eval mode, and the file's metadata.

    Raises:
        UserError: as `load_weights`, and a file of a dense model.
    """
    metadata = read_metadata(path)
    if "task" in metadata:
        raise UserError(f"{path}: holds a model that can {metadata['task']['name']}, no classifier; `repro predict` uses it")
    model = build_model(metadata["model"], **metadata["options"])
    load_weights(path, model, name=metadata["model"])
    return model.eval(), metadata


def read_official(path: Path) -> dict[str, Tensor]:
    """The state dict in a file that a family's authors publish, under the names of their model.

    A checkpoint's `model` or `state_dict` is taken out and what lies beside it (optimiser, arguments) is not used. DataParallel's
    `module.` and mmcls' `backbone.` are cut off the names, and mmcls' `head.fc.` becomes `head.`.

    Raises:
        UserError: no such file, an unreadable one, one that holds other objects than data, or no state dict.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such weights file")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_checkpoint(path)
    if isinstance(content, Mapping):
        content = next((content[key] for key in ("model", "state_dict") if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: holds no state dict, neither itself nor as `model` or `state_dict`")
    state = {name.removeprefix("module."): value for name, value in content.items()}
    if any(name.startswith("backbone.") for name in state):
        state = {re.sub(r"^head\.fc\.", "head.", name.removeprefix("backbone.")): value for name, value in state.items()}
    if len(state) < len(content):
        raise UserError(f"{path}: holds two models' weights under names that differ by a prefix")
    return state


def load_official(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Fill a model with weights of its official release, strictly: every key used, none missing, every shape equal.

    One exception is asked for by building the model at another `img_size` than its family's default: then a position embedding
    of the default's length is resampled to the model's grid (bicubic; class tokens keep theirs). At the default size it is not,
    so that weights of another patch stride are an error.

    Args:
        model: of a family whose module has an `official_state_dict`.
        state_dict: tensors by their official names, as `read_official` gives them.

    Raises:
        UserError: a family without official weights, or weights that do not fit; the model is then as it was.
    """
    family = type(model).__name__
    translate = getattr(sys.modules[type(model).__module__], "official_state_dict", None)
    if translate is None:
        raise UserError(f"{family}: no official weights are known for this family")
    state = _resample_positions(model, translate(state_dict))
    problems = _misfits(model, state)
    if problems:
        raise UserError(f"official weights do not fit {family} as built: {problems}")
    model.load_state_dict(state)


def _resample_positions(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`pos_embed` (1, T, D) of the default image size on the grid of a model that was built for another."""
    default = getattr(model, "pretrained_cfg", {}).get("input_size")
    if default is None or "pos_embed" not in state:
        return state
    before, after = model.grid_of(*default[-2:]), model.grid_size
    shared = model.pos_embed.shape[1] > after[0] * after[1]  # class tokens have their rows in it, and no table of their own
    positions, targets = (model.prefix_positions(h * w) if shared else () for h, w in (before, after))
    embedding = state["pos_embed"]
    if embedding.ndim != 3 or embedding.shape[1] != before[0] * before[1] + len(positions):
        return state
    class_tokens = embedding[:, list(positions)]
    patches = remove_tokens(embedding, positions)
    patches = resample_abs_pos_embed(patches, list(after), list(before), num_prefix_tokens=0, antialias=False)
    return state | {"pos_embed": insert_tokens(patches, class_tokens, targets)}


def _misfits(model: nn.Module, state: Mapping[str, Tensor]) -> str:
    """How a state dict differs from the model's, the first three differences by name; empty where it fits."""
    own = model.state_dict()
    problems = [f"{key} missing" for key in own if key not in state]
    problems += [f"{key} not used" for key in state if key not in own]
    problems += [
        f"{key} is {tuple(state[key].shape)}, expected {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    return "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")


def _read_checkpoint(path: Path) -> Any:
    """What `torch.save` wrote, without running code from the file: tensors, plain data and `_SETTINGS`."""
    try:
        with torch.serialization.safe_globals(_SETTINGS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found:
            advice = "which are not loaded from a file; save its state dict alone"
            raise UserError(f"{path}: holds objects of {found[1]}, {advice}") from None
        why = "no pickle of data"
    except Exception as error:  # a damaged file raises whatever its bytes happen to mean
        why = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
    raise UserError(f"{path}: not a readable checkpoint of PyTorch ({why}); it may have been cut short while copying")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with _open(path) as stream:
        return {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 (no mapping, and not iterable)


def _open(path: Path):
    if not path.is_file():
        raise UserError(f"{path}: no such weights file")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); it may have been cut short while copying") from None
