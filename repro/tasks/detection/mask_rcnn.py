"""Mask R-CNN with mmdet's R50-FPN settings: torchvision's modules where they agree with mmdet's, else subclasses.

Dimensions: B images, G ground-truth boxes, A anchors per image, K boxes of all images, P positive boxes, C classes with
the background as number 0, S side of a mask map. Boxes are fp32 (x1, y1, x2, y2) in pixels.

torchvision's code uses methods and attributes of the subclasses by name, such as `proposal_matcher`, `min_size` and
`set_low_quality_matches_`. Under another name, torchvision's own rule would hold without an error.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FeaturePyramidNetwork, roi_align
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import LevelMapper

from ..dense.base import DenseModel
from .params import MaskRcnnParams

STRIDES = (4, 8, 16, 32, 64)  # of P2 to P6
RATIOS = (0.5, 1.0, 2.0)  # height to width
BOX_SIDE, MASK_SIDE = 7, 14  # cells along a side of the maps that are pooled for the two heads
_Target = Mapping[str, Tensor]
Detections = dict[str, Tensor]  # predictions for one image
_Sizes = list[tuple[int, int]]  # (height, width) of each image


class MaskRcnn(DenseModel, nn.Module):
    """Mask R-CNN.

    Args:
        backbone: see `build_pyramid`; maps images (B, 3, H, W) to four feature maps.
        num_classes: number of classes, without the background.
        params: sizes of the heads.
    """

    def __init__(self, backbone: nn.Module, num_classes: int, params: MaskRcnnParams):
        super().__init__()
        self.backbone = backbone
        self.fpn = FeaturePyramidNetwork(list(backbone.channels), params.fpn_channels, LastLevelMaxPool())
        for layer in self.fpn.modules():  # mmdet's initialisation; torchvision's is Kaiming's
            if isinstance(layer, nn.Conv2d):
                nn.init.xavier_uniform_(layer.weight)
        self.rpn = ProposalNetwork(params)
        self.roi_heads = Heads(num_classes + 1, params)
        # scaled to pixel values from 0 to 255
        self.register_buffer("pixel_mean", 255 * torch.tensor(IMAGENET_DEFAULT_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", 255 * torch.tensor(IMAGENET_DEFAULT_STD).view(3, 1, 1), persistent=False)

    def forward(self, images: Sequence[Tensor], targets: Sequence[_Target]) -> dict[str, Tensor]:
        """Compute the five losses of a model in training mode.

        Args:
            images: uint8 (3, H, W), each of its own size.
            targets: for each image `boxes` (G, 4), `labels` (G,) int64 in 1..num_classes and `masks` (G, H, W) uint8; G
                may be 0.

        Returns:
            The scalars `loss_rpn_cls`, `loss_rpn_box`, `loss_cls`, `loss_box` and `loss_mask`, each with weight 1.
        """
        batch, features = self._features(images)
        proposals, rpn = self.rpn(batch, features, targets)
        losses = self.roi_heads(features, proposals, batch.image_sizes, targets)[1]
        return {"loss_rpn_cls": rpn["loss_objectness"], "loss_rpn_box": rpn["loss_rpn_box_reg"], **losses}

    @torch.inference_mode()
    def detect(self, images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Detect objects with a model in eval mode.

        Args:
            images: uint8 (3, H, W), each of its own size.
            sizes: for each image the height and width of the picture to which the result refers.

        Returns:
            For each image `boxes` (K, 4), `labels` (K,), `scores` (K,) in descending order, and `masks` (K, height,
            width) bool.
        """
        batch, features = self._features(images)
        detections = self.roi_heads(features, self.rpn(batch, features)[0], batch.image_sizes)[0]
        for found, (height, width), (to_height, to_width) in zip(detections, batch.image_sizes, sizes, strict=True):
            x, y = to_width / width, to_height / height  # from pixels of the input to those of the picture
            found["boxes"] = found["boxes"] * found["boxes"].new_tensor([x, y, x, y])
            found["masks"] = paste_masks(found["masks"], found["boxes"], (to_height, to_width))
        return detections

    def _features(self, images: Sequence[Tensor]) -> tuple[ImageList, dict[str, Tensor]]:
        """Normalise the images, pad them at right and bottom to one multiple of 32, and compute their maps P2 to P6."""
        sizes = [(image.shape[1], image.shape[2]) for image in images]
        height, width = (math.ceil(max(side) / 32) * 32 for side in zip(*sizes, strict=True))
        batch = self.pixel_mean.new_zeros(len(images), 3, height, width)
        for slot, image, (h, w) in zip(batch, images, sizes, strict=True):
            # normalised before padding: the padding is 0, the mean colour
            slot[:, :h, :w] = (image.to(batch.device, non_blocking=True) - self.pixel_mean) / self.pixel_std
        return ImageList(batch, sizes), self.fpn(dict(zip("0123", self.backbone(batch), strict=True)))


