"""The design study of ViT3: a DeiT without class token whose attention is replaced by an inner learner of any kind.

The size small is DeiT-S, the model of the study; the nanos are for the embedded data sets. Options choose the inner
learner, see `repro.models.inner.InnerLoop`. The mixer may also be softmax attention in the same shell. `import
repro.models` registers the models with timm.
"""

from typing import Any, Literal, get_args

from torch import nn

from .backbone import register_sizes
from .inner import InnerLoop
from .inner_mixer import STARTS, InnerMixer, Start
from .shell import NANO_PATCH4_32, NANO_PATCH16_144, ClassFreeViT, Positions, SoftmaxMixer, require_choice

Mixer = Literal["inner", "softmax"]
# the options of `InnerLoop` that the study varies; others have no prefix `inner_` here
_OPTIONS = ("model", "width", "depth", "loss", "lr", "rate", "epochs", "batches", "damping")


class Study(ClassFreeViT):
    """ViT of the design study.

    Args:
        num_heads: heads h.
        mixer: `inner` for an inner learner, or `softmax`.
        positions: see `ClassFreeViT`.
        inner_start: `random`, or `identity` to start the last inner weight from I.
        kwargs: options of `InnerLoop` with the prefix `inner_`, such as `inner_model`; for the rest see `ClassFreeViT`.

    Raises:
        ValueError: an unknown choice, or an option of the inner learner without effect.
    """

    def __init__(
        self,
        *,
        num_heads: int = 6,
        mixer: Mixer = "inner",
        positions: Positions = "block_table",
        inner_start: Start = "random",
        **kwargs: Any,
    ):
        require_choice("mixer", mixer, get_args(Mixer))
        require_choice("inner_start", inner_start, STARTS)
        chosen = {name: kwargs.pop(f"inner_{name}") for name in _OPTIONS if f"inner_{name}" in kwargs}
        loop = InnerLoop(**chosen)
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
        "study_nano_patch4_32": NANO_PATCH4_32,
        "study_nano_patch16_144": NANO_PATCH16_144,
    },
)
