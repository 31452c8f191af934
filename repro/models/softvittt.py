"""Vittt with softmax attention in place of its inner learner, and DeiT with Vittt's convolution: controls that measure
the effect of the learner.

No paper has these models, so there are only nanos. `import repro.models` registers the models with timm.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension (D = H·d).
"""

from typing import Any, Literal, get_args

import torch.nn.functional as F
from timm.layers import Mlp, use_fused_attn
from torch import Tensor, nn

from .backbone import register_sizes
from .image_model import Grid, init_linear
from .shell import require_choice
from .vittt import Vittt
from .vittt_block import EPS, Pool

_Kind = Literal["vittt", "deit"]
_OF_LEARNER = ("design", "chunk_size", "w0", "reading", "step")  # Vittt's options that have no meaning here
# Vittt's counts that belong to the learner; with a name missing, the multiply-adds are too many, without an error
_LEARNER_TERMS = ("conv1d", "learning_rate", "inner_state", "inner_bias_and_norm", "token_scale", "inner_learner")


class GatedAttention(nn.Module):
    """Softmax attention between Vittt's projections, norm and gate.

    With g, q, k and v linear in the tokens, and σ the tanh approximation of GELU,

        o = softmax(q kᵀ / √d) v in every head,    y = (σ(g) ⊙ LN(o)) W_o.

    If not `gated`, it is the attention of DeiT: y = o W_o + b_o, where q, k and v have biases, too.
    """

    def __init__(self, dim: int, num_heads: int, *, gated: bool):
        super().__init__()
        self.num_heads, self.gated, self.fused_attn = num_heads, gated, use_fused_attn()
        self.in_proj = nn.Linear(dim, (3 + gated) * dim, bias=not gated)  # g, q, k, v
        self.post_norm = nn.LayerNorm(dim, eps=EPS) if gated else nn.Identity()
        self.out_proj = nn.Linear(dim, dim, bias=not gated)
        for linear in (self.in_proj, self.out_proj):
            init_linear(linear)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map normalised tokens (B, T, D) to (B, T, D)."""
        *gate, q, k, v = self.in_proj(x_BTD).chunk(3 + self.gated, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, d)
        if self.fused_attn:
            o = F.scaled_dot_product_attention(q, k, v)
        else:  # explicit products, which the counter of multiply-adds can see; timm has the same switch
            o = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(dim=-1) @ v
        y = self.post_norm(o.transpose(1, 2).flatten(2))
        return self.out_proj(F.gelu(gate[0], approximate="tanh") * y if gate else y)


class SoftVittt(Vittt):
    """Vittt with `GatedAttention` as the mixer of every block.

    Convolution, norms, gate, output projection, SwiGLU, positions and pooling stay. The inner learner is removed with
    everything that belongs to it: W0, learning rates and token scales, causal convolutions, the query added to the
    output, and the second direction, because attention has no order. This leaves five D x D projections: gate, q, k, v
    and output. Vittt has six: its keys and values are separate per direction, and its queries come from the keys'
    projection by another convolution. Parameters outside the mixer start as in a Vittt of the same seed and sizes.

    Args:
        block: `vittt`, or `deit` for a block of DeiT after the convolution: attention without gate and norm, biases in
            all linear layers, and an MLP of 4·D hidden units with GELU in place of SwiGLU. With pool `head` this model
            differs from timm's DeiT only in the convolution, which the class token skips, and in the initial std of
            the class token: 0.02, not 1e-6.
        pool: class strategy, as in `Vittt`.
        kwargs: see `Backbone`; Vittt's options for its inner learner are refused.

    Raises:
        ValueError: an option of the inner learner, an unknown block or pool, or sizes that do not fit.
    """

    def __init__(self, *, num_heads: int = 1, block: _Kind = "vittt", pool: Pool = "mean", **kwargs: Any):
        require_choice("block", block, get_args(_Kind))
        if given := [name for name in _OF_LEARNER if name in kwargs]:
            raise ValueError(f"{given[0]}: belongs to the inner learner, which this model does without; leave it out")
        super().__init__(num_heads=num_heads, pool=pool, **kwargs)
        self.step, self.gated = "softmax", block == "vittt"
        D = self.embed_dim
        for each in self.blocks:
            each.is_fusible = False
            each.mixer = GatedAttention(D, num_heads, gated=self.gated)
            if not self.gated:
                each.mlp = Mlp(D, 4 * D)
                init_linear(each.mlp.fc1)
                init_linear(each.mlp.fc2)

    @property
    def directions(self) -> int:
        """Number of directions: 1, because attention has no order."""
        return 1

    @property
    def num_projections(self) -> int:
        """Number of D x D projections of a mixer: q, k, v and output, and the gate if there is one."""
        return 4 + self.gated

    def param_terms(self) -> dict[str, int]:
        """Return named counts that add up to the model's parameters."""
        D, L = self.embed_dim, self.depth
        terms = {name: count for name, count in super().param_terms().items() if name not in _LEARNER_TERMS}
        if not self.gated:
            terms |= {"projection_biases": L * 4 * D, "post_norm": 0, "swiglu": 0, "mlp": L * (8 * D * D + 5 * D)}
        return terms

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds for one image of (H, W) pixels.

        Per token and layer: n·D² for the n projections, 2·T·D for the attention to T tokens, 9·D for the convolution,
        3·D·hidden for SwiGLU or 8·D² for DeiT's MLP.
        """
        D, L = self.embed_dim, self.depth
        h, w = self.grid_of(*image_size)
        T = h * w + len(self.prefix_positions(h * w))
        terms = {name: count for name, count in super().mac_terms(image_size).items() if name not in _LEARNER_TERMS}
        terms["attention"] = L * 2 * T * T * D
        return terms if self.gated else terms | {"swiglu": 0, "mlp": L * T * 8 * D * D}


register_sizes(
    SoftVittt,
    {
        "softvittt_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 1},
        # width chosen to match the parameters of Vittt with D 64, within 4.5 %
        "softvittt_nano_patch4_32": {"img_size": 32, "patch_size": 4, "embed_dim": 72, "depth": 4, "num_heads": 1},
    },
)
