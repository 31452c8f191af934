"""Drawing of a detector's predictions on a picture."""

from collections.abc import Sequence

import torch
from matplotlib.font_manager import findfont
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ..dense.base import choose_enlargement, list_colours
from .mask_rcnn import Detections

_COLOURS = list_colours()


def draw(image: Tensor, detections: Detections, names: Sequence[str], min_score: float = 0.0) -> Image.Image:
    """Draw boxes, masks, class names and any scores on a picture; small pictures are enlarged.

    Args:
        image: uint8 (3, H, W).
        detections: in pixels of the picture, see `MaskRcnn.detect`; the ground truth has no `scores`.
        names: of the labels 1, 2, ...
        min_score: smallest score that is drawn.
    """
    scores = detections.get("scores")
    shown = slice(None) if scores is None else scores >= min_score
    boxes, labels, masks = (detections[name][shown].cpu() for name in ("boxes", "labels", "masks"))
    factor = choose_enlargement(image)
    image, masks = (pixels.repeat_interleave(factor, 1).repeat_interleave(factor, 2) for pixels in (image.cpu(), masks))
    if not len(labels):
        return to_pil_image(image)
    colours = [_COLOURS[(label - 1) % len(_COLOURS)] for label in labels.tolist()]
    texts = [names[label - 1] for label in labels.tolist()]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores[shown].tolist(), strict=True)]
    # where masks overlap, the first one is on top: it has the highest score
    free = torch.ones_like(masks[0])
    for mask in masks:  # in place, since the masks of many objects on a large photo take gigabytes
        mask &= free
        free &= ~mask
    image = draw_segmentation_masks(image, masks, alpha=0.45, colors=colours)
    side = min(image.shape[1:])
    # matplotlib ships this font
    font = {"font": findfont("DejaVu Sans"), "font_size": side // 36, "label_colors": "white"}
    return to_pil_image(
        draw_bounding_boxes(image, boxes * factor, texts, colours, width=side // 256, fill_labels=True, **font)
    )
