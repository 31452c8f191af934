"""Prediction and drawing of a segmenter on the user's own pictures."""

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import draw_segmentation_masks

from ...data.classification import ToInput
from ..dense.base import choose_enlargement, list_colours
from .data import IGNORED, resize
from .openmmlab import mmseg
from .params import SegmentationTransformSettings
from .task import label_map

_FEW = list_colours()  # for as many classes
_MANY = [tuple(colour) for colour in mmseg.datasets.ADE20KDataset.METAINFO["palette"]]
_FONT_PX, _ROW_PX = 16, 22  # of the legend
_MIN_SHARE = 0.002  # smallest share of the picture for a class in the legend


def predict(model: mmseg.models.EncoderDecoder, image: Tensor, settings: SegmentationTransformSettings) -> Tensor:
    """Predict the class of every pixel of a picture, uint8 (3, h, w), in eval mode: (h, w) int64 on the CPU."""
    device = next(model.parameters()).device
    return label_map(model, ToInput(settings, device)(resize(image, settings)[None]), tuple(image.shape[1:])).cpu()


def draw(image: Tensor, labels: Tensor, names: Sequence[str]) -> Image.Image:
    """Draw the colours of the classes over a picture, enlarged where it is small, with a legend at its right.

    Args:
        image: uint8 (3, h, w).
        labels: (h, w) integers: indices into `names`, or `IGNORED`, which is not coloured.
        names: of the classes.
    """
    factor = choose_enlargement(image)
    found, counts = labels[labels != IGNORED].unique(return_counts=True)
    shares = {int(index): int(count) / labels.numel() for index, count in zip(found, counts, strict=True)}
    palette = _FEW if len(names) <= len(_FEW) else _MANY
    colours = {index: palette[index % len(palette)] for index in shares}
    mixed = image
    if shares:
        masks = torch.stack([labels == index for index in shares])
        mixed = draw_segmentation_masks(image, masks, alpha=0.55, colors=list(colours.values()))
    picture = to_pil_image(mixed.repeat_interleave(factor, 1).repeat_interleave(factor, 2))

    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    rows = [(index, f"{names[index]} {share:.1%}") for index, share in largest_first if share >= _MIN_SHARE]
    font = ImageFont.load_default(_FONT_PX)
    width = max((math.ceil(font.getlength(text)) for _, text in rows), default=0) + 2 * _ROW_PX
    canvas = Image.new("RGB", (picture.width + width, max(picture.height, _ROW_PX * len(rows))), "white")
    canvas.paste(picture)
    pen = ImageDraw.Draw(canvas)
    for row, (index, text) in enumerate(rows):
        left, top = picture.width + 6, row * _ROW_PX + 3
        pen.rectangle((left, top, left + _FONT_PX, top + _FONT_PX), fill=colours[index], outline="black")
        pen.text((left + _ROW_PX, top + _FONT_PX / 2), text, fill="black", font=font, anchor="lm")
    return canvas
