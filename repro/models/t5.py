"""T5, a pretrained ViT whose softmax attention is replaced by an inner learner, and the models that its paper compares.

The shell is a DeiT without class token: its projections, MLPs, norms and positions come from a softmax model (`repro.models.linearize`
moves them), and the inner weights and convolutions are new. One class has the paper's switches: softmax itself, two linear
attentions, four inner learners, norms of the keys, convolutions, and neighbourhood attention beside. `import repro.models` registers
the models with timm; `t5_softmax_*` are the softmax models of the same sizes.

Shape suffixes: B batch, N tokens (h·w), C width, h heads, d head dimension (C = h·d).
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

from ..core.errors import did_you_mean
from .backbone import Backbone, Grid, init_linear, register_sizes, rename_keys, rename_prefixes, resample_positions
from .inner import InnerLoop, full_precision, learn
from .neighbours import attend_to_neighbours
from .study import SoftmaxMixer

Inner = Literal["softmax", "linear", "projqk", "gate", "2layer", "3layer", "swiglu"]
KeyNormKind = Literal["none", "instance", "no_std", "no_mean", "layer", "rms"]
Convolution = Literal["none", "cpe", "v", "qk"]

# one full batch of all tokens at rate 1, on the dot product with the factor d^-½
LOOPS = {
    "gate": InnerLoop(model="glu"),
    "2layer": InnerLoop(model="mlp", depth=2),
    "3layer": InnerLoop(model="mlp", depth=3),
    "swiglu": InnerLoop(model="swiglu"),
}
CHOICES = {"inner": get_args(Inner), "key_norm": get_args(KeyNormKind), "dwc": get_args(Convolution)}
EPS = 1e-6


class KeyNorm(nn.Module):
    """A norm of the keys without parameters, before they are split into heads.

    `instance` is (k - mean) / √(var + 1) over the tokens, for each image and channel, as the release has it; `no_std` leaves the
    division out and `no_mean` the subtraction. `layer` and `rms` are taken over the channels of a token.
    """

    def __init__(self, kind: KeyNormKind):
        super().__init__()
        self.kind = kind

    def forward(self, k_BNC: Tensor) -> Tensor:
        """(B, N, C) -> the same shape and dtype; computed in fp32 or more."""
        with full_precision(k_BNC.device.type):
            k = k_BNC.to(torch.promote_types(k_BNC.dtype, torch.float32))
            if self.kind == "layer":
                k = F.layer_norm(k, k.shape[-1:], eps=EPS)
            elif self.kind == "rms":
                k = F.rms_norm(k, k.shape[-1:], eps=EPS)
            elif self.kind != "none":
                var, mean = torch.var_mean(k, dim=1, keepdim=True, correction=0)
                k = k if self.kind == "no_mean" else k - mean
                k = k if self.kind == "no_std" else k * (var + 1).rsqrt()
            return k.to(k_BNC.dtype)


class Mixer(nn.Module):
    """What stands in the place of softmax attention: Linear to q, k and v, an inner learner or linear attention, Linear.

    The keys are normalised, then q and k, or v, get a depth-wise convolution of themselves. With `neighbours`, half of the output is
    neighbourhood attention of the raw q, k and v.

    Args:
        dim, num_heads: width C, a multiple of the heads h.
        inner: a name of `LOOPS`, `linear` for linear attention with φ(x) = elu(x) + 1, or `projqk` for the same of k·W1 and q·W2.
        key_norm: see `KeyNorm`.
        dwc: which of q, k and v get a convolution: `none`, `v` or `qk`.
        neighbours: side of the window of neighbourhood attention, an odd number; 0 for none.
        loop: the inner learner, in place of that of `LOOPS`.
        affine: whether q and k get a learned scale and offset for each channel, before everything else.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        inner: Inner,
        key_norm: KeyNormKind = "instance",
        dwc: Convolution = "none",
        neighbours: int = 0,
        *,
        loop: InnerLoop | None = None,
        affine: bool = False,
    ):
        super().__init__()
        self.num_heads, self.inner, self.neighbours = num_heads, inner, neighbours
        self.loop = loop or LOOPS.get(inner)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.key_norm = KeyNorm(key_norm)
        for name in "qkv":
            convolve = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if name in dwc and dwc in ("qk", "v") else None
            setattr(self, f"dwc_{name}", convolve)
        self.affine = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(2, dim, 1)) if affine else None  # (q and k, C, scale and offset)
        d = dim // num_heads
        shapes = self.loop.shapes(d) if self.loop else [(d, d)] * (2 if inner == "projqk" else 0)
        self.weight_names = tuple(f"w{i + 1}" for i in range(len(shapes)))
        for name, shape in zip(self.weight_names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, *shape)))

    def init_weights(self) -> None:
        """Draw what a softmax model does not have: inner weights trunc_normal 0.02; convolutions keep PyTorch's start."""
        for name in self.weight_names:
            nn.init.trunc_normal_(getattr(self, name), std=0.02)

    def new_parameters(self) -> set[str]:
        """The names of the parameters that a softmax attention does not have."""
        return {name for name, _ in self.named_parameters() if not name.startswith(("qkv.", "proj."))}

    def forward(self, x_BNC: Tensor, grid: Grid) -> Tensor:
        """Normalised tokens (B, N, C), row-major on an (h, w) grid -> (B, N, C) in their dtype (under autocast in that of the mode)."""
        q, k, v = self.qkv(x_BNC).chunk(3, dim=-1)
        return self.proj(self.mix(q, k, v, grid))

    def mix(self, q_BNC: Tensor, k_BNC: Tensor, v_BNC: Tensor, grid: Grid) -> Tensor:
        """Queries, keys and values (B, N, C) as they are projected -> what the tokens get, (B, N, C)."""
        q, k, v = q_BNC, k_BNC, v_BNC
        if self.affine is not None:
            scale, offset = self.affine.unbind(-1)
            q, k = q * scale[0] + offset[0], k * scale[1] + offset[1]
        k = self.key_norm(k)
        q, k, v = (add_convolved(x, convolve, grid) for x, convolve in ((q, self.dwc_q), (k, self.dwc_k), (v, self.dwc_v)))
        weights = [getattr(self, name) for name in self.weight_names]
        heads = [self._split(x) for x in (q, k, v)]
        out = learn(self.loop, weights, *heads, grid) if self.loop else attend_linearly(*heads, weights)
        if self.neighbours:
            near = attend_to_neighbours(*(self._split(x) for x in (q_BNC, k_BNC, v_BNC)), grid, self.neighbours)
            out = 0.5 * out + 0.5 * near
        return out.transpose(1, 2).flatten(2)

    def _split(self, x_BNC: Tensor) -> Tensor:
        """(B, N, C) -> (B, h, N, d)."""
        return x_BNC.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


