"""UperNet, mmsegmentation's own: its heads on four feature maps, its losses, its inference by windows."""

from typing import Any

from torch import nn

from .data import IGNORED
from .openmmlab import ConfigDict, EncoderDecoder, initialize, quiet
from .params import UperNetParams

_AUX_WEIGHT = 0.4
_AUX_MAP = 2  # stride 16


class UperNet(EncoderDecoder):
    """mmsegmentation's model with what timm's layer-wise decay and its exemptions ask of one, both the backbone's."""

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The backbone's groups, all else in the last of them."""
        return self.backbone.group_matcher(coarse, prefix="backbone.")

    def no_weight_decay(self) -> set[str]:
        """What the backbone exempts."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def build_upernet(backbone: nn.Module, params: UperNetParams, *, num_classes: int, window: int, stride: int) -> UperNet:
    """UPerHead on all four maps and, for training, FCNHead on that of stride 16.

    The model called with normalised images (B, 3, H, W) returns logits (B, num_classes, H/4, W/4). Called with `mode="loss"` and
    the label maps it returns both heads' losses: cross-entropy of the logits, upsampled bilinearly to the label map, over ALL its
    pixels, those with label `IGNORED` counting as 0; the auxiliary one times 0.4. `predict` averages the logits of overlapping
    windows; an image that is smaller than one is a window of its own.

    Args:
        backbone: images (B, 3, H, W) -> maps (B, D, H/4, W/4) to (B, D, H/32, W/32); `embed_dim` is D. It is used as it is.
        params: widths of the heads.
        num_classes: classes, `IGNORED` not among them.
        window, stride: side of the windows and from one to the next, in pixels.
    """
    dim = backbone.embed_dim
    both = {
        "num_classes": num_classes,
        "dropout_ratio": params.dropout,
        "ignore_index": IGNORED,
        "align_corners": False,
        "norm_cfg": {"type": "BN"},
    }
    decode = {
        "type": "UPerHead",
        "in_channels": [dim] * 4,
        "in_index": [0, 1, 2, 3],
        "channels": params.channels,
        "pool_scales": params.pool_scales,
    }
    aux = {
        "type": "FCNHead",
        "in_channels": dim,
        "in_index": _AUX_MAP,
        "channels": params.aux_channels,
        "num_convs": 1,
        "concat_input": False,
    }
    loss = {"type": "CrossEntropyLoss", "avg_non_ignore": False}
    with quiet():
        model = UperNet(
            backbone={"type": lambda: backbone},
            decode_head=both | decode | {"loss_decode": loss},
            auxiliary_head=both | aux | {"loss_decode": loss | {"loss_weight": _AUX_WEIGHT}},
            test_cfg=ConfigDict(mode="slide", crop_size=(window, window), stride=(stride, stride)),
        )
    for head in (model.decode_head, model.auxiliary_head):
        initialize(head, head.init_cfg)  # the classifiers, N(0, 0.01); init_weights of the whole would reach into the backbone
    return model
