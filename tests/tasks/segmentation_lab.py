"""What the segmentation tests share: trees of ADE20K's format, and a backbone of two convolutions."""

from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F


class Pyramid(nn.Module):
    """Four maps of strides 4 to 32, of width `embed_dim`."""

    def __init__(self, embed_dim: int = 8):
        super().__init__()
        self.channels = (embed_dim,) * 4
        self.stem = nn.Conv2d(3, embed_dim, 4, stride=4)
        self.mix = nn.Conv2d(embed_dim, embed_dim, 3, padding=1)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.mix(self.stem(images).relu())
        return [F.avg_pool2d(x, 2**i) if i else x for i in range(4)]


def write_tree(
    root: Path, *, classes: int, split: str = "training", pairs: int = 4, size: tuple[int, int] = (40, 64)
) -> Path:
    """Pairs of noise with blocks of labels 0..classes, one of them 0.

    Images are PNGs under JPEG's name, so that every decoder reads the same.
    """
    rng = np.random.default_rng(0)
    (root / "images" / split).mkdir(parents=True)
    (root / "annotations" / split).mkdir(parents=True)
    for number in range(pairs):
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        labels = rng.integers(0, classes + 1, (size[0] // 8, size[1] // 8), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        labels[:8, :8] = 0
        Image.fromarray(pixels).save(root / "images" / split / f"ADE_{number:08d}.jpg", format="PNG")
        Image.fromarray(labels).save(root / "annotations" / split / f"ADE_{number:08d}.png")
    rows = [f"{number}\tclass {number}" for number in range(1, classes + 1)]
    (root / f"objectInfo{classes}.txt").write_text("\n".join(["Idx\tName", *rows]) + "\n")
    return root