def add_convolved(x_BNC: Tensor, convolve: nn.Conv2d | None, grid: Grid) -> Tensor:
    """Tokens (B, N, C) plus their convolution on the (h, w) grid; the tokens themselves where there is none."""
    if convolve is None:
        return x_BNC
    return x_BNC + convolve(x_BNC.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)


def attend_linearly(q: Tensor, k: Tensor, v: Tensor, projections: list[Tensor]) -> Tensor:
    """φ(q)(φ(k)ᵀv) / φ(q)(φ(k)ᵀ1) with φ(x) = elu(x) + 1; q, k, v (B, h, N, d) -> (B, h, N, d) in the dtype of q, computed in fp32 or more.

    With `projections` W1 and W2 (h, d, d), k·W1 and q·W2 take the place of k and q.
    """
    with full_precision(q.device.type):
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide_q, wide_k, wide_v = (each.to(dtype) for each in (q, k, v))
        if projections:
            wide_k, wide_q = wide_k @ projections[0].to(dtype), wide_q @ projections[1].to(dtype)
        wide_q, wide_k = F.elu(wide_q) + 1, F.elu(wide_k) + 1
        total = (wide_q * wide_k.sum(dim=-2, keepdim=True)).sum(-1, keepdim=True)
        return (wide_q @ (wide_k.mT @ wide_v) / (total + EPS)).to(q.dtype)


