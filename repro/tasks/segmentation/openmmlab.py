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
        import mmcv.transforms
        import mmengine.config
        import mmengine.model
        import mmengine.structures
        import mmseg.evaluation
        import mmseg.models
        import mmseg.registry
        import mmseg.structures
        from mmseg.datasets import transforms
except ImportError as error:  # among them: OpenCV's build for desktops without the libraries of one
    raise UserError(f"segmentation needs mmsegmentation and OpenCV, and {error}: {INSTALL}") from error

__all__ = ["cv2", "mmcv", "mmengine", "mmseg", "quiet", "transforms"]
