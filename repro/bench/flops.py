"""Parameters and multiply-adds (MACs) of any timm-registered model at any image size.

A MAC is one multiply-add of a matrix product, of a convolution, or of an operator of `kernels`. Norms, activations,
softmax, pooling, interpolation and element-wise arithmetic are free. Papers of this field call MACs "FLOPs";
`torch.utils.flop_counter` counts two FLOPs per MAC.

A model with a closed form is counted without a forward pass. The families of this project have theirs as methods
(`param_terms`, `mac_terms`); those of timm's plain ViT and DeiT are here. Any other model runs once on the meta device,
with unfused attention, under a dispatch mode that refuses unknown operators, so none is silently counted as zero.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Block, VisionTransformer

from . import build
from .counter import counted_macs
from .fvcore import count_extras


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a forward pass of one image.

    Args:
        num_params: number of learned values, without buffers such as a frozen W0.
        macs: multiply-adds for one image.
        method: `analytic` for a closed form, `counter` for a counted forward pass.
        param_terms, mac_terms: the named terms of a closed form, whose sums are `num_params` and `macs`; empty for the
            counter.
        paper_terms: terms by the convention of the papers, whose sum is their number. They exist for a backbone with
            its adapter (see `adapted`), and for a family whose authors count differently (its `paper_mac_terms`).
            VMamba's are fvcore's with its authors' handlers for the scan; MambaVision's omit operations outside hooked
            layers.
        fvcore_terms: `multiply_adds` (equal to `macs`), `norms` and `interpolation`, whose sum is fvcore's count
            without added handlers (see `fvcore`); empty if it was not asked for.
    """

    num_params: int
    macs: int
    method: Literal["analytic", "counter"]
    param_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    mac_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    paper_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fvcore_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def macs_g(self) -> float:
        return self.macs / 1e9

    @property
    def macs_g_paper_convention(self) -> float:
        return sum(self.paper_terms.values()) / 1e9


def cost(name: str, options: Mapping[str, Any], image_size: tuple[int, int], *, fvcore: bool = False) -> Cost:
    """Count the parameters and MACs of a registered model for one image of (H, W) pixels.

    For a denoiser of latents, (H, W) is the size of its input, the latents. `fvcore` asks for `Cost.fvcore_terms`.

    Raises:
        ValueError: an unknown model, an image size that it refuses, an operator whose multiply-adds are unknown, or a
            closed form whose parameters do not add up to the model's.
    """
    model = build.build_eval_model(name, options, image_size, fused=False, device="meta")
    num_params = sum(p.numel() for p in model.parameters())
    param_terms, mac_terms, paper_terms = {}, {}, {}
    if hasattr(model, "mac_terms"):
        param_terms, mac_terms = model.param_terms(), model.mac_terms(image_size)
        paper_terms = model.paper_mac_terms(image_size) if hasattr(model, "paper_mac_terms") else {}
    elif _is_vit(model):
        param_terms = _count_vit_params(model)
        if sum(param_terms.values()) == num_params:
            mac_terms = _count_vit_macs(model, image_size)
        else:  # it has further parts, such as a norm of the queries
            param_terms = {}
    if param_terms and sum(param_terms.values()) != num_params:
        raise ValueError(f"{name}: the closed form has {sum(param_terms.values())} parameters, the model {num_params}")
    macs = sum(mac_terms.values()) if mac_terms else counted_macs(model, image_size)
    fvcore_terms = {"multiply_adds": macs, **count_extras(model, image_size)} if fvcore else {}
    method = "analytic" if mac_terms else "counter"
    return Cost(num_params, macs, method, param_terms, mac_terms, paper_terms, fvcore_terms)


def _is_vit(model: torch.nn.Module) -> bool:
    """Tell whether a model is timm's VisionTransformer with the blocks and embeddings of a plain ViT; DeiT is one."""
    if type(model) is not VisionTransformer or not model.blocks:
        return False
    block = model.blocks[0]  # all blocks are built alike
    embeds = isinstance(model.patch_embed.proj, torch.nn.Conv2d) and model.pos_embed is not None
    # a norm after pooling takes the place of the last one, with as many parameters
    return embeds and isinstance(model.fc_norm, torch.nn.Identity) and type(block) is Block and type(block.mlp) is Mlp


def _count_vit_params(model: VisionTransformer) -> dict[str, int]:
    """Return the terms of a plain ViT's parameters; D is the width, L the depth."""
    D, L, patches = model.embed_dim, len(model.blocks), model.patch_embed.proj
    hidden = model.blocks[0].mlp.fc1.out_features
    return {
        "patch_embed": patches.weight.numel() + (D if patches.bias is not None else 0),
        "pos_embed": model.pos_embed.numel(),
        "class_tokens": model.num_prefix_tokens * D,
        "layer_norms": L * 4 * D + 2 * D,
        "projections": L * (4 * D * D + 4 * D),
        "mlp": L * (2 * D * hidden + hidden + D),
        "head": model.num_classes * (D + 1),
    }


def _count_vit_macs(model: VisionTransformer, image_size: tuple[int, int]) -> dict[str, int]:
    """Return the terms of a plain ViT's multiply-adds; D, L as above, N patch tokens, T all tokens."""
    D, L = model.embed_dim, len(model.blocks)
    hidden = model.blocks[0].mlp.fc1.out_features
    (height, width), (patch_height, patch_width) = image_size, model.patch_embed.patch_size
    if height % patch_height or width % patch_width:
        raise ValueError(f"{height}x{width}: not a multiple of the patch size {patch_height}x{patch_width}")
    N = (height // patch_height) * (width // patch_width)
    T = N + model.num_prefix_tokens
    return {
        "patch_embed": N * model.patch_embed.proj.weight.numel(),
        "projections": L * T * 4 * D * D,
        "attention": L * 2 * T * T * D,  # Q·Kᵀ and its product with V
        "mlp": L * T * 2 * D * hidden,
        "head": D * model.num_classes,
    }
