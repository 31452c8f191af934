"""The data and files around a denoiser: pictures, latents, the weights to start from, the judge, and grids."""

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

GAP_PX = 4  # between the pictures of a grid
SHOWN_PX = 64  # to which smaller pictures are enlarged there


def open_split(
    tree: Tree, split: str, settings: InputSettings, *, training: bool = False, **shared: Any
) -> ImageFolder:
    """A split as a denoiser reads it: uint8 pictures or fp32 latents, and classes; `shared`: of `ImageFolder`."""
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
    """The tensors of a denoiser's file, ours or a release's, the moving average where there is one, and our metadata.

    A file of ours is of one of these models, if any are named; a release's, without metadata, is of the first.

    Raises:
        UserError: a file that cannot be read or is of another model.
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
    """Fill a denoiser from a file, strictly, and say what became of each key; raises UserError where it does not fit.

    A DiT5 takes a file of its own, or one of the DiT of its size: then what that DiT lacks stays as it is.
    """
    error = f"{path}: does not fit {name} as built with {model.built_from[1] or 'no options'}"
    new = model.new_parameters()
    softmax = name.replace("dit5_", "dit_", 1)
    state, metadata = open_denoiser(path, *([softmax, name] if new else [name]))
    inherits = bool(new) and (metadata is None or metadata["model"] == softmax)
    if not inherits or not new.isdisjoint(state):
        return load_state(model, state, error)
    return load_state(model, state, error, new=new.__contains__) | dict.fromkeys(new, "expected: new")


def open_judge(params: GenerateParams, classes: Sequence[str], device: torch.device) -> Judge:
    """The judge of a cell; raises UserError where it cannot judge."""
    if params.transform.latents is not None:
        raise UserError("judge: looks at pictures, and these are latents; judge samples with `repro generate --vae`")
    path = find_root().find(params.judge.weights)
    if not path.is_file():
        raise UserError(f"judge.weights: {path}: no such file; train that classifier first")
    return Judge.open(path, classes, device)


def save_grid(pictures: Tensor, columns: int, path: Path) -> None:
    """Write uint8 pictures (N, 1 or 3, H, W) in rows as one PNG; small ones are enlarged bicubically."""
    times = -(-SHOWN_PX // min(pictures.shape[-2:]))
    shown = (
        pictures.cpu()
        if times == 1
        else F.interpolate(pictures.cpu().float(), scale_factor=times, mode="bicubic").round().clamp(0, 255)
    )
    grid = make_grid(shown.to(torch.uint8), nrow=columns, padding=GAP_PX, pad_value=255)[
        : pictures.shape[1]
    ]  # it makes grey three channels
    with atomic(path) as temporary:
        to_pil_image(grid).save(temporary, "PNG")
