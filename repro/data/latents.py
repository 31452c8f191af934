"""Latents of a VAE computed before the training, a file for each picture, in class folders or archives as images are.

A file `<class>/<name>.npy` holds an array of fp16 or fp32: (K, h, w), the latents of the picture as its VAE's encoder
gives them, without a scale; or (2, K, h, w), of which the second are those of the mirrored picture, since latents
cannot be flipped.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .classification import ImageFolder
from .tree import ImageBytes, Tree


class LatentFolder(ImageFolder):
    """One split of a tree of kind `latents`; see `ImageFolder`, also for unreadable files and other shapes.

    Items are fp32 (K, h, w), scaled, with their class.

    Args:
        tree, split, seed, max_unreadable: see `ImageFolder`.
        shape: K, h and w.
        scale: by which the latents are multiplied.
        hflip: probability of the mirrored picture's latents, where a file has them.
    """

    def __init__(
        self, tree: Tree, split: str, shape: Sequence[int], *, scale: float, hflip: float = 0.0, **shared: Any
    ):
        super().__init__(tree, split, self._choose, **shared)
        self.shape, self.scale, self.hflip = tuple(shape), scale, hflip

    def read(self, source: ImageBytes) -> torch.Tensor:
        """(1 or 2, K, h, w) fp32, without the scale; raises `UNREADABLE`."""
        return read_latents(source, self.shape)

    def _choose(self, latents: torch.Tensor) -> torch.Tensor:
        mirrored = len(latents) > 1 and float(torch.rand(())) < self.hflip
        return self.scale * latents[int(mirrored)]


def read_latents(source: ImageBytes, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A file's latents, (1 or 2, K, h, w) fp32; ValueError or OSError for anything else, or another (K, h, w)."""
    found = np.load(io.BytesIO(source.read()), allow_pickle=False)
    if not isinstance(found, np.ndarray) or found.dtype not in (np.float16, np.float32):
        raise ValueError(f"{getattr(found, 'dtype', 'no array')}, expected an array of float16 or float32")
    wanted = found.shape[-3:] if shape is None else tuple(shape)
    if found.shape not in (wanted, (1, *wanted), (2, *wanted)) or len(wanted) != 3:
        raise ValueError(
            f"shape {found.shape}, expected {wanted if shape is not None else '(channels, h, w)'}, or two of that"
        )
    latents = torch.from_numpy(found.astype(np.float32)).view(-1, *wanted)
    if not torch.isfinite(latents).all():
        raise ValueError("holds values that are not finite")
    return latents
