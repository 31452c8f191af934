"""Data and files of a denoiser: pictures, latents, initial weights, the judge, and grids of samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from ...core.errors import UserError
from ...core.paths import find_root
from ...core.record import atomic
from ...data.classification import ImageFolder, eval_transform
from ...data.latents import LatentFolder
from ...data.settings import TransformSettings
from ...data.tree import Tree
from ...models.registry import family_module
from ...models.weights import load_state, open_file, translate_official
from .params import GenerateParams, InputSettings
from .scores import Judge

_GAP_PX = 4  # gap between the pictures of a grid
_SHOWN_PX = 64  # size to which smaller pictures are enlarged in a grid


def open_split(
    tree: Tree, split: str, settings: InputSettings, *, training: bool = False, **shared: Any
) -> ImageFolder:
    """Open a split for a denoiser: items are uint8 pictures or fp32 latents, with classes.

    `shared` as for `ImageFolder`.
    """
    hflip = settings.hflip if training else 0.0
    if settings.latents is not None:
        return LatentFolder(tree, split, settings.shape, scale=settings.latents.scale, hflip=hflip, **shared)
    resize = eval_transform(TransformSettings(image_size=settings.image_size, crop_pct=1.0))
    steps = [
        *([transforms.Grayscale()] if settings.channels == 1 else []),
        transforms.RandomHorizontalFlip(hflip),
        resize,
    ]
    return ImageFolder(tree, split, transforms.Compose([*steps, torch.as_tensor]), **shared)


def open_denoiser(path: Path, *models: str) -> tuple[Mapping[str, Tensor], Mapping[str, Any] | None]:
    """Read the tensors of a denoiser's file, preferring the moving average, and our metadata.

    A file of ours must be of one of `models`, registered names, if any are named; a release's, without metadata, is
    taken for the first.

    Returns:
        The tensors by our names, and the metadata; None for a release's file.

    Raises:
        UserError: the file cannot be read or is of another model.
    """
    state, metadata = open_file(path, ("ema", "model", "state_dict"))
    if metadata is not None:
        if models and metadata["model"] not in models:
            raise UserError(f"{path}: holds weights of {metadata['model']}, not of {' or '.join(models)}")
        return state, metadata
    if not models:
        raise UserError(f"{path}: not a file of this project, so it does not name its model; name it with --model")
    try:
        return translate_official(state, family_module(models[0])), None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def fill(model: nn.Module, path: Path, name: str) -> Mapping[str, str]:
    """Load a denoiser's weights strictly from a file, and return what became of each key.

    A DiT5 takes a file of its own, or one of the DiT of its size; parameters that the DiT lacks then keep their initial
    values.

    Raises:
        UserError: the file does not fit the model.
    """
    error = f"{path}: does not fit {name} as built with {model.built_from[1] or 'no options'}"
    new = model.new_parameters()  # empty for any denoiser but a DiT5
    softmax = name.replace("dit5_", "dit_", 1)
    state, metadata = open_denoiser(path, *([softmax, name] if new else [name]))
    inherits = bool(new) and (metadata is None or metadata["model"] == softmax)
    # a release's file does not name its model: one with new parameters is a DiT5's own
    if not inherits or not new.isdisjoint(state):
        return load_state(model, state, error)
    return load_state(model, state, error, new=new.__contains__) | dict.fromkeys(new, "expected: new")


def open_judge(params: GenerateParams, classes: Sequence[str], device: torch.device) -> Judge:
    """Open the judge of a cell; raises UserError where it cannot judge its samples.

    The build of its model draws random numbers, on which results depend, see `Generate.build_task`.
    """
    if params.transform.latents is not None:
        raise UserError("judge: looks at pictures, and these are latents; judge samples with `repro generate --vae`")
    path = find_root().find(params.judge.weights)
    if not path.is_file():
        raise UserError(f"judge.weights: {path}: no such file; train that classifier first")
    return Judge.open(path, classes, device)


def save_grid(pictures: Tensor, columns: int, path: Path) -> None:
    """Write uint8 pictures (N, 1 or 3, H, W) in rows as one PNG; small ones are enlarged bicubically."""
    times = -(-_SHOWN_PX // min(pictures.shape[-2:]))  # rounded up
    shown = (
        pictures.cpu()
        if times == 1
        else F.interpolate(pictures.cpu().float(), scale_factor=times, mode="bicubic").round().clamp(0, 255)
    )
    grid = make_grid(shown.to(torch.uint8), nrow=columns, padding=_GAP_PX, pad_value=255)[
        : pictures.shape[1]
    ]  # make_grid repeats grey to three channels
    with atomic(path) as temporary:
        to_pil_image(grid).save(temporary, "PNG")