class Block(nn.Module):
    """Perhaps tokens + CPE, then a mixer and an MLP, each after a LayerNorm and with a residual, its scale if there is one, and
    stochastic depth."""

    def __init__(self, dim: int, mixer: nn.Module, *, hidden: int, cpe: bool, layer_scale: bool, drop_path: float, norm_eps: float):
        super().__init__()
        self.cpe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if cpe else None
        self.norm1, self.attn = nn.LayerNorm(dim, eps=norm_eps), mixer
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=norm_eps), Mlp(dim, hidden)
        self.ls1, self.ls2 = (LayerScale(dim) if layer_scale else nn.Identity() for _ in range(2))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) on an (h, w) grid, row-major -> (B, N, C)."""
        tokens = add_convolved(tokens, self.cpe, grid)
        tokens = tokens + self.drop_path(self.ls1(self.attn(self.norm1(tokens), grid)))
        return tokens + self.drop_path(self.ls2(self.mlp(self.norm2(tokens))))


class T5(Backbone):
    """A class-free ViT with the mixer of the paper's choice, in timm's conventions, as a `PlainBackbone`.

    Args:
        num_heads: heads h.
        inner: `softmax`, `linear`, `projqk`, `gate`, `2layer`, `3layer` or `swiglu`; see `Mixer`.
        key_norm: `none`, `instance`, `no_std`, `no_mean`, `layer` or `rms`; see `KeyNorm`.
        dwc: a depth-wise 3x3 convolution with a residual: of `qk`, of `v`, of the block's input (`cpe`), or `none`.
        neighbours: side of the window of neighbourhood attention that makes up half of a mixer's output; 0 for none.
        mlp_ratio: hidden units of an MLP, as a multiple of the width.
        layer_scale: whether each residual has a learned scale for each channel.
        norm_eps: of all LayerNorms.
        position_std: the deviation of the positions' start.
        kwargs: see `Backbone`; `pool` is always the mean.

    A choice that is not known, or one without effect, is a ValueError.
    """

    def __init__(
        self,
        *,
        num_heads: int = 3,
        inner: Inner = "swiglu",
        key_norm: KeyNormKind = "instance",
        dwc: Convolution = "qk",
        neighbours: int = 0,
        mlp_ratio: float = 4.0,
        layer_scale: bool = False,
        norm_eps: float = EPS,
        position_std: float = 0.02,
        **kwargs: Any,
    ):
        super().__init__(pool="mean", **kwargs)
        for name, value in {"inner": inner, "key_norm": key_norm, "dwc": dwc}.items():
            if value not in CHOICES[name]:
                raise ValueError(f"{name} {value!r}: not known{did_you_mean(str(value), CHOICES[name])}")
        if neighbours < 0 or (neighbours and neighbours % 2 == 0):
            raise ValueError(f"neighbours {neighbours}: expected an odd side of a window, or 0 for none")
        if inner == "softmax" and (key_norm != "none" or dwc != "none" or neighbours):
            raise ValueError("inner softmax: attends as the pretrained model does; it goes with key_norm none, dwc none and neighbours 0")
        if self.embed_dim % num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {num_heads}")
        C = self.embed_dim
        self.num_heads, self.inner, self.key_norm, self.dwc, self.neighbours = num_heads, inner, key_norm, dwc, neighbours
        self.hidden, self.layer_scale, self.norm_eps, self.position_std = int(mlp_ratio * C), layer_scale, norm_eps, position_std
        self.pos_embed = nn.Parameter(torch.empty(1, self.grid_size[0] * self.grid_size[1], C))
        shared = {"hidden": self.hidden, "cpe": dwc == "cpe", "layer_scale": layer_scale, "norm_eps": norm_eps}
        self.blocks = nn.ModuleList(Block(C, self._build_mixer(), **shared, drop_path=rate) for rate in self.drop_path_rates)
        self.norm = nn.LayerNorm(C, eps=norm_eps)
        self.init_weights()

    def _build_mixer(self) -> nn.Module:
        if self.inner == "softmax":
            return SoftmaxMixer(self.embed_dim, self.num_heads, qkv_bias=True)
        return Mixer(self.embed_dim, self.num_heads, self.inner, self.key_norm, self.dwc, self.neighbours)

    def init_weights(self) -> None:
        """Linear trunc_normal 0.02 with zero bias, positions trunc_normal `position_std`, convolutions by PyTorch's default."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)
            elif isinstance(module, Mixer):
                module.init_weights()
        nn.init.trunc_normal_(self.pos_embed, std=self.position_std)

    def new_parameters(self) -> set[str]:
        """The names of the parameters that a softmax model of the same shell does not have."""
        mixers = {name: module for name, module in self.named_modules() if isinstance(module, Mixer)}
        new = {f"{name}.{own}" for name, mixer in mixers.items() for own in mixer.new_parameters()}
        return new | {name for name, _ in self.named_parameters() if ".cpe." in name}

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Image (B, C, H, W) -> patch tokens with positions (B, N, C), and their (h, w) grid; raises as `patches`."""
        tokens, grid = self.patches(x)
        return tokens + resample_positions(self.pos_embed, self.grid_size, grid), grid

    def no_weight_decay(self) -> set[str]:
        """The positions, as in DeiT."""
        return {"pos_embed"}

    def param_terms(self) -> dict[str, int]:
        """Named counts of parameters that add up to the model's own."""
        C, L, hidden = self.embed_dim, self.depth, self.hidden
        return {
            "patch_embed": self.patch_embed.weight.numel() + C,
            "positions": self.grid_size[0] * self.grid_size[1] * C,
            "layer_norms": L * 4 * C + 2 * C,
            "layer_scale": L * 2 * C * self.layer_scale,
            "projections": L * (4 * C * C + 4 * C),
            "inner_start": L * self._inner_weights() * C * (C // self.num_heads),
            "convolutions": L * self._convolutions() * 10 * C,
            "mlp": L * (2 * C * hidden + hidden + C),
            "head": self.num_classes * (C + 1),
        }

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Named counts of multiply-adds for one image of (H, W) pixels; `InnerLoop.count_macs` has those of an inner learner."""
        C, L, d = self.embed_dim, self.depth, self.embed_dim // self.num_heads
        h, w = self.grid_of(*image_size)
        N, loop, window = h * w, LOOPS.get(self.inner), self.neighbours
        inner = {"linear": 2 * N * d * d, "projqk": 4 * N * d * d}.get(self.inner, 0) if loop is None else loop.count_macs(N, d)
        return {
            "patch_embed": N * self.patch_embed.weight.numel(),
            "projections": L * N * 4 * C * C,
            "attention": L * 2 * N * N * C * (self.inner == "softmax"),
            "inner_learner": L * self.num_heads * inner,
            "neighbours": L * 2 * N * min(window, h) * min(window, w) * C,
            "convolutions": L * self._convolutions() * N * 9 * C,
            "mlp": L * N * 2 * C * self.hidden,
            "head": C * self.num_classes,
        }

    def _inner_weights(self) -> int:
        """The number of inner weights of a head, each d x d."""
        return {"softmax": 0, "linear": 0, "projqk": 2}.get(self.inner) if self.inner not in LOOPS else len(LOOPS[self.inner].shapes(1))

    def _convolutions(self) -> int:
        """The number of depth-wise convolutions of a block."""
        return {"none": 0, "cpe": 1, "v": 1, "qk": 2}[self.dwc]


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the official release under our names; its inner weights have a first axis of one image, which ours do not."""
    renamed = rename_prefixes(state_dict, {"patch_embed.proj.": "patch_embed."})
    renamed = rename_keys(renamed, lambda key: key.replace(".q_conv2d.", ".dwc_q.").replace(".k_conv2d.", ".dwc_k."))
    return {key: value[0] if value.ndim == 4 and value.shape[0] == 1 and ".attn.w" in key else value for key, value in renamed.items()}


# the arguments of each size, of the students and of the softmax models
SHELLS: dict[str, dict[str, Any]] = {
    "tiny_patch16_224": {"embed_dim": 192, "num_heads": 3},
    "small_patch16_224": {"embed_dim": 384, "num_heads": 6},
    "base_patch16_224": {"embed_dim": 512, "depth": 24, "num_heads": 8},  # the release's; ViT-B is the next
    "vit_base_patch16_224": {"embed_dim": 768, "num_heads": 12},
    "vit_large_patch16_224": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    # for the embedded data sets: as many tokens, of a pixel each, as a scanned digit has pixels
    "nano_patch4_32": {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2, "position_std": 0.3},
    # long keys and many blocks, in which errors of a mixer add up
    "deep_patch4_32": {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 12, "num_heads": 1, "position_std": 0.3},
    # the shell of the other families' nanos
    "nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2},
}
_SOFTMAX = {"inner": "softmax", "key_norm": "none", "dwc": "none"}

register_sizes(
    T5,
    {f"t5_{name}": shell for name, shell in SHELLS.items()}
    | {f"t5_softmax_{name}": {**shell, **_SOFTMAX} for name, shell in SHELLS.items()},
)
