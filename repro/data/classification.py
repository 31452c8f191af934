"""Images of a scanned tree as tensors: ImageNet-1K, and any data set in the same layout.

Worker processes send images as uint8, a quarter of the bytes of fp32. `ToInput` normalises a batch on the model's
device.
"""

import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import str_to_interp_mode
from torch.utils.data import Dataset, default_collate
from torchvision import transforms

from ..core.errors import UserError
from .findings import show_few
from .loader import own_randomness
from .pixels import MAX_PIXELS, UNREADABLE, decode_rgb, lift_limit
from .settings import TransformSettings
from .tree import ImageBytes, Tree

Batch = tuple[torch.Tensor, torch.Tensor]  # images (B, 3, H, W), targets (B,)

_log = logging.getLogger(__name__)


def train_transform(settings: TransformSettings) -> Callable[[Image.Image], torch.Tensor]:
    """Build timm's training transform from PIL to uint8 (3, image_size, image_size): crop, flip, RandAugment."""
    transform = create_transform(
        settings.image_size,
        is_training=True,
        use_prefetcher=True,  # yields uint8, which `ToInput` normalises
        scale=settings.scale,
        ratio=settings.ratio,
        hflip=settings.hflip,
        color_jitter=settings.color_jitter,
        auto_augment=settings.auto_augment,
        interpolation=settings.interpolation,
    )
    if settings.crop_padding is not None:
        resize = transforms.Resize(settings.image_size, str_to_interp_mode(settings.interpolation))
        crop = transforms.RandomCrop(settings.image_size, padding=settings.crop_padding)
        transform.transforms[:1] = [resize, crop]  # replaces timm's first step, the random resized crop
    for step in transform.transforms:
        if isinstance(step, RandAugment):
            for op in step.ops:
                if op.name.startswith("Posterize"):
                    op.aug_fn = _posterize
    return transform


def eval_transform(settings: TransformSettings) -> Callable[[Image.Image], torch.Tensor]:
    """Build timm's evaluation transform, PIL to uint8 (3, image_size, image_size): resize by crop_pct, crop by mode.

    `inference.resolution` reads a batch once for all models whose settings agree in what is used here: a further
    setting must be compared there, too.
    """
    return create_transform(
        settings.image_size,
        is_training=False,
        use_prefetcher=True,
        interpolation=settings.interpolation,
        crop_pct=settings.crop_pct,
        crop_mode=settings.crop_mode,
    )


class ToInput:
    """Conversion of uint8 images (B, 3, H, W) to normalised fp32 on a device, with timm's random erasing in training.

    Erasing (mode `pixel`) draws from the global generators of Python and torch. Without `training`, only `mean` and
    `std` of the settings are read: the settings of segmentation, which also come here, have no `re_prob`.
    """

    def __init__(self, settings: TransformSettings, device: torch.device, *, training: bool = False):
        self.device = device
        # scaled to 0..255, which saves the division of the batch by 255
        self._mean, self._std = (
            255 * torch.tensor(x, device=device).view(3, 1, 1) for x in (settings.mean, settings.std)
        )
        self._erase = (
            RandomErasing(settings.re_prob, mode="pixel", device=device) if training and settings.re_prob else None
        )

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        # move first, then convert: a single `to` would convert on the CPU and send four times the bytes. copy=True
        # since the normalisation is in place, and an fp32 input would be returned as it is
        inputs = images.to(self.device, non_blocking=True).to(
            torch.float32, copy=True, memory_format=torch.contiguous_format
        )
        inputs.sub_(self._mean).div_(self._std)
        if self._erase is not None:
            self._erase(inputs)
        return inputs


class ImageFolder(Dataset):
    """One split of a tree. Items are indexed by (epoch, index), which with the seed determine the augmentation.

    A file that cannot be read is logged, counted once over all worker processes, and replaced by the next readable one,
    which is mostly of the same class. More than `max_unreadable` such files end the run.

    Args:
        tree, split: see `DataCell.open_tree` and `Kind.splits`.
        transform: called with the decoded image.
        seed: of the augmentation.
        max_unreadable: how many files may be unreadable; 0 for evaluation, where a replacement would change the result.
    """

    def __init__(self, tree: Tree, split: str, transform: Callable, *, seed: int = 0, max_unreadable: int = 0):
        self.tree = tree
        self.split = split
        self.transform = transform
        self.seed = seed
        self.max_unreadable = max_unreadable
        self._targets = tree.splits[split].targets
        # (N,) uint8, 1 for a file that could not be read, in memory that forked workers share and that is not in
        # /dev/shm, where containers have little. Not a counter: two processes may meet the same file, and every epoch
        # meets it again. `training.loop.Task` finds the marks by this name; a training saves them, and sets them again
        # when it resumes
        files = len(self._targets)
        self.marks = torch.frombuffer(mmap.mmap(-1, max(1, files)), dtype=torch.uint8)[:files]

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        image, found = self._next_readable(key[1])
        with own_randomness(self.seed, *key), lift_limit():
            return self.transform(image), int(self._targets[found])

    def read(self, source: ImageBytes) -> Any:
        """Decode a file for the transform; raises `UNREADABLE` where this fails."""
        return read_rgb(source, self.tree.kind.upright, self.tree.max_pixels)

    def collate(self, samples: list[tuple[torch.Tensor, int]]) -> Batch:
        """Stack images in channels-last memory: a transpose costs a CPU a tenth of the decoding, and a GPU nothing."""
        images, targets = default_collate([(image.permute(1, 2, 0), target) for image, target in samples])
        return images.permute(0, 3, 1, 2), targets

    def name(self, index: int) -> str:
        """Return an image's path relative to the folder of its split."""
        return self.tree.path(self.split, index).relative_to(self.tree.folder(self.split)).as_posix()

    def unreadable(self) -> list[Path]:
        """List the unreadable files that any process has met so far."""
        return [self.tree.path(self.split, index) for index in self.marks.nonzero().flatten().tolist()]

    def _next_readable(self, index: int) -> tuple[Any, int]:
        """Decode this file or the next readable one; return also its index, which gives the class of the sample."""
        for offset in range(len(self)):
            candidate = (index + offset) % len(self)
            try:
                return self.read(self.tree.source(self.split, candidate)), candidate
            except UNREADABLE as error:
                self._mark(candidate, error)
        raise UserError(f"{self.tree.folder(self.split)}: none of the {len(self)} images can be read; get them again")

    def _mark(self, index: int, error: Exception) -> None:
        """Mark a file that cannot be read, and log it once; raise UserError if it is one more than `max_unreadable`."""
        if not self.marks[index]:
            self.marks[index] = 1
            _log.warning("%s: unreadable, the next image takes its place: %s", self.tree.path(self.split, index), error)
        if (number := int(self.marks.sum())) > self.max_unreadable:
            files = show_few([str(path) for path in self.unreadable()])
            raise UserError(
                f"{files}: unreadable image{'s' if number > 1 else ''} ({number}, at most {self.max_unreadable} "
                "allowed); replace the file, or for training raise max_unreadable"
            )


def read_rgb(source: ImageBytes, upright: bool = False, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read an image as RGB, as stored or, if `upright`, rotated by its EXIF data; raises one of `UNREADABLE`.

    The default differs from that of `decode_rgb`: published results of ImageNet are on images as stored.
    """
    return decode_rgb(source.read(), source.file, max_pixels, upright=upright)


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Posterize to `bits` bits. timm also asks for 0 bits (a black image), which Pillow 13 refuses."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)
