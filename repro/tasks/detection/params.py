"""Parameters of a detector's training. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses

from ...core.config import bounded
from ...data.settings import DetectionTransformSettings
from ..dense.base import DenseParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRcnnParams:
    """Sizes of Mask R-CNN; the defaults are mmdet's for R50-FPN, which Vision-RWKV uses.

    Args:
        fpn_channels: channels of the pyramid and the RPN.
        box_channels: width of the two fully connected layers of the box head.
        class_agnostic_boxes: the box head predicts one box for all classes (mmdet's `reg_class_agnostic`) instead of
            one for each: with few scenes, every box then trains it.
        mask_channels: channels of the mask head.
        mask_layers: number of 3x3 convolutions in the mask head.
        anchor_scale: side of a level's square anchor in strides of that level.
        rpn_samples: anchors per image in the RPN's loss, at most half of them positive.
        train_candidates, test_candidates: boxes per level and image that enter the RPN's non-maximum suppression.
        train_proposals, test_proposals: boxes per image that come out of it.
        roi_samples: proposals per image in the heads' loss, at most a quarter of them positive.
        min_score: smallest score of a detection.
        max_detections: per image; COCO's evaluation uses no more than 100.
    """

    fpn_channels: int = bounded(256, ge=1)
    box_channels: int = bounded(1024, ge=1)
    class_agnostic_boxes: bool = False
    mask_channels: int = bounded(256, ge=1)
    mask_layers: int = bounded(4, ge=1)
    anchor_scale: float = bounded(8.0, gt=0)
    rpn_samples: int = bounded(256, ge=2)
    train_candidates: int = bounded(2000, ge=1)
    test_candidates: int = bounded(1000, ge=1)
    train_proposals: int = bounded(1000, ge=1)
    test_proposals: int = bounded(1000, ge=1)
    roi_samples: int = bounded(512, ge=4)
    min_score: float = bounded(0.05, ge=0, le=1)
    max_detections: int = bounded(100, ge=1, le=100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectParams(DenseParams):
    """A cell of `detect:`.

    Args:
        mask_rcnn: sizes of the heads.
        transform: size and augmentation of the inputs.
    """

    mask_rcnn: MaskRcnnParams = MaskRcnnParams()
    transform: DetectionTransformSettings