class Anchors(AnchorGenerator):
    """Unrounded anchors around (i * stride, j * stride) for the fixed strides of P2 to P6: three ratios a level.

    torchvision rounds sides, and strides by image // grid: 61 instead of 64 where 800 pixels have 13 rows.
    """

    def __init__(self, scale: float):
        super().__init__(tuple((scale * stride,) for stride in STRIDES), (RATIOS,) * len(STRIDES))
        roots = [math.sqrt(ratio) for ratio in RATIOS]
        sides = [[(scale * stride / root, scale * stride * root) for root in roots] for stride in STRIDES]
        self.cell_anchors = [torch.tensor([(-w / 2, -h / 2, w / 2, h / 2) for w, h in level]) for level in sides]

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return anchors (A, 4) for each image, always fp32: bf16 cannot hold every pixel position beyond 256."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        anchors = self.grid_anchors(
            [maps.shape[-2:] for maps in feature_maps], [(stride, stride) for stride in STRIDES]
        )
        return [torch.cat(anchors)] * len(image_list.image_sizes)


class IouMatcher(Matcher):
    """Assignment of boxes to ground truth by IoU: positive from `high` on, negative below `low`.

    In addition, the boxes that overlap a ground truth most, ties included, are assigned to it if the IoU is at least
    `min_quality`. Of several such ground truths, the last wins. torchvision assigns such a box to the ground truth that
    the box itself overlaps most, and from any IoU above 0.
    """

    def __init__(self, high: float, low: float, min_quality: float):
        super().__init__(high, low, allow_low_quality_matches=True)
        self.min_quality = min_quality

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        """Change `matches` (A,) in place, given IoUs (G, A)."""
        best = match_quality_matrix.amax(dim=1, keepdim=True)
        truth, box = torch.where((match_quality_matrix == best) & (best >= self.min_quality))
        matches.scatter_reduce_(0, box, truth, "amax", include_self=False)


class ProposalHead(RPNHead):
    """torchvision's RPN head, with fp32 outputs even under autocast."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return objectness (B, 3, h, w) and box deltas (B, 12, h, w) for each map."""
        objectness, deltas = super().forward(x)
        return [level.float() for level in objectness], [level.float() for level in deltas]


