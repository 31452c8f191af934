"""This project's backbones in mmsegmentation's registry, as in `docs/examples/upernet_vittt_tiny_ade20k.py`."""

from pathlib import Path

from torch import Tensor

from ...models.checkpoints import open_weights
from ...models.pyramid import build_pyramid, load_backbone
from .openmmlab import mmengine, mmseg


@mmseg.registry.MODELS.register_module()
class VitttAdapter(mmengine.model.BaseModule):
    """A backbone as a pyramid of maps, for a config `backbone=dict(type="VitttAdapter", name=..., ...)`.

    Args:
        name: a registered model, e.g. `vittt_tiny_patch16_224`; a plain one gets a ViT-Adapter, a hierarchical one has
            its own maps.
        options: of the model, see `build_pyramid`.
        final_norm: see `repro.models.adapter.ViTAdapter`.
        drop_path_rate: of the adapter and of the backbone's last block; the blocks' rates rise linearly from 0.
        freeze_backbone: train only the adapter.
        weights: the backbone's: a file of `repro pretrain`, an official one, or one that timm can load.

    Raises:
        ValueError: the model is unknown or does not fit.
        UserError: the weights do not fit.
    """

    def __init__(
        self,
        name: str,
        *,
        options: dict | None = None,
        final_norm: bool = False,
        drop_path_rate: float = 0.0,
        freeze_backbone: bool = False,
        weights: str | None = None,
    ):
        super().__init__()
        adapter = {"final_norm": final_norm, "drop_path_rate": drop_path_rate, "freeze_backbone": freeze_backbone}
        self.adapter = build_pyramid(name, options=options, features="each", **adapter)
        if weights is not None:
            load_backbone(self.adapter, open_weights(Path(weights), model=name))

    def init_weights(self) -> None:
        """Do nothing: the constructor initialised or loaded everything, and mmengine calls this later."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map normalised images (B, 3, H, W) to maps of strides 4, 8, 16 and 32; see `repro.models.pyramid.Pyramid`."""
        return tuple(self.adapter(images))
