"""Segmentation samples: pairs in ADE20K's format, resized and augmented by mmsegmentation's own transforms."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ...data.ade20k import AdePairs
from ...data.loader import own_randomness
from .openmmlab import cv2, mmcv, transforms
from .params import SegmentationTransformSettings

IGNORED = 255  # label of pixels that neither the loss nor the metrics count
Batch = tuple[Tensor, Tensor]  # uint8 images (B, 3, H, W), uint8 label maps (B, H, W)
_MULTIPLE = 32  # divisor of the sides of an image in evaluation


class AdeSegmentation(Dataset):
    """Images and label maps. Items are indexed by (epoch, index), which with the seed determine the augmentation.

    A pair that cannot be read, or whose parts do not match, ends the run.

    Args:
        pairs: one split; label values 1..K become classes 0..K-1, and 0 becomes `IGNORED`.
        settings: sizes and random changes.
        training: whether to crop and augment.
        seed: of the random changes.
    """

    def __init__(self, pairs: AdePairs, settings: SegmentationTransformSettings, *, training: bool, seed: int = 0):
        self.pairs, self.training, self.seed = pairs, training, seed
        self._steps = mmcv.transforms.Compose(_training_steps(settings) if training else _evaluation_steps(settings))
        cv2.setNumThreads(0)  # the worker processes are the parallelism

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return (image, label map), uint8: in training (3, S, S) and (S, S), where S is the crop's side.

        In evaluation the image is (3, H, W) with H and W multiples of 32, and the label map is (h, w) as in its file.

        Raises:
            UserError: the pair cannot be read, or its parts do not match.
        """
        epoch, index = key
        image, values = self.pairs.read(index)
        labels = values - np.uint8(1)  # 0 wraps around to IGNORED
        results = {"img": _turned(image)}  # mmsegmentation's transforms expect BGR
        if self.training:
            results |= {"gt_seg_map": labels, "seg_fields": ["gt_seg_map"]}
        with own_randomness(self.seed, epoch, index):
            results = self._steps(results)
        return _to_tensor(results["img"]), torch.from_numpy(np.ascontiguousarray(results.get("gt_seg_map", labels)))

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> Batch:
        """Stack samples of one size; in evaluation a batch is one sample."""
        return tuple(default_collate(samples))

    def name(self, index: int) -> str:
        """Return an image's file name."""
        return self.pairs.name(index)


def resize(image: Tensor, settings: SegmentationTransformSettings) -> Tensor:
    """Resize a picture, uint8 (3, h, w), as in evaluation, to (3, H, W) with H and W multiples of 32."""
    return _to_tensor(
        mmcv.transforms.Compose(_evaluation_steps(settings))({"img": _turned(image.permute(1, 2, 0).numpy())})["img"]
    )


def _evaluation_steps(settings: SegmentationTransformSettings) -> list:
    """Return mmsegmentation's transforms of an image in evaluation; its label map keeps its size."""
    return [
        transforms.Resize(scale=settings.scale, keep_ratio=True),
        transforms.ResizeToMultiple(size_divisor=_MULTIPLE),
    ]


def _training_steps(settings: SegmentationTransformSettings) -> list:
    """Return mmsegmentation's transforms of an image and its label map in training, in the order of its recipes."""
    size = (settings.crop_size, settings.crop_size)
    # the published recipe pads with 0 after normalisation; here the padding is the byte that normalisation maps to 0,
    # within 0.01: the rounded mean
    filling = {"img": tuple(round(255 * mean) for mean in reversed(settings.mean)), "seg": IGNORED}
    return [
        mmcv.transforms.RandomResize(
            scale=settings.scale, ratio_range=settings.ratio, resize_type="mmseg.Resize", keep_ratio=True
        ),
        transforms.RandomCrop(crop_size=size, cat_max_ratio=settings.cat_max_ratio, ignore_index=IGNORED),
        transforms.RandomFlip(prob=settings.hflip),
        *([transforms.PhotoMetricDistortion()] if settings.photometric else []),
        mmcv.transforms.Pad(size=size, pad_val=filling),
    ]


def _turned(image: np.ndarray) -> np.ndarray:
    """Reverse the channel order of (H, W, 3), between RGB and OpenCV's BGR."""
    return np.ascontiguousarray(image[..., ::-1])


def _to_tensor(image: np.ndarray) -> Tensor:
    """Convert OpenCV's image, BGR uint8 (H, W, 3), to RGB (3, H, W)."""
    return torch.from_numpy(_turned(image).transpose(2, 0, 1).copy())
