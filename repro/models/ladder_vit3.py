"""The steps of the paper on KV binding from ViT3 to linear attention.

Each step is ViT3 with another inner loop in its heads (`repro.models.vit3.STEPS`). The paper's V2, V4 and V5 remove
parts that ViT3 does not have. `import repro.models` registers the models with timm.
"""

from typing import Any

from .backbone import register_sizes
from .shell import NANO_PATCH16_144
from .vit3 import InnerTraining, ViT3


class ViT3Ladder(ViT3):
    """ViT3 with the inner loop of one step of the ablation chain; see `ViT3` for the arguments."""

    def __init__(self, *, step: str = "own", inner_steps: int = 1, **kwargs: Any):
        super().__init__(step=step, inner_steps=inner_steps, **kwargs)
        # draw the mixers a second time, after all other weights: recorded results were trained from this order of draws
        for block in self.blocks:
            block.attn = InnerTraining(self.embed_dim, self.num_heads, step, inner_steps)
        self.init_weights()


register_sizes(
    ViT3Ladder,
    {
        "ladder_vit3_tiny_patch16_224": {"embed_dim": 192, "num_heads": 6},
        "ladder_vit3_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
        "ladder_vit3_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
        # for tests and the embedded data sets; with patches of 4 pixels, a patch is a pixel of a scanned digit
        "ladder_vit3_nano_patch16_144": NANO_PATCH16_144,
        "ladder_vit3_nano_patch4_32": {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2},
    },
)
