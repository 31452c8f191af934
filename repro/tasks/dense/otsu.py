"""A baseline without learning: bright regions are objects, and each gets the class of the most similar example."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import Tensor

from ...data.masks import decode_mask

_BLUR = 1.0  # standard deviation of the Gaussian blur, in pixels
_FAINTEST = 8.0  # least grey levels above the darkest pixel; less is noise
_SMALLEST = 40  # smallest area of an object in pixels
_SIDE = 8  # cells along a side of the grid on which shapes are compared


class OtsuBaseline:
    """Otsu's threshold applied twice, connected components, and the class of the nearest example.

    The second threshold splits the pixels above the first, since textures lie between ground and digits.

    Args:
        examples: masks (H, W) of training objects, nonzero inside, and the class of each.
    """

    def __init__(self, examples: Iterable[tuple[Tensor, int]]):
        masks, labels = zip(*examples, strict=True)
        self._shapes = np.stack([_shape(mask.numpy().astype(bool)) for mask in masks])
        self._labels = np.array(labels)

    def detect(self, image: Tensor) -> dict[str, Tensor]:
        """Find the objects of an image, uint8 (3, H, W), in Mask R-CNN's output format.

        Returns:
            `boxes` (K, 4), `labels` (K,), `scores` (K,) in descending order, and `masks` (K, H, W) bool. The score is
            the mean brightness of the object, at most 1, times the cosine similarity with the nearest example.
        """
        grey = ndimage.gaussian_filter(image.float().mean(0).numpy(), _BLUR)
        threshold = _otsu(grey[grey > _otsu(grey)])
        components, count = ndimage.label(grey > max(threshold, grey.min() + _FAINTEST), structure=np.ones((3, 3)))
        sizes = np.bincount(components.ravel(), minlength=count + 1)[1:]  # component 0 is the ground
        large = 1 + np.flatnonzero(sizes >= _SMALLEST)
        # without a component, `reshape` gives the empty arrays their axes
        masks = np.array([components == number for number in large]).reshape(-1, *grey.shape)
        similarity = np.array([_shape(mask) for mask in masks]).reshape(-1, _SIDE**2) @ self._shapes.T
        scores = np.array([grey[mask].mean() / 255 for mask in masks]) * similarity.max(axis=1)
        order = np.argsort(-scores, kind="stable")
        boxes = [(x.start, y.start, x.stop, y.stop) for y, x in map(_extent, masks[order])]
        return {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.from_numpy(self._labels[similarity.argmax(axis=1)[order]]),
            "scores": torch.from_numpy(scores[order]).float(),
            "masks": torch.from_numpy(masks[order]),
        }

    def label_map(self, image: Tensor, background: int) -> Tensor:
        """Predict the class of each pixel of an image, uint8 (3, H, W), as (H, W) int64.

        Classes are numbered as in the examples, from 1 on where `read_examples` gave them; `background` is the value of
        pixels outside of objects.
        """
        found = self.detect(image)
        labels = torch.full(image.shape[1:], background)
        for mask, label in zip(found["masks"], found["labels"], strict=True):
            labels[mask] = label
        return labels


def read_examples(instances: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield the mask of every training target, as large as its image, and its label."""
    for place in range(len(instances.names)):
        targets = instances.targets(place)
        for row, label in zip(instances.rows[targets].tolist(), instances.labels[targets].tolist(), strict=True):
            yield torch.from_numpy(decode_mask(instances.segmentation(row), *instances.sizes[place].tolist())), label


def _otsu(values: np.ndarray) -> float:
    """Compute the threshold with the largest variance between the two classes: w0 w1 (m0 - m1)²."""
    counts, edges = np.histogram(values, 256)  # the threshold is one of the edges
    centres = (edges[:-1] + edges[1:]) / 2
    below, above = counts.cumsum(), counts[::-1].cumsum()[::-1]
    mean_below = (counts * centres).cumsum() / below.clip(1)
    mean_above = (counts * centres)[::-1].cumsum()[::-1] / above.clip(1)
    between = below[:-1] * above[1:] * (mean_below[:-1] - mean_above[1:]) ** 2
    return float(edges[1 + between.argmax()])


def _extent(mask: np.ndarray) -> tuple[slice, slice]:
    """Return the rows and columns of the smallest box around a mask (H, W) that is not empty."""
    return ndimage.find_objects(mask.astype(np.uint8))[0]


def _shape(mask: np.ndarray) -> np.ndarray:
    """Return a mask (H, W) as a unit vector: its crop, centred in a square and averaged over _SIDE x _SIDE cells."""
    crop = mask[_extent(mask)].astype(np.float32)
    side = max(crop.shape)
    before = [(side - length) // 2 for length in crop.shape]
    square = np.pad(crop, [(first, side - length - first) for first, length in zip(before, crop.shape, strict=True)])
    cells = F.adaptive_avg_pool2d(torch.from_numpy(square)[None], _SIDE).flatten().numpy()
    return cells / np.linalg.norm(cells)
