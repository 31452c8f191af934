"""T5, a pretrained ViT whose softmax attention is replaced by an inner learner, and the models that its paper compares.

The shell is a DeiT without class token. Its projections, MLPs, norms and positions come from a softmax model
(`repro.models.linearize` copies them); the inner weights and convolutions are new. One class has all switches of the
paper: softmax, two linear attentions, four inner learners, key norms, convolutions, and neighbourhood attention.
`import repro.models` registers the models with timm; `t5_softmax_*` are the softmax models of the same sizes.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

from .backbone import register_sizes, rename_keys, rename_prefixes
from .inner_mixer import KEY_NORMS, InnerMixer, KeyNormKind
from .shell import NANO_PATCH4_32, NANO_PATCH16_144, ClassFreeViT, SoftmaxMixer, build_cpe, require_choice

# `inner_mixer.LOOPS` must have every name besides the first three, or `InnerMixer` takes it for linear attention
_Inner = Literal["softmax", "linear", "projqk", "gate", "2layer", "3layer", "swiglu"]
_Convolution = Literal["none", "cpe", "v", "qk"]
CHOICES = {"inner": get_args(_Inner), "key_norm": KEY_NORMS, "dwc": get_args(_Convolution)}


class T5(ClassFreeViT):
    """ViT without class token, with any mixer of the paper.

    Args:
        num_heads: heads h.
        inner: `softmax`, `linear`, `projqk`, `gate`, `2layer`, `3layer` or `swiglu`; see `InnerMixer`.
        key_norm: `none`, `instance`, `no_std`, `no_mean`, `layer` or `rms`; see `KeyNorm`.
        dwc: input of a residual depth-wise 3x3 convolution: `qk`, `v`, the block's input (`cpe`), or `none`.
        neighbours: side of the window of neighbourhood attention that makes up half of a mixer's output; 0 for none.
        kwargs: see `ClassFreeViT`.

    Raises:
        ValueError: an unknown choice, or one without effect.
    """

    def __init__(
        self,
        *,
        num_heads: int = 3,
        inner: _Inner = "swiglu",
        key_norm: KeyNormKind = "instance",
        dwc: _Convolution = "qk",
        neighbours: int = 0,
        **kwargs: Any,
    ):
        for name, value in {"inner": inner, "key_norm": key_norm, "dwc": dwc}.items():
            require_choice(name, value, CHOICES[name])
        if neighbours < 0 or (neighbours and neighbours % 2 == 0):
            raise ValueError(f"neighbours {neighbours}: expected an odd side of a window, or 0 for none")
        if inner == "softmax" and (key_norm != "none" or dwc != "none" or neighbours):
            raise ValueError(
                "inner softmax: attends as the pretrained model does; it goes with key_norm none, dwc none and neighbours 0"
            )

        def build_mixer(dim: int) -> tuple[nn.Module, nn.Conv2d | None]:
            if inner == "softmax":
                return SoftmaxMixer(dim, num_heads), None
            convolved = "none" if dwc == "cpe" else dwc
            mixer = InnerMixer(dim, num_heads, inner, key_norm, convolved, neighbours)
            return mixer, build_cpe(dim) if dwc == "cpe" else None

        super().__init__(build_mixer, num_heads=num_heads, **kwargs)
        self.inner, self.dwc = inner, dwc

    def new_parameters(self) -> set[str]:
        """Return the names of the parameters that a softmax model of the same shell does not have."""
        mixers = {name: module for name, module in self.named_modules() if isinstance(module, InnerMixer)}
        new = {f"{name}.{own}" for name, mixer in mixers.items() for own in mixer.new_parameters()}
        return new | {name for name, _ in self.named_parameters() if ".cpe." in name}


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict, and drop the leading axis of size 1 of its inner weights."""
    renamed = rename_prefixes(state_dict, {"patch_embed.proj.": "patch_embed."})
    renamed = rename_keys(renamed, lambda key: key.replace(".q_conv2d.", ".dwc_q.").replace(".k_conv2d.", ".dwc_k."))
    return {
        key: value[0] if value.ndim == 4 and value.shape[0] == 1 and ".attn.w" in key else value
        for key, value in renamed.items()
    }


# arguments of each size, for both the students and the softmax models; of equally close ones, `linearize` takes the
# first for a pretrained ViT
SHELLS: dict[str, dict[str, Any]] = {
    "tiny_patch16_224": {"embed_dim": 192, "num_heads": 3},
    "small_patch16_224": {"embed_dim": 384, "num_heads": 6},
    "base_patch16_224": {"embed_dim": 512, "depth": 24, "num_heads": 8},  # the release's base; the next entry is ViT-B
    "vit_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
    "vit_large_patch16_224": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "nano_patch4_32": NANO_PATCH4_32,
    # a wide head and many blocks, in which the errors of a mixer add up
    "deep_patch4_32": {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 64,
        "depth": 12,
        "num_heads": 1,
        "position_std": 0.3,
    },
    "nano_patch16_144": NANO_PATCH16_144,
}
_SOFTMAX = {"inner": "softmax", "key_norm": "none", "dwc": "none"}

register_sizes(
    T5,
    {f"t5_{name}": shell for name, shell in SHELLS.items()}
    | {f"t5_softmax_{name}": {**shell, **_SOFTMAX} for name, shell in SHELLS.items()},
)
