"""Detection samples: boxes and masks follow each transform of their image, which stays uint8 for the model to pad."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from ..core.errors import UserError
from .coco import Instances, read_image
from .findings import BadData, Finding
from .loader import own_randomness
from .masks import decode_mask
from .settings import DetectionTransformSettings

Target = dict[str, Any]  # see `CocoDetection.__getitem__`
_MIN_SIDE_PX = 32  # smaller images are left out of training, as in mmdet


class CocoDetection(Dataset):
    """Images and their targets. Items are indexed by (epoch, index), which with the seed determine the augmentation.

    Evaluation takes every image. Training drops images without a target or with a side shorter than 32 pixels.

    Args:
        instances: see `coco.read_instances`.
        settings: image sizes and, for training, random changes.
        training: whether to augment and to drop images.
        seed: of the random changes.

    Raises:
        UserError: no image is left to train on.
    """

    def __init__(self, instances: Instances, settings: DetectionTransformSettings, *, training: bool, seed: int = 0):
        self.instances, self.settings, self.training, self.seed = instances, settings, training, seed
        usable = (np.diff(instances.starts) > 0) & (instances.sizes >= _MIN_SIDE_PX).all(axis=1)
        self._places = np.flatnonzero(usable | (not training))
        if training and not len(self._places):
            raise UserError(
                f"{instances.file}: none of its {len(instances.names)} images has an instance to learn from; add some"
            )

    @property
    def groups(self) -> np.ndarray:
        """(N,) bool: whether an image is at least as wide as it is high; see `loader.TrainOrder`."""
        height, width = self.instances.sizes[self._places].T
        return width >= height

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Target]:
        """Return (image, target) for an image of (H, W) pixels with n targets.

        Returns:
            image: (3, H, W) uint8.
            target: boxes (n, 4) fp32 corners in pixels of this image, labels (n,) int64 in 1..K, masks (n, H, W) uint8,
                image_id, and original_size, the (height, width) of the file. Targets whose box or mask has no area left
                are dropped.

        Raises:
            UserError: the image cannot be read, or contradicts its annotations.
        """
        epoch, index = key
        place = int(self._places[index])
        pieces = self._read(place)
        if self.training:
            with own_randomness(self.seed, epoch, index):
                pieces = _augment(pieces, self.settings)
        else:
            pieces = _resize(pieces, self.settings.min_size[-1], self.settings.max_size)
        image, boxes, masks = (piece.as_subclass(Tensor) for piece in pieces)
        kept = (boxes[:, 2:] > boxes[:, :2]).all(dim=1) & masks.flatten(1).any(dim=1).bool()
        target = {
            "boxes": boxes[kept],
            "labels": torch.from_numpy(self.instances.labels[self.instances.targets(place)])[kept],
            "masks": masks[kept],
            "image_id": int(self.instances.image_ids[place]),
            "original_size": tuple(self.instances.sizes[place].tolist()),
        }
        return image.contiguous(), target

    def collate(self, samples: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
        """Return lists, since the images differ in size."""
        images, targets = zip(*samples)
        return list(images), list(targets)

    def name(self, index: int) -> str:
        """Return an image's file name."""
        return self.instances.path(int(self._places[index])).name

    def _read(self, place: int) -> list[tv_tensors.TVTensor]:
        """Read image, boxes and masks at the file's size.

        The boxes are a view of the annotations: a transform must not change them in place.

        Raises:
            UserError: the file contradicts its annotations.
        """
        path = self.instances.path(place)
        size = tuple(self.instances.sizes[place].tolist())
        targets = self.instances.targets(place)
        pixels = read_image(path, size, self.instances.file, self.instances.max_pixels)
        try:
            masks = [decode_mask(self.instances.segmentation(row), *size) for row in self.instances.rows[targets]]
            # the leading zeros give `stack` a shape where there is no mask
            together = np.stack([np.zeros(size, dtype=np.uint8), *masks])[1:]
        except Exception as error:  # pycocotools raises bare exceptions
            problem = f"{self.instances.file.name} has a mask for it that does not fit ({' '.join(str(error).split())})"
            raise BadData(Finding("error", path, problem, "get that file again")) from None
        return [
            tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1)),
            tv_tensors.BoundingBoxes(torch.from_numpy(self.instances.boxes[targets]), format="XYXY", canvas_size=size),
            tv_tensors.Mask(torch.from_numpy(together)),
        ]


def resize(image: Tensor, settings: DetectionTransformSettings) -> Tensor:
    """Resize a picture (3, H, W) uint8 to the size at which a model is evaluated."""
    return _resize([tv_tensors.Image(image)], settings.min_size[-1], settings.max_size)[0].as_subclass(Tensor)


def _augment(pieces: list[tv_tensors.TVTensor], settings: DetectionTransformSettings) -> list[tv_tensors.TVTensor]:
    """Apply DETR's augmentation; without `crop_min_size` it is a flip and one resize."""
    if torch.rand(()) < settings.hflip:
        pieces = [F.horizontal_flip(piece) for piece in pieces]
    if settings.crop_min_size and torch.rand(()) < 0.5:
        pieces = _resize(pieces, _draw(settings.crop_min_size), math.inf)
        sides = pieces[0].shape[-2:]
        smallest, largest = settings.crop_size
        height, width = (_between(min(side, smallest), min(side, largest)) for side in sides)
        top, left = _between(0, sides[0] - height), _between(0, sides[1] - width)
        pieces = [F.crop(piece, top, left, height, width) for piece in pieces]
    return _resize(pieces, _draw(settings.min_size), settings.max_size)


def _resize(pieces: list[tv_tensors.TVTensor], short: int, longest: float) -> list[tv_tensors.TVTensor]:
    """Scale by the largest factor that keeps both bounds, as mmdet does: bilinear without antialiasing.

    Args:
        pieces: an image first, which gives the size, and then its boxes and masks.
        short, longest: the bounds of the short and the long side in pixels; infinity for no bound.
    """
    height, width = pieces[0].shape[-2:]
    factor = min(short / min(height, width), longest / max(height, width))
    # mmdet's rounding: Python's round would take halves to the even number
    size = [int(side * factor + 0.5) for side in (height, width)]
    return [F.resize(piece, size, antialias=False) for piece in pieces]


def _draw(choices: tuple[int, ...]) -> int:
    """Draw one of the numbers from torch's global generator."""
    return choices[_between(0, len(choices) - 1)]


def _between(smallest: int, largest: int) -> int:
    """Draw an integer between both ends, included, from torch's global generator."""
    return int(torch.randint(smallest, largest + 1, ()))
