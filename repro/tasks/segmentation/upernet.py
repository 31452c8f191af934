"""mmsegmentation's UperNet: its heads on four feature maps, its losses, its sliding-window inference."""

from torch import nn

from ...core.errors import UserError
from ..dense.base import DenseModel
from .data import IGNORED
from .openmmlab import mmengine, mmseg, quiet
from .params import UperNetParams

_AUX_MAP = 2  # stride 16


class UperNet(DenseModel, mmseg.models.EncoderDecoder):
    """mmsegmentation's model, with the backbone's parameter groups for the optimiser."""


def build_upernet(
    backbone: nn.Module, params: UperNetParams, *, num_classes: int, window: int, stride: int | None
) -> UperNet:
    """Build UPerHead on all four maps and, for training, FCNHead on the map of stride 16.

    Called with normalised images (B, 3, H, W), the model returns logits (B, num_classes, H/4, W/4). Called with
    `mode="loss"` and the label maps, it returns the losses of both heads: the cross-entropy of the logits, upsampled
    bilinearly to the label map. Without `class_weights` this is averaged over ALL pixels, where those with the label
    `IGNORED` count as 0; with them, over the labelled pixels, weighted by class. The auxiliary loss is multiplied by
    `aux_weight`. `predict` averages the logits of overlapping windows; an image smaller than a window is one window.
    Without a `stride` it takes the whole image at once.

    Args:
        backbone: a `repro.models.pyramid.Pyramid`; it is used without a copy.
        params: sizes and losses of the heads.
        num_classes: number of classes, without `IGNORED`.
        window, stride: side of the windows, and distance from one to the next, in pixels; None for no windows.

    Raises:
        UserError: the number of class weights is not that of the classes.
    """
    weights = params.class_weights
    if weights is not None and len(weights) != num_classes:
        raise UserError(f"upernet.class_weights: {len(weights)} numbers for {num_classes} classes; give one for each")
    channels = list(backbone.channels)
    both = {"num_classes": num_classes, "dropout_ratio": params.dropout, "ignore_index": IGNORED}
    both |= {"align_corners": False, "norm_cfg": {"type": "BN"}}
    decode = {"type": "UPerHead", "in_channels": channels, "in_index": [0, 1, 2, 3]}
    decode |= {"channels": params.channels, "pool_scales": params.pool_scales}
    aux = {"type": "FCNHead", "in_channels": channels[_AUX_MAP], "in_index": _AUX_MAP}
    aux |= {"channels": params.aux_channels, "num_convs": 1, "concat_input": False}
    windows = (
        {"mode": "whole"}
        if stride is None
        else {"mode": "slide", "crop_size": (window, window), "stride": (stride, stride)}
    )
    loss = {"type": "CrossEntropyLoss", "avg_non_ignore": False, "class_weight": weights}
    with quiet():
        model = UperNet(
            backbone={"type": lambda: backbone},  # the registry calls it, and so takes the module as it is
            decode_head=both | decode | {"loss_decode": loss},
            auxiliary_head=both | aux | {"loss_decode": loss | {"loss_weight": params.aux_weight}},
            test_cfg=mmengine.config.ConfigDict(windows),
        )
    for head in (model.decode_head, model.auxiliary_head):
        # initialises only the classifiers, N(0, 0.01); the model's own init_weights would also change the backbone
        mmengine.model.initialize(head, head.init_cfg)
    return model
