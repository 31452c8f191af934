"""A drawing of what a detector sees in a picture."""

import math
from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.font_manager import findfont
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from .mask_rcnn import Detections

_LEGIBLE = 512  # pixels of the short side from which on labels can be read beside small objects
_COLOURS = [tuple(round(255 * part) for part in colour) for colour in colormaps["tab10"].colors]


def draw(image: Tensor, detections: Detections, names: Sequence[str], min_score: float) -> Image.Image:
    """Boxes, masks, class names and scores on a picture, which is enlarged where it is small.

    Args:
        image: uint8 (3, H, W).
        detections: in pixels of the picture, see `MaskRcnn.detect`.
        names: of label 1, 2, ...
        min_score: detections below are left out.
    """
    shown = detections["scores"] >= min_score
    boxes, labels, scores, masks = (detections[name][shown].cpu() for name in ("boxes", "labels", "scores", "masks"))
    factor = math.ceil(_LEGIBLE / min(image.shape[1:]))
    image, masks = (pixels.repeat_interleave(factor, 1).repeat_interleave(factor, 2) for pixels in (image.cpu(), masks))
    if not len(labels):
        return to_pil_image(image)
    colours = [_COLOURS[(label - 1) % len(_COLOURS)] for label in labels.tolist()]
    texts = [f"{names[label - 1]} {score:.2f}" for label, score in zip(labels.tolist(), scores.tolist(), strict=True)]
    image = draw_segmentation_masks(image, masks, alpha=0.45, colors=colours)
    side = min(image.shape[1:])
    font = {"font": findfont("DejaVu Sans"), "font_size": side // 36, "label_colors": "white"}  # of matplotlib, so it is there
    return to_pil_image(draw_bounding_boxes(image, boxes * factor, texts, colours, width=side // 256, fill_labels=True, **font))
