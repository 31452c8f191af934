"""Weights files: this project's own, and those that the authors of a family publish. All are loaded strictly.

The project's files are safetensors with architecture and preprocessing in their metadata. Official files are PyTorch
checkpoints, or safetensors without such metadata; the function `official_state_dict` of the family's module translates
their keys. `checkpoints.open_weights` opens any of them.
"""

import argparse
import dataclasses
import json
import pickle
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..core.errors import UserError
from ..core.hashing import hash_file, require_hash, require_intact_zip
from ..core.record import atomic
from .backbone import rename_keys
from .reading import UNNAMED_READING, Reading

State = Mapping[str, Tensor]  # tensors by name, as of `state_dict`

# a single metadata key, because safetensors writes several keys in an order that varies from run to run
METADATA_KEY = "vision_ttt_repro"
# required and optional metadata; an unknown key means damage or a later version. A new key of `save_weights` belongs
# here, or its files cannot be read; it must sort after `checksum`, see `_CHECKSUM`
_NEEDED = {"model": str, "options": dict, "preprocessing": dict, "classes": list}
_FURTHER = {"checksum": str, "reading": (dict, str), "task": dict}
# pattern for the header, where the metadata are JSON inside a JSON string, with escaped quotes; `checksum` is the first
# of the sorted keys
_CHECKSUM = re.compile(rb'\{\\"checksum\\": \\"([0-9a-f]{64})\\"')
# dtypes of weights; `load_state` checks that integers belong to integer buffers of the model
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8}
_DTYPES |= {torch.int8, torch.int16, torch.int32, torch.int64}
_NAMED_HASH = re.compile(r"-([0-9a-f]{8,64})\.")  # torch.hub's file names end in the first digits of the SHA-256
# prefixes that wrappers add to a model's names, in any order and number: DataParallel, torch.compile, and mmcls
_WRAPPED = re.compile(r"^(?:(?:module|_orig_mod|backbone)\.)+")
# settings that training code saves with the weights, which are safe to unpickle: those of argparse, and yacs' CfgNode
# (Swin, ViT3)
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
    """Write a model's state atomically, with all metadata that building and using the model needs.

    Args:
        path: the file, a .safetensors.
        model: the model.
        name, options: the registered name, and the keyword arguments (JSON values) that built the model.
        preprocessing: a classifier's evaluation transform, in timm's names: input_size, interpolation, crop_pct, mean,
            std. A dense model has the fields of its own transform, and a denoiser input_size alone.
        classes: class names in the order of the outputs.
        task: for a dense model around the backbone `name`, the task's `name` and the params that built the rest.

    The file of a Vittt also states every switch of its interpretation, so it keeps its meaning if a default changes.
    `checksum` in the metadata is the SHA-256 of the whole file with zeros in place of the checksum. So it covers names,
    shapes and metadata, too.
    """
    metadata = {
        "checksum": "0" * 64,
        "model": name,
        "options": options,
        "preprocessing": preprocessing,
        "classes": classes,
    }
    if task:
        metadata["task"] = task
    if (reading := next((m.reading for m in model.modules() if hasattr(m, "reading")), None)) is not None:
        metadata["reading"] = dataclasses.asdict(reading)
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    with atomic(path) as temporary:
        save_file(state, temporary, metadata={METADATA_KEY: json.dumps(metadata, sort_keys=True)})
        # the digits replace the zeros in place, so that the header keeps its length
        place, _ = _find_checksum(temporary)
        checksum = hash_file(temporary, digits=64, blank=place)
        with open(temporary, "rb+") as stream:
            stream.seek(place)
            stream.write(checksum.encode())