class ProposalNetwork(RegionProposalNetwork):
    """The region proposal network with an L1 loss."""

    def __init__(self, params: MaskRcnnParams):
        head = ProposalHead(params.fpn_channels, len(RATIOS))
        sampling = {
            "fg_iou_thresh": 0.7,
            "bg_iou_thresh": 0.3,
            "batch_size_per_image": params.rpn_samples,
            "positive_fraction": 0.5,
        }
        before = {"training": params.train_candidates, "testing": params.test_candidates}
        after = {"training": params.train_proposals, "testing": params.test_proposals}
        super().__init__(
            Anchors(params.anchor_scale), head, **sampling, pre_nms_top_n=before, post_nms_top_n=after, nms_thresh=0.7
        )
        self.proposal_matcher = IouMatcher(0.7, 0.3, min_quality=0.3)
        self.min_size = torch.finfo(torch.float32).tiny  # mmdet's: drop only empty boxes; torchvision's default is 1e-3

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute binary cross-entropy and L1 loss, both divided by the number of sampled anchors of all images."""
        positive, negative = (torch.cat(chosen).bool() for chosen in self.fg_bg_sampler(labels))
        sampled = torch.where(positive | negative)[0]
        loss_cls = F.binary_cross_entropy_with_logits(objectness.flatten()[sampled], torch.cat(labels)[sampled])
        positive = torch.where(positive)[0]
        loss_box = F.l1_loss(pred_bbox_deltas[positive], torch.cat(regression_targets)[positive], reduction="sum")
        return loss_cls, loss_box / len(sampled)


class PyramidRoiAlign(nn.Module):
    """RoIAlign with half-pixel centres and adaptive sampling.

    A box is pooled from level floor(log2(sqrt(area) / 56)) of P2 to P5, clamped. torchvision's `MultiScaleRoIAlign` has
    neither aligned centres nor adaptive sampling, and keeps the strides that it infers from the first images.
    """

    def __init__(self, side: int):
        super().__init__()
        self.side, self.level_of = side, LevelMapper(2, 5)  # counts levels from 0 for P2

    def forward(self, features: Mapping[str, Tensor], boxes: list[Tensor], image_shapes: _Sizes) -> Tensor:
        """Pool maps (B, channels, ., .) by level over the boxes of each image to (K, channels, side, side) fp32."""
        levels = self.level_of(boxes)
        levels_by_image = levels.split([len(of_image) for of_image in boxes])
        maps = list(features.values())
        pooled = maps[0].new_zeros(len(levels), maps[0].shape[1], self.side, self.side, dtype=torch.float32)
        for level, (feature, stride) in enumerate(zip(maps[:4], STRIDES[:4], strict=True)):
            here = [of_image[own == level] for of_image, own in zip(boxes, levels_by_image, strict=True)]
            pooled[levels == level] = roi_align(
                feature.float(), here, self.side, 1 / stride, sampling_ratio=0, aligned=True
            )
        return pooled


class Heads(RoIHeads):
    """Box and mask heads with an L1 loss, binary mask targets, and mmdet's initialisation.

    Args:
        num_classes: C, with the background.
        params: sizes of the heads.
    """

    def __init__(self, num_classes: int, params: MaskRcnnParams):
        box_head = TwoMLPHead(params.fpn_channels * BOX_SIDE**2, params.box_channels)
        box_predictor = FastRCNNPredictor(params.box_channels, num_classes)
        if params.class_agnostic_boxes:
            box_predictor.bbox_pred = nn.Linear(params.box_channels, 4)
        mask_head = MaskRCNNHeads(params.fpn_channels, (params.mask_channels,) * params.mask_layers, 1)
        mask_predictor = MaskRCNNPredictor(params.mask_channels, params.mask_channels, num_classes)
        masks = {"mask_roi_pool": PyramidRoiAlign(MASK_SIDE), "mask_head": mask_head, "mask_predictor": mask_predictor}
        sampling = {
            "fg_iou_thresh": 0.5,
            "bg_iou_thresh": 0.5,
            "batch_size_per_image": params.roi_samples,
            "positive_fraction": 0.25,
        }
        boxes = {"bbox_reg_weights": (10.0, 10.0, 5.0, 5.0), "score_thresh": params.min_score}
        boxes |= {"nms_thresh": 0.5, "detections_per_img": params.max_detections}
        super().__init__(PyramidRoiAlign(BOX_SIDE), box_head, box_predictor, **sampling, **boxes, **masks)
        self.proposal_matcher = IouMatcher(0.5, 0.5, min_quality=0.5)
        for layer in (self.box_head.fc6, self.box_head.fc7):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(self.box_predictor.cls_score.weight, std=0.01)
        nn.init.normal_(self.box_predictor.bbox_pred.weight, std=0.001)
        for part in (self.box_head, self.box_predictor, self.mask_predictor):
            for name, parameter in part.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: _Sizes,
        targets: Sequence[_Target] | None = None,
    ) -> tuple[list[Detections], dict[str, Tensor]]:
        """Return ([], losses) in training mode, else (detections, {}).

        Their `masks` (K, S, S) are probabilities within boxes.
        """
        if self.training:
            proposals, matched, labels, regression = self.select_training_samples(proposals, targets)
        box_features = self.box_head(self.box_roi_pool(features, proposals, image_shapes))
        logits, deltas = (output.float() for output in self.box_predictor(box_features))
        # class-agnostic: (K, 4) becomes the same box for every class, since torchvision expects (K, 4C)
        deltas = deltas.repeat(1, 4 * logits.shape[1] // deltas.shape[1])
        if not self.training:
            boxes, scores, labels = self.postprocess_detections(logits, deltas, proposals, image_shapes)
            masks = self._masks(features, boxes, labels, image_shapes).sigmoid().split([len(own) for own in boxes])
            names = ("boxes", "scores", "labels", "masks")
            return [
                dict(zip(names, of_image, strict=True)) for of_image in zip(boxes, scores, labels, masks, strict=True)
            ], {}
        loss_cls, loss_box = box_losses(logits, deltas, torch.cat(labels), torch.cat(regression))
        positive = [of_image > 0 for of_image in labels]
        boxes, labels, matched = (
            [x[keep] for x, keep in zip(xs, positive, strict=True)] for xs in (proposals, labels, matched)
        )
        masks = self._masks(features, boxes, labels, image_shapes)
        expected = [
            mask_targets(target["masks"], own, index, masks.shape[-1])
            for target, own, index in zip(targets, boxes, matched, strict=True)
        ]
        # without a positive box the loss is 0 instead of NaN
        loss_mask = F.binary_cross_entropy_with_logits(masks, torch.cat(expected), reduction="sum") / max(
            1, masks.numel()
        )
        return [], {"loss_cls": loss_cls, "loss_box": loss_box, "loss_mask": loss_mask}

    def _masks(
        self, features: dict[str, Tensor], boxes: list[Tensor], labels: list[Tensor], image_shapes: _Sizes
    ) -> Tensor:
        """Compute mask logits (K, S, S) fp32, each for the class of its box."""
        logits = self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, image_shapes)))
        return logits[torch.arange(len(logits), device=logits.device), torch.cat(labels)].float()


def box_losses(logits: Tensor, deltas: Tensor, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cross-entropy and L1 loss of the box head, both divided by the number K of sampled proposals.

    Args:
        logits: (K, C).
        deltas: (K, 4C), a box for each class; only that of the true class counts.
        labels: (K,) int64, 0 for the background, whose boxes do not count.
        targets: (K, 4).
    """
    positive = torch.where(labels > 0)[0]
    own = deltas.unflatten(1, (-1, 4))[positive, labels[positive]]
    return F.cross_entropy(logits, labels), F.l1_loss(own, targets[positive], reduction="sum") / len(labels)


