"""What is used of mmsegmentation, mmcv and mmengine: in one place, because they print and warn while they are imported."""

import contextlib
import warnings
from collections.abc import Iterator

from ...core.errors import INSTALL, UserError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without mmsegmentation's prints and warnings."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        yield


try:
    with quiet():
        import cv2
        from mmcv.transforms import Compose, Pad, RandomResize
        from mmengine.config import ConfigDict
        from mmengine.model import BaseModule, initialize
        from mmengine.structures import PixelData
        from mmseg.datasets import ADE20KDataset
        from mmseg.datasets.transforms import PhotoMetricDistortion, RandomCrop, RandomFlip, Resize, ResizeToMultiple
        from mmseg.evaluation import IoUMetric
        from mmseg.models import EncoderDecoder
        from mmseg.registry import MODELS
        from mmseg.structures import SegDataSample
except ImportError as error:  # among them: OpenCV's build for desktops without the libraries of one
    raise UserError(f"segmentation needs mmsegmentation and OpenCV, and {error}: {INSTALL}") from error

__all__ = [
    "MODELS",
    "ADE20KDataset",
    "BaseModule",
    "Compose",
    "ConfigDict",
    "EncoderDecoder",
    "IoUMetric",
    "Pad",
    "PhotoMetricDistortion",
    "PixelData",
    "RandomCrop",
    "RandomFlip",
    "RandomResize",
    "Resize",
    "ResizeToMultiple",
    "SegDataSample",
    "cv2",
    "initialize",
    "quiet",
]
