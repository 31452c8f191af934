"""A drawing of what a detector sees in a picture."""

import math
from collections.abc import Sequence

from matplotlib.font_manager import findfont
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ..dense.base import list_colours
from .mask_rcnn import Detections

_LEGIBLE = 512  # pixels of the short side from which on labels of small objects can be read
_COLOURS = list_colours()


def draw(image: Tensor, detections: Detections, names: Sequence[str], min_score: float = 0.0) -> Image.Image:
    """Boxes, masks, class names and, where there are any, scores on a picture, which is enlarged where it is small.

    Args:
        image: uint8 (3, H, W).
        detections: in pixels of the picture, see `MaskRcnn.detect`; the truth has no `scores`.
    """
    scores = detections.get("scores")
    shown = slice(None) if scores is None else scores >= min_score
    boxes, labels, masks = (detections[name][shown].cpu() for name in ("boxes", "labels", "masks"))
    factor = math.ceil(_LEGIBLE / min(image.shape[1:]))
    image, masks = (pixels.repeat_interleave(factor, 1).repeat_interleave(factor, 2) for pixels in (image.cpu(), masks))
    if not len(labels):
        return to_pil_image(image)
    colours = [_COLOURS[(label - 1) % len(_COLOURS)] for label in labels.tolist()]
    texts = [names[label - 1] for label in labels.tolist()]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores[shown].tolist(), strict=True)]
    # where masks overlap, the first one is on top, which has the highest score
    covered = masks.cumsum(0) - masks.long() > 0
    image = draw_segmentation_masks(image, masks & ~covered, alpha=0.45, colors=colours)
    side = min(image.shape[1:])
    # of matplotlib, so it is there
    font = {"font": findfont("DejaVu Sans"), "font_size": side // 36, "label_colors": "white"}
    return to_pil_image(
        draw_bounding_boxes(image, boxes * factor, texts, colours, width=side // 256, fill_labels=True, **font)
    )