def open_file(
    path: Path, places: Sequence[str] = ("model", "state_dict")
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read a weights file: its tensors, and the metadata of `save_weights`, or None for a file of another project.

    The metadata are model, options, preprocessing, classes, and the task of a dense model. The options of a Vittt
    include its interpretation if that is not the default. A file without checksum is accepted with a warning on stderr.

    Another project's file may be a state dict, or hold one under a key of `places`, of which the first counts; an
    optimiser or settings are ignored. Prefixes of wrappers are removed, see `_WRAPPED`, also those of compiled
    submodules, and mmcls' `head.fc.` becomes `head.`. A hash at the end of the name, as torch.hub has it, must match.

    Raises:
        UserError: a file that does not exist, cannot be read (perhaps cut short), does not match its checksum or the
            hash in its name, or holds Python objects other than data, no state dict, two tensors under one name, or
            metadata that are not those of a weights file; and as `require_sound`.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such weights file")
    content, metadata = _read_safetensors(path) if path.suffix == ".safetensors" else (None, None)
    if metadata is None:
        if stated := _NAMED_HASH.search(path.name):
            require_hash(path, stated[1], " as its name says; get it again, or rename it if these digits are no hash")
        content = _find_state(_read_checkpoint(path) if content is None else content, places, path)
    require_sound(content, path)
    return content, metadata


def require_sound(state: State, where: Path | str) -> None:
    """Refuse tensors that cannot be trained weights; `where` begins the error.

    Raises:
        UserError: a dtype other than fp16, bf16, fp32, fp64 and integers, a sparse tensor or one without values, or
            values that are not finite.
    """
    for key, value in state.items():
        if value.dtype not in _DTYPES or value.layout is not torch.strided or value.is_meta:
            what = str(value.dtype).removeprefix("torch.")
            raise UserError(
                f"{where}: {key} is {what} ({value.layout}, {value.device}), expected fp16, bf16, fp32, fp64 or integers"
            )
        if not value.isfinite().all():
            many = int((~value.isfinite()).sum())
            raise UserError(
                f"{where}: {key} has {many} values that are not finite: the file is damaged, or its training diverged"
            )


def translate_official(state: State, module: str) -> dict[str, Tensor]:
    """Translate an official state dict by `official_state_dict` of its family; UserError if there is none.

    `module` is the name of the family's module, see `registry.family_module`.
    """
    translate = getattr(sys.modules[module], "official_state_dict", None)
    if translate is None:
        raise UserError("no official weights are known for this family")
    return translate(state)


def classifier_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classifier layers in timm's configuration: none, one, or several of a distilled model."""
    names = config.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def load_state(
    model: nn.Module,
    state: State,
    error: str,
    *,
    not_needed: Callable[[str], bool] = lambda key: False,
    new: Callable[[str], bool] = lambda key: False,
) -> dict[str, str]:
    """Fill a model strictly: no key is missing or unused, shapes are equal, and integers match integer buffers.

    Args:
        model, state: the model, and the tensors under its names.
        error: the beginning of the error message.
        not_needed: returns whether a key of `state` is left out.
        new: returns whether a key of the model keeps its value.

    Returns:
        The status of every key of `state`: `used` or `expected: not needed`.

    Raises:
        UserError: with the first three differences; the model is then unchanged.
    """
    own = model.state_dict()
    used = {key: value for key, value in state.items() if not not_needed(key)}
    filled = {key: value for key, value in own.items() if not new(key)}
    missing = [f"{key} missing" for key in filled if key not in used]
    foreign = [f"{key} not used" for key in used if key not in filled]
    # if no key matches, the file's own keys explain more than the model's missing ones, so they come first
    problems = missing + foreign if used.keys() & filled.keys() else foreign[:2] + missing + foreign[2:]
    problems += [  # `pyramid.load_backbone` gives advice where the error has the words "pos_embed is"
        f"{key} is {tuple(used[key].shape)}, expected {tuple(filled[key].shape)}"
        for key in filled
        if key in used and used[key].shape != filled[key].shape
    ]
    problems += [
        f"{key} is {str(used[key].dtype).removeprefix('torch.')}, expected {str(filled[key].dtype).removeprefix('torch.')}"
        for key in filled
        if key in used and used[key].is_floating_point() != filled[key].is_floating_point()
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"{error}: {'; '.join(problems[:3])}{more}")
    model.load_state_dict(own | used)
    return {key: "used" if key in used else "expected: not needed" for key in state}


def require_finite_outputs(model: nn.Module, where: Path | str) -> None:
    """Make a model raise a UserError that names its weights, `where`, if its outputs are not finite."""

    def check(module: nn.Module, inputs: Any, output: Tensor | Sequence[Tensor]) -> None:
        """Check one output of a classifier, or the feature maps of a pyramid."""
        if not all(each.isfinite().all() for each in ([output] if isinstance(output, Tensor) else output)):
            raise UserError(f"{where}: gives scores that are not finite; the weights are of a training that went wrong")

    model.register_forward_hook(check)


def adapt_to_size(model: nn.Module, state: State, trained_size: tuple[int, int]) -> dict[str, Tensor]:
    """Adapt a state dict from a training at another image size to a model of the same architecture.

    In this project's families, `pos_embed` alone is resampled to the model's grid (bicubic; rows of class tokens are
    kept), if its length belongs to `trained_size`. So weights of another patch size stay unchanged, and a strict load
    refuses them. In timm's families, timm's `checkpoint_filter_fn` resamples, for example, Swin's relative positions.

    `state` has the model's names, with the classifier; `trained_size` is the training's (height, width) in pixels.
    """
    if hasattr(model, "grid_of"):
        return _resample_positions(model, state, trained_size)
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        return dict(state) if adapt is None else adapt(dict(state), model)
    # weights of another architecture: leave the error to the strict load
    except (AttributeError, KeyError, IndexError, RuntimeError, ValueError):
        return dict(state)


def _resample_positions(model: nn.Module, state: State, trained_size: tuple[int, int]) -> dict[str, Tensor]:
    """Compute `adapt_to_size` for one of this project's families; a table of another length stays unchanged."""
    embedding, own = state.get("pos_embed"), getattr(model, "pos_embed", None)
    before, after = model.grid_of(*trained_size), model.grid_size
    if embedding is None or own is None or before == after:
        return dict(state)
    num_prefixes = own.shape[1] - after[0] * after[1]  # rows of class tokens
    if embedding.ndim != 3 or embedding.shape[1] != before[0] * before[1] + num_prefixes:
        return dict(state)
    return {**state, "pos_embed": model.resample_table(embedding, before, after)}


def _read_checkpoint(path: Path) -> Any:
    """Read a `torch.save` file without running code: tensors, plain data and `_SETTINGS`; else a UserError."""
    try:
        require_intact_zip(path)
        with torch.serialization.safe_globals(_SETTINGS), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found:
            advice = "which are never loaded from a file; save the state dict alone"
            raise UserError(f"{path}: holds objects of {found[1]}, {advice}") from None
        why = "no pickle of data"
    except Exception as error:  # a damaged file raises whatever its bytes happen to mean
        why = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
    raise UserError(f"{path}: not a readable checkpoint of PyTorch ({why}); it may have been cut short while copying")


def _find_state(content: Any, places: Sequence[str], path: Path) -> dict[str, Tensor]:
    """Find the state dict in the content of another project's file; see `open_file`."""
    if isinstance(content, Mapping):
        content = next((content[key] for key in places if isinstance(content.get(key), Mapping)), content)
    named = isinstance(content, Mapping) and all(
        isinstance(key, str) and isinstance(x, Tensor) for key, x in content.items()
    )
    if not named or not content:
        raise UserError(
            f"{path}: holds no state dict, neither at its top level nor as {' or '.join(f'`{place}`' for place in places)}"
        )
    try:
        state = rename_keys(content, lambda name: _WRAPPED.sub("", name.replace("._orig_mod.", ".")))
        if any("backbone." in found[0] for name in content if (found := _WRAPPED.match(name))):
            state = rename_keys(state, lambda name: re.sub(r"^head\.fc\.", "head.", name))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return state


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read tensors and this project's metadata (or None) of a safetensors file, and verify a checksum."""
    try:
        with safe_open(path, framework="pt") as stream:
            described = (stream.metadata() or {}).get(METADATA_KEY)
            content = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a readable safetensors file ({error}); it may have been cut short while copying"
        ) from None
    checksum = _find_checksum(path)
    if checksum is not None:
        place, stated = checksum
        why = " as its header says (with zeros in that place), so it is damaged; get it again"
        require_hash(path, stated, why, blank=place)
    return content, None if described is None else _parse_metadata(described, path, verified=checksum is not None)


