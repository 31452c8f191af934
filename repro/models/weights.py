"""Weights on disk: this project's own files, and those that the authors of a family publish. All of them are loaded
strictly.

Our own files are safetensors with the architecture and the preprocessing in their metadata. Official files are
checkpoints of PyTorch, or safetensors without such metadata; they name neither, and the function `official_state_dict`
of the family's module translates their keys. `checkpoints.open_weights` opens any of them.
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

State = Mapping[str, Tensor]

# the only metadata key: safetensors would write several in an order that varies from run to run
METADATA_KEY = "vision_ttt_repro"
# what the metadata have, and what they may have besides; an unknown key is a damaged one, or of a later version
_NEEDED = {"model": str, "options": dict, "preprocessing": dict, "classes": list}
_FURTHER = {"checksum": str, "reading": (dict, str), "task": dict}
# in the header, where the metadata are JSON in a string of JSON
_CHECKSUM = re.compile(rb'\{\\"checksum\\": \\"([0-9a-f]{64})\\"')
# what a tensor of weights may be; whether an integer is one in the model, too, is compared when it is loaded
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8}
_DTYPES |= {torch.int8, torch.int16, torch.int32, torch.int64}
_NAMED_HASH = re.compile(r"-([0-9a-f]{8,64})\.")  # torch.hub's names of files carry the first digits of their SHA-256
# what wrappers put before a model's names, in any order and number: DataParallel, torch.compile, and mmcls
_WRAPPED = re.compile(r"^(?:(?:module|_orig_mod|backbone)\.)+")
# settings that training code saves with the weights and that are read as data: argparse's, and yacs' CfgNode (of Swin
# and ViT3)
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
    """Write a model's state atomically, with everything that is needed to build and use the model.

    Args:
        name, options: the registered name, and the further keyword arguments (JSON values) that built the model.
        preprocessing: the evaluation transform, in timm's names: input_size, interpolation, crop_pct, mean, std.
        classes: class names in the order of the outputs.
        task: for a dense model around the backbone `name`, the task's `name` and the params that built the rest.

    The file of a Vittt also names every switch of its reading, so that it keeps its meaning if a default changes.
    `checksum` in the metadata is the SHA-256 of the whole file with zeros in its own place, so that it covers names,
    shapes and metadata, too.
    """
    metadata = {
        "checksum": "0" * 64,
        "model": name,
        "options": options,
        "preprocessing": preprocessing,
        "classes": classes,
    } | ({"task": task} if task else {})
    if (reading := next((m.reading for m in model.modules() if hasattr(m, "reading")), None)) is not None:
        metadata["reading"] = dataclasses.asdict(reading)
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    with atomic(path) as temporary:
        save_file(state, temporary, metadata={METADATA_KEY: json.dumps(metadata, sort_keys=True)})
        place, _ = _find_checksum(temporary)
        checksum = hash_file(temporary, digits=64, blank=place)
        with open(temporary, "rb+") as stream:
            stream.seek(place)
            stream.write(checksum.encode())


def open_file(
    path: Path, places: Sequence[str] = ("model", "state_dict")
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read a weights file: its tensors, and what `save_weights` wrote besides, or None for a file of another project.

    The metadata are model, options, preprocessing, classes, and for a dense model its task; the options of a Vittt have
    its reading, where that is not the default. A file from before the checksums is read with a line on stderr.

    Another project's file may hold the state dict itself, or hold it in the first of these `places`, with an optimiser
    or settings, which are ignored. What wrappers put before the names is removed, see `_WRAPPED`, also where
    torch.compile had a part of the model, and mmcls' `head.fc.` becomes `head.`. A hash at a name's end, as torch.hub's,
    must be right.

    Raises:
        UserError: a file that does not exist, cannot be read (perhaps cut short), is not what its checksum or its name
            says, or holds Python objects other than data, no state dict, two tensors under one name, or metadata that
            are not those of a weights file; and as `require_sound`.
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
    """Refuse tensors that no training leaves; `where` begins the error.

    Raises:
        UserError: a dtype other than fp16, bf16, fp32, fp64 and integers, or values that are not finite.
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
    """An official state dict -> one under our names, by `official_state_dict` of its family; or a UserError."""
    translate = getattr(sys.modules[module], "official_state_dict", None)
    if translate is None:
        raise UserError("no official weights are known for this family")
    return translate(state)


