"""Imports from mmsegmentation, mmcv and mmengine in one place, since they print and warn while they are imported."""

import contextlib
import warnings
from collections.abc import Iterator

from ...core.errors import INSTALL, UserError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the prints and warnings of mmsegmentation."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        yield


try:
    with quiet():
        import cv2
        import mmcv.transforms
        import mmengine.config
        import mmengine.model
        import mmengine.structures
        import mmseg.evaluation
        import mmseg.models
        import mmseg.registry
        import mmseg.structures
        from mmseg.datasets import transforms
except ImportError as error:  # also raised by OpenCV's desktop build where its system libraries are missing
    raise UserError(f"segmentation needs mmsegmentation and OpenCV, and {error}: {INSTALL}") from error

__all__ = ["cv2", "mmcv", "mmengine", "mmseg", "quiet", "transforms"]
