"""The steps of paper 004 ("Test-Time Training with KV Binding Is Secretly Linear Attention") from ViT3 to linear attention.

Each is ViT3 with another inner loop in its heads, by the one formulation of `repro.models.inner`; the convolution learns as ViT3's does.
The paper's V2, V4 and V5 take away what ViT3 does not have. `import repro.models` registers the models with timm.

Shape suffixes: B batch, N tokens (h·w), C width, d head dimension.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..core.errors import did_you_mean
from .backbone import Grid, register_sizes
from .inner import InnerLoop, learn
from .vit3 import INNER_SCALE, InnerTraining, ViT3

_SHARED: dict[str, Any] = {"scale": INNER_SCALE, "damping": True}
# step -> how the heads learn, `own` as in ViT3. The gate SiLU(x w2) of V1 is static, so that w1 learns alone from values v ⊙ SiLU(k w2).
# V6 leaves out the damping, which stands in ViT3 where LaCT has Muon. `as_run`: the value is v ⊙ (k w1), since the paper's code keeps the
# line of the gated unit, whose gradient that is; without it, the step is the gradient of the loss itself
STEPS: dict[str, InnerLoop] = {
    "own": InnerLoop(model="glu", **_SHARED),
    "ascent": InnerLoop(model="glu", direction="ascent", **_SHARED),
    "q_is_k": InnerLoop(model="glu", **_SHARED),
    "v1": InnerLoop(model="fc", **_SHARED),
    "v3": InnerLoop(model="fc", **_SHARED),
    "v3_as_run": InnerLoop(model="fc", **_SHARED),
    "v6": InnerLoop(model="fc", scale=INNER_SCALE),
    "v6_as_run": InnerLoop(model="fc", scale=INNER_SCALE),
}
WITHOUT_GATE = ("v3", "v6")  # steps that have no w2; what was run keeps it, without effect
# step -> products with a d x d matrix beside those of its learner: the gates of keys and queries, or k w1
_FURTHER_PRODUCTS = {"v1": 2, "v3_as_run": 1, "v6_as_run": 1}


class LadderTraining(InnerTraining):
    """The TTT block with the inner loop of a step.

    Args:
        dim, num_heads: see `InnerTraining`.
        step: a name of `STEPS`.
        inner_steps: of heads and convolution.
        loop: in place of that of the step.
    """

    def __init__(self, dim: int, num_heads: int, step: str, inner_steps: int = 1, *, loop: InnerLoop | None = None):
        super().__init__(dim, num_heads)
        found = loop or STEPS[step]
        self.step, self.loop = step, InnerLoop(**{**vars(found), "epochs": inner_steps})
        self.conv_loop = InnerLoop(model="dwconv", epochs=inner_steps, **_SHARED)
        if step in WITHOUT_GATE:
            del self.w2

    def _learn_glu(self, qkv: Tensor) -> Tensor:
        q, k, v = self._split(qkv, self.num_heads)
        w1 = self.w1.to(k.dtype)
        gate = None
        if self.step == "v1":
            w2 = self.w2.to(k.dtype)
            gate, v = F.silu(q @ w2), v * F.silu(k @ w2)
        elif self.step.endswith("_as_run"):
            v = v * (k @ w1)
        weights = [w1, self.w2] if self.loop.model == "glu" else [w1]
        out = learn(self.loop, [weight[0] for weight in weights], q, k, v, (1, k.shape[2]))
        if gate is not None:
            out = out * gate
        elif self.step.endswith("_as_run"):
            out = out + 0 * self.w2.sum()
        return out.transpose(1, 2).flatten(2)

    def _learn_conv(self, qkv: Tensor, grid: Grid) -> Tensor:
        q, k, v = self._split(qkv, 1)
        return learn(self.conv_loop, [self.w3[None]], q, k, v, grid)[:, 0]

    def _split(self, qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
        """(B, N, 3·heads·d) -> q, or k in its place, k and v, each (B, heads, N, d)."""
        q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return k if self.step == "q_is_k" else q, k, v


class ViT3Ladder(ViT3):
    """ViT3 with the inner loop of a step.

    Args:
        step: a name of `STEPS`.
        inner_steps: of each inner learner.
        kwargs: see `ViT3`.

    An unknown step is a ValueError.
    """

    def __init__(self, *, step: str = "own", inner_steps: int = 1, **kwargs: Any):
        if step not in STEPS:
            raise ValueError(f"step {step!r}: not known{did_you_mean(step, STEPS)}")
        super().__init__(**kwargs)
        self.step, self.inner_steps = step, inner_steps
        for block in self.blocks:
            block.attn = LadderTraining(self.embed_dim, self.num_heads, step, inner_steps)
        self.init_weights()

    def param_terms(self) -> dict[str, int]:
        """Named counts of parameters that add up to the model's own."""
        C, d = self.embed_dim, self.embed_dim // self.num_heads
        terms = super().param_terms()
        if self.step in WITHOUT_GATE:
            terms["inner_start"] -= self.depth * C * d
        return terms

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Named counts of multiply-adds for one image of (H, W) pixels: see `InnerLoop.count_macs`."""
        L, d = self.depth, self.embed_dim // self.num_heads
        h, w = self.grid_of(*image_size)
        training: LadderTraining = self.blocks[0].attn
        further = _FURTHER_PRODUCTS.get(self.step, 0) * h * w * d * d
        of_heads, of_conv = training.loop.count_macs(h * w, d) + further, training.conv_loop.count_macs(h * w, d)
        return super().mac_terms(image_size) | {"inner_glu": L * self.num_heads * of_heads, "inner_conv": L * of_conv}


register_sizes(
    ViT3Ladder,
    {
        "ladder_vit3_tiny_patch16_224": {"embed_dim": 192, "num_heads": 6},
        "ladder_vit3_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
        "ladder_vit3_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
        # for tests and the embedded data sets; with patches of 4 pixels, a patch is a pixel of a scanned digit
        "ladder_vit3_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2},
        "ladder_vit3_nano_patch4_32": {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2},
    },
)