def _find_checksum(path: Path) -> tuple[int, str] | None:
    """Return the offset and the digits of a safetensors file's checksum, or None if it has none."""
    with open(path, "rb") as stream:
        header = stream.read(8)
        header += stream.read(int.from_bytes(header, "little"))
    found = _CHECKSUM.search(header)
    return found and (found.start(1), found[1].decode())


class _Stated(dict):
    """Metadata of a file; access to a missing key raises a UserError that names the file."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise UserError(
            f"{self.path}: damaged, or of another version: its metadata lack {key!r}; train or get it again"
        )


def _parse_metadata(text: str, path: Path, *, verified: bool) -> dict[str, Any]:
    """Parse the metadata of a file of this project; `verified` tells whether its checksum was compared.

    Only for models whose names begin with `vittt_` do the switches of the file go into the options. For `ladder_vittt_`
    and `softvittt_` the options count as they were given, so a changed default changes these models.

    Raises:
        UserError: the metadata are not those of a weights file.
    """
    kinds = _NEEDED | _FURTHER
    try:
        found = json.loads(text, object_hook=lambda content: _Stated(content, path))
        known = _NEEDED.keys() <= found.keys() <= kinds.keys()
        known = known and all(isinstance(value, kinds[key]) for key, value in found.items())
        known = known and all(isinstance(name, str) for name in found["classes"])
    except (ValueError, AttributeError):
        known = False
    # a checksum at a place that `_CHECKSUM` does not match was not verified
    if not known or ("checksum" in found and not verified):
        raise UserError(
            f"{path}: damaged, or of a later version: its metadata are not those of a weights file; get it again"
        )
    if found.pop("checksum", None) is None:
        line = "has no checksum, so damage would not be noticed; run its stage again"
        print(f"repro: {path}: {line}", file=sys.stderr, flush=True)
    if found["model"].startswith("vittt_"):
        options = {key: value for key, value in found["options"].items() if key != "reading"}
        # a file that states none predates the switches; the defaults build the same model, except for this design
        unnamed = UNNAMED_READING if options.get("design") == "gating" else ""
        try:
            reading = str(Reading.of(found.pop("reading", unnamed)))
        except ValueError as error:
            raise UserError(f"{path}: {error}; another version may have written it") from None
        found["options"] = options | ({"reading": reading} if reading else {})
    return found
