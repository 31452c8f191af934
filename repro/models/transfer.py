"""The weights of a classification run, or of a release, as the start of an adapter's backbone, every key accounted for."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.errors import UserError
from .adapter import ClasslessViT, ViTAdapter
from .weights import build_from_weights, is_official, read_metadata, read_official

_NOT_NEEDED = re.compile(r"(norm|fc_norm|head)\.")  # what a backbone has behind its blocks
_OF_THE_TASK = {"num_classes", "img_size", "drop_rate", "drop_path_rate"}  # options that are no part of the architecture


def load_backbone(adapter: ViTAdapter, path: Path) -> dict[str, str]:
    """Fill an adapter's backbone from a weights file, strictly.

    Args:
        adapter: made by `build_adapter`.
        path: what `save_weights` wrote, or an official release (for a ViT, timm's names).

    Returns:
        A line for every key: of the file, `used` or `expected: not needed` (norm and head; a ViT's class token); of the adapter,
        where the file has none, `expected: new` (all but the backbone; a ViT's layer scales).

    Raises:
        UserError: no such file or an unreadable one; another model, or other options; keys that are missing, left over or of
            another shape. The adapter is then as it was.
    """
    name, options = adapter.built_from
    state = _read(adapter, Path(path), name, options)
    own, is_vit = adapter.trunk.state_dict(), isinstance(adapter.backbone, ClasslessViT)
    report, problems = {}, []
    for key, value in state.items():
        if key in own:
            report[key] = "used"
            if value.shape != own[key].shape:
                problems.append(f"{key} is {tuple(value.shape)}, expected {tuple(own[key].shape)}")
        elif _NOT_NEEDED.match(key) or (is_vit and key == "cls_token"):
            report[key] = "expected: not needed"
        else:
            problems.append(f"{key} not used")
    scales = {key for key in own if re.search(r"\.ls[12]\.gamma$", key)} if is_vit else set()
    added = scales if scales.isdisjoint(state) else set()
    problems += [f"{key} missing" for key in own if key not in state and key not in added]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        advice = "; give it the training's img_size" if any(problem.startswith("pos_embed is") for problem in problems) else ""
        raise UserError(f"{path}: does not fit the backbone {name} as built: {shown}{advice}")
    adapter.trunk.load_state_dict(own | {key: state[key] for key in own if key in state})
    filled = {f"{adapter.trunk_name}.{key}" for key in own if key in state}
    return report | {key: "expected: new" for key in adapter.state_dict() if key not in filled}


def _read(adapter: ViTAdapter, path: Path, name: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The file's state dict under our names, the file being of this model by all that it says of itself."""
    official = is_official(path)
    if official:
        translate = getattr(sys.modules[type(adapter.trunk).__module__], "official_state_dict", None)
        if translate is None and not isinstance(adapter.backbone, ClasslessViT):
            raise UserError(f"{path}: no file of this project, and no official weights are known for {name}")
        state = read_official(path)
        return translate(state) if translate else state
    metadata = read_metadata(path)
    if metadata["model"] != name:
        raise UserError(f"{path}: holds weights of {metadata['model']}, not of {name}")
    theirs, ours = ({k: v for k, v in of.items() if k not in _OF_THE_TASK} for of in (metadata["options"], options))
    if theirs != ours:
        raise UserError(f"{path}: holds a {name} built with {theirs or 'no options'}, the backbone is built with {ours or 'none'}")
    return build_from_weights(path)[0].state_dict()
