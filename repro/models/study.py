"""The design study of ViT3: a DeiT without class token whose attention is replaced by an inner learner of any kind.

Small is DeiT-S, on which the study was made, and nano a model for the embedded data sets. Options choose the inner
learner, see `repro.models.inner.InnerLoop`; softmax attention in the same shell is one of the mixers. `import
repro.models` registers the models with timm.
"""

from typing import Any, Literal, get_args

from torch import nn

from .backbone import register_sizes
from .inner import InnerLoop
from .inner_mixer import STARTS, InnerMixer, Start
from .shell import ClassFreeViT, Positions, SoftmaxMixer, require_choice

Mixer = Literal["inner", "softmax"]


class Study(ClassFreeViT):
    """The models of the design study.

    Args:
        num_heads: heads h.
        mixer: `inner` for an inner learner, or `softmax`.
        positions: `table` is added to the patches, `block_table` in every block, or `none`; see `ClassFreeViT`.
        inner_model, inner_width, inner_depth, inner_loss, inner_lr, inner_rate, inner_epochs, inner_batches,
        inner_damping: see
            `InnerLoop`.
        inner_start: `random`, or `identity` for the last inner weight.
        kwargs: see `ClassFreeViT`.

    A choice that is not known, or one of the inner learner without effect, is a ValueError.
    """

    def __init__(
        self,
        *,
        num_heads: int = 6,
        mixer: Mixer = "inner",
        positions: Positions = "block_table",
        inner_model: str = "mlp",
        inner_width: int = 1,
        inner_depth: int = 2,
        inner_loss: str = "dot",
        inner_lr: float = 1.0,
        inner_rate: str = "fixed",
        inner_epochs: int = 1,
        inner_batches: int = 1,
        inner_damping: bool = False,
        inner_start: Start = "random",
        **kwargs: Any,
    ):
        require_choice("mixer", mixer, get_args(Mixer))
        require_choice("inner_start", inner_start, STARTS)
        loop = InnerLoop(
            model=inner_model,
            width=inner_width,
            depth=inner_depth,
            loss=inner_loss,
            lr=inner_lr,
            rate=inner_rate,
            epochs=inner_epochs,
            batches=inner_batches,
            damping=inner_damping,
        )
        if mixer == "softmax" and (loop != InnerLoop() or inner_start != "random"):
            raise ValueError("mixer softmax: has no inner learner, so leave its options out")

        def build_mixer(dim: int) -> tuple[nn.Module, None]:
            if mixer == "softmax":
                return SoftmaxMixer(dim, num_heads), None
            return InnerMixer(dim, num_heads, loop, start=inner_start), None

        super().__init__(build_mixer, num_heads=num_heads, positions=positions, **kwargs)


register_sizes(
    Study,
    {
        # DeiT-S without its class token, 23.472 M parameters with the two-layer MLP
        "study_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
        # for the embedded data sets: as many tokens, of a pixel each, as a scanned digit has pixels
        "study_nano_patch4_32": {
            "img_size": 32,
            "patch_size": 4,
            "embed_dim": 48,
            "depth": 2,
            "num_heads": 2,
            "position_std": 0.3,
        },
        # the shell of the other families' nanos
        "study_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2},
    },
)