def classifier_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The classifier's layers in timm's configuration of a model: none, one, or several of a distilled model."""
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
    """Fill a model strictly: every key is used, none is missing, shapes are equal, and integers where the model's are.

    Args:
        model, state: have the same names.
        not_needed: which keys of `state` are left out.
        new: which keys of the model stay as they are.

    Returns:
        A line for every key of `state`: `used` or `expected: not needed`.

    Raises:
        UserError: the first three differences by key; the model is then unchanged.
    """
    own = model.state_dict()
    used = {key: value for key, value in state.items() if not not_needed(key)}
    filled = {key: value for key, value in own.items() if not new(key)}
    missing = [f"{key} missing" for key in filled if key not in used]
    foreign = [f"{key} not used" for key in used if key not in filled]
    # the model's own first names say nothing of a file that has none of them
    problems = missing + foreign if used.keys() & filled.keys() else foreign[:2] + missing + foreign[2:]
    problems += [
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
    """Let a model of tensors refuse outputs that are not finite: with a UserError that names its weights, `where`."""

    def check(module: nn.Module, inputs: Any, output: Tensor | Sequence[Tensor]) -> None:
        if not all(each.isfinite().all() for each in ([output] if isinstance(output, Tensor) else output)):
            raise UserError(f"{where}: gives scores that are not finite; the weights are of a training that went wrong")

    model.register_forward_hook(check)


def adapt_to_size(model: nn.Module, state: State, trained_size: tuple[int, int]) -> dict[str, Tensor]:
    """A state dict of a training at another image size, made to fit a model of the same architecture.

    Our families: a position embedding is resampled to the model's grid (bicubic; class tokens keep their rows), if it
    has the length that belongs to `trained_size`. Weights of another patch stride therefore stay as they are and do not
    fit. timm's families: timm's own `checkpoint_filter_fn` resamples what depends on the size, such as Swin's tables of
    relative positions.

    `state` has the model's names, with the classifier; `trained_size` is their image height and width in pixels.
    """
    if hasattr(model, "grid_of"):
        return _resample_positions(model, state, trained_size)
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        return dict(state) if adapt is None else adapt(dict(state), model)
    # of another architecture: a strict load says so
    except (AttributeError, KeyError, IndexError, RuntimeError, ValueError):
        return dict(state)


def _resample_positions(model: nn.Module, state: State, trained_size: tuple[int, int]) -> dict[str, Tensor]:
    embedding = state.get("pos_embed")
    before, after = model.grid_of(*trained_size), model.grid_size
    if embedding is None or before == after:
        return dict(state)
    num_prefixes = model.pos_embed.shape[1] - after[0] * after[1]
    if embedding.ndim != 3 or embedding.shape[1] != before[0] * before[1] + num_prefixes:
        return dict(state)
    return {**state, "pos_embed": model.resample_table(embedding, before, after)}


def _read_checkpoint(path: Path) -> Any:
    """What a file of `torch.save` holds, running no code of it: tensors, plain data and `_SETTINGS`; or UserError."""
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
    """The state dict in what another project's file holds, see `open_file`."""
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
    """The tensors of a file, as its checksum says if it has one, and our metadata if it has them; or UserError."""
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
    """Where in a safetensors file the digits of its checksum begin, and these; None for a file without one."""
    with open(path, "rb") as stream:
        header = stream.read(8)
        header += stream.read(int.from_bytes(header, "little"))
    found = _CHECKSUM.search(header)
    return found and (found.start(1), found[1].decode())


class _Stated(dict):
    """What a file states, of which every use of a part that it lacks is the same UserError."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise UserError(
            f"{self.path}: damaged, or of another version: its metadata lack {key!r}; train or get it again"
        )


def _parse_metadata(text: str, path: Path, *, verified: bool) -> dict[str, Any]:
    kinds = _NEEDED | _FURTHER
    try:
        found = json.loads(text, object_hook=lambda content: _Stated(content, path))
        known = _NEEDED.keys() <= found.keys() <= kinds.keys()
        known = known and all(isinstance(value, kinds[key]) for key, value in found.items())
        known = known and all(isinstance(name, str) for name in found["classes"])
    except (ValueError, AttributeError):
        known = False
    # a checksum that is not where `_CHECKSUM` looks for it was not compared
    if not known or ("checksum" in found and not verified):
        raise UserError(
            f"{path}: damaged, or of a later version: its metadata are not those of a weights file; get it again"
        )
    if found.pop("checksum", None) is None:
        line = "has no checksum, so damage would not be noticed; run its stage again"
        print(f"repro: {path}: {line}", file=sys.stderr, flush=True)
    if found["model"].startswith("vittt_"):
        options = {key: value for key, value in found["options"].items() if key != "reading"}
        # a file that names no reading was written when there was one; only one design was another model then
        unnamed = UNNAMED_READING if options.get("design") == "gating" else ""
        try:
            reading = str(Reading.of(found.pop("reading", unnamed)))
        except ValueError as error:
            raise UserError(f"{path}: {error}; another version may have written it") from None
        found["options"] = options | ({"reading": reading} if reading else {})
    return found
