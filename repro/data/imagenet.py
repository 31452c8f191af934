"""Images of a scanned tree as tensors: ImageNet-1K, and anything that is laid out as it is."""

import contextlib
import logging
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from torch.utils.data import Dataset

from ..core.errors import UserError
from .settings import TransformSettings
from .tree import Tree

_log = logging.getLogger(__name__)
# what Pillow raises on damaged files of various formats
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


def train_transform(settings: TransformSettings) -> Callable[[Image.Image], torch.Tensor]:
    """PIL image -> normalised fp32 tensor (3, image_size, image_size) by timm: crop, flip, RandAugment, erasing."""
    transform = create_transform(
        settings.image_size,
        is_training=True,
        scale=settings.scale,
        ratio=settings.ratio,
        hflip=settings.hflip,
        color_jitter=settings.color_jitter,
        auto_augment=settings.auto_augment,
        interpolation=settings.interpolation,
        mean=settings.mean,
        std=settings.std,
        re_prob=settings.re_prob,
        re_mode="pixel",
    )
    for step in transform.transforms:
        if isinstance(step, RandAugment):
            for op in step.ops:
                if op.name.startswith("Posterize"):
                    op.aug_fn = _posterize
    return transform


def eval_transform(settings: TransformSettings) -> Callable[[Image.Image], torch.Tensor]:
    """PIL image -> normalised fp32 tensor (3, image_size, image_size): resize by crop_pct, centre crop, by timm."""
    return create_transform(
        settings.image_size,
        is_training=False,
        interpolation=settings.interpolation,
        mean=settings.mean,
        std=settings.std,
        crop_pct=settings.crop_pct,
    )


class ImageFolder(Dataset):
    """One split of a tree. Items are asked for by (epoch, index), and the augmentation depends on these and the seed alone.

    A file that cannot be read is named in the log, counted once over all worker processes, and replaced by the next
    readable one (its neighbour, so mostly of the same class). More than `max_unreadable` of them end the run.

    Args:
        tree: see `manifest.open_root`.
        split: `train` or `val`.
        transform: PIL RGB image -> tensor.
        seed: of the augmentation.
        max_unreadable: how many files may be unreadable; 0 for evaluation, where a replacement would change the result.
    """

    def __init__(self, tree: Tree, split: str, transform: Callable, *, seed: int = 0, max_unreadable: int = 0):
        self.tree, self.split, self.transform, self.seed, self.max_unreadable = tree, split, transform, seed, max_unreadable
        self._targets = tree.splits[split].targets
        # one flag per file and not a counter: setting a flag twice from two processes is harmless, and a file met in
        # every epoch counts once
        self._unreadable = torch.zeros(len(self._targets), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        image, index = self._next_readable(index)
        with _own_randomness(self.seed, epoch, key[1]):
            return self.transform(image), int(self._targets[index])

    def unreadable(self) -> list[Path]:
        """The unreadable files met so far, in all processes."""
        return [self.tree.path(self.split, index) for index in self._unreadable.nonzero().flatten().tolist()]

    def require_readable(self) -> None:
        """Raise a `UserError` when more files than allowed were unreadable."""
        count = int(self._unreadable.sum())
        if count > self.max_unreadable:
            shown = ", ".join(map(str, self.unreadable()[:3])) + (", ..." if count > 3 else "")
            raise UserError(
                f"{shown}: unreadable image{'s' if count > 1 else ''} ({count}, at most {self.max_unreadable} allowed); "
                "replace the file, or for training raise max_unreadable"
            )

    def _next_readable(self, index: int) -> tuple[Image.Image, int]:
        for offset in range(len(self)):
            candidate = (index + offset) % len(self)
            path = self.tree.path(self.split, candidate)
            try:
                return read_rgb(path), candidate
            except _UNREADABLE as error:
                if not self._unreadable[candidate]:
                    self._unreadable[candidate] = 1
                    _log.warning("%s: unreadable, the next image takes its place: %s", path, error)
                self.require_readable()
        raise UserError(f"{self.tree.root / self.split}: not one of {len(self)} images can be read")


def read_rgb(path: str | os.PathLike) -> Image.Image:
    """Decode an image file as RGB; raises what Pillow raises."""
    with open(path, "rb") as stream, Image.open(stream) as image:
        return image.convert("RGB")


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """What timm's operation does, down to the 0 bits (a black image) that it asks for at full strength and Pillow 13 refuses."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


@contextlib.contextmanager
def _own_randomness(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed Python, NumPy and torch from (seed, epoch, index) and put back what was there.

    timm's transforms draw from all three global generators; without the last step a loader without workers would change
    the randomness of the training step, and a resumed run would differ from an uninterrupted one.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for_python, for_numpy, for_torch = np.random.SeedSequence((1, seed, epoch, index)).generate_state(3).tolist()
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would also reseed every GPU
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
