"""Vittt with other inner learners: what the paper on KV binding does to LaCT and ViT3, where it carries over
(`repro.models.ttt_mixer.STEPS`).

The inner LayerNorm keeps Vittt's learner from reducing to linear attention. The learners `plain` and `dot` reduce to it
and have a parallel form (`kernels.ttt_linear.plain`). `import repro.models` registers the models with timm.
"""

from typing import Any

from .backbone import register_sizes
from .reading import Reading
from .ttt_mixer import Step
from .vittt import Vittt
from .vittt_block import EPS, Pool


class VitttLadder(Vittt):
    """Vittt with the inner learner of one step of the ablation chain; see `Vittt` for the arguments."""

    def __init__(self, *, step: Step = "own", pool: Pool = "mean", **kwargs: Any):
        # `pool` is named, since timm's `global_pool` becomes it in classes whose signature has it
        super().__init__(step=step, pool=pool, **kwargs)
        options = {"design": self.design, "chunk_size": self.chunk_size, "w0": self.w0, "eps": EPS, "step": step}
        if self.reading != Reading():
            options["reading"] = self.reading
        # draw the mixers a second time, after all other weights: recorded results were trained from this order of draws
        for block in self.blocks:
            # a mixer asks for the number of tokens only where that is its chunk size
            tokens = block.mixer.built_chunk
            block.mixer = block.mixer_class(self.embed_dim, self.num_heads, tokens, **options)


register_sizes(
    VitttLadder,
    {
        "ladder_vittt_tiny_patch16_224": {"embed_dim": 192, "num_heads": 3},
        "ladder_vittt_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
        "ladder_vittt_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
        # for tests and the embedded data sets
        "ladder_vittt_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 1},
    },
)
