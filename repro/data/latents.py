"""Latents of a VAE computed before training, one file per picture, in class folders or archives as images are.

A file `<class>/<name>.npy` holds an fp16 or fp32 array: (K, h, w), the unscaled latents from the VAE's encoder; or (2,
K, h, w), whose second entry encodes the mirrored picture, since latents cannot be flipped.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .classification import ImageFolder
from .pixels import explain_error
from .tree import ImageBytes, Tree


class LatentFolder(ImageFolder):
    """One split of a tree of kind `latents`; see `ImageFolder`, also for unreadable files and wrong shapes.

    Items are (latents, class): scaled fp32 (K, h, w), and the class index.

    Args:
        tree, split: see `ImageFolder`.
        shape: (K, h, w).
        scale: factor on the latents.
        hflip: probability of the mirrored picture's latents, where a file has them.
        shared: `seed` and `max_unreadable` of `ImageFolder`.
    """

    def __init__(
        self, tree: Tree, split: str, shape: Sequence[int], *, scale: float, hflip: float = 0.0, **shared: Any
    ):
        super().__init__(tree, split, self._choose, **shared)
        self.shape, self.scale, self.hflip = tuple(shape), scale, hflip

    def read(self, source: ImageBytes) -> torch.Tensor:
        """Read unscaled latents (1 or 2, K, h, w) fp32; raises one of `UNREADABLE`."""
        return read_latents(source, self.shape)

    def _choose(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the scaled latents (K, h, w) of the picture or, with probability `hflip`, of the mirrored one."""
        mirrored = len(latents) > 1 and float(torch.rand(())) < self.hflip
        return self.scale * latents[int(mirrored)]


def read_latents(source: ImageBytes, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Read a file's latents (1 or 2, K, h, w) fp32.

    Raises:
        ValueError, OSError: the file holds anything else, or not `shape`, which is (K, h, w).
    """
    content = source.read()
    try:
        found = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # NumPy raises whatever a damaged file leads to
        raise ValueError(explain_error(error)) from None
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