def mask_targets(masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
    """Compute the targets of the mask head: RoIAlign of the bitmap under each box, 1 where it is at least 0.5.

    Args:
        masks: (G, H, W) uint8.
        boxes: (P, 4).
        matched: (P,) int64, the index of each box's mask.
        side: S.

    Returns:
        (P, S, S) fp32 of zeros and ones.
    """
    rois = torch.cat([matched[:, None].to(boxes), boxes], dim=1)
    return (roi_align(masks[:, None].float(), rois, side, 1.0, sampling_ratio=0, aligned=True)[:, 0] >= 0.5).float()


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Sample masks of boxes bilinearly at the pixel centres of the picture; true from 0.5 on.

    Args:
        masks: (K, S, S) probabilities within the boxes.
        boxes: (K, 4) in pixels of the picture.
        size: its height and width.

    Returns:
        (K, height, width) bool.
    """
    height, width = size
    pasted = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    for canvas, mask, (x1, y1, x2, y2) in zip(pasted, masks, boxes.tolist(), strict=True):
        # outside the box, zero padding has at least half the weight of a sample, which cannot reach 0.5
        rows = slice(max(0, math.floor(y1)), min(height, math.ceil(y2)))
        columns = slice(max(0, math.floor(x1)), min(width, math.ceil(x2)))
        y = (torch.arange(rows.start, rows.stop, device=masks.device) + 0.5 - y1) / (y2 - y1) * 2 - 1
        x = (torch.arange(columns.start, columns.stop, device=masks.device) + 0.5 - x1) / (x2 - x1) * 2 - 1
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        canvas[rows, columns] = F.grid_sample(mask[None, None], grid[None], align_corners=False)[0, 0] >= 0.5
    return pasted
