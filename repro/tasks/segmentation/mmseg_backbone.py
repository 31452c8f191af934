"""This project's backbones in mmsegmentation's registry, for configs of one's own: `docs/examples/upernet_vittt_tiny_ade20k.py`."""

from pathlib import Path

from torch import Tensor

from ...models.adapter import build_adapter
from ...models.transfer import load_backbone
from .openmmlab import MODELS, BaseModule


@MODELS.register_module()
class VitttAdapter(BaseModule):
    """A plain backbone and its ViT-Adapter as `backbone=dict(type="VitttAdapter", name="vittt_tiny_patch16_224", ...)`.

    Args:
        name: a model of this project, or a ViT of timm's.
        options: what else the backbone takes.
        drop_path_rate: of the adapter, and the last in the backbone's linear rise from 0.
        freeze_backbone: train the adapter alone.
        weights: of the backbone: a file of `repro pretrain`, or an official one.

    Raises:
        ValueError: an unknown model, or one that the adapter does not fit. UserError: weights that do not fit.
    """

    def __init__(
        self,
        name: str,
        *,
        options: dict | None = None,
        drop_path_rate: float = 0.0,
        freeze_backbone: bool = False,
        weights: str | None = None,
    ):
        super().__init__()
        self.adapter = build_adapter(name, options=options, features="each", drop_path_rate=drop_path_rate, freeze_backbone=freeze_backbone)
        if weights is not None:
            load_backbone(self.adapter, Path(weights))

    def init_weights(self) -> None:
        """Nothing: all is initialised, or loaded, when it is built, and mmengine calls this later."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Normalised images (B, 3, H, W) -> maps (B, D, H/4, W/4), (B, D, H/8, W/8), (B, D, H/16, W/16), (B, D, H/32, W/32)."""
        return tuple(self.adapter(images))
