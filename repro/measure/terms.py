"""Closed forms: parameters and multiply-adds as named terms that add up to the totals.

This project's families have theirs as methods (`param_terms`, `mac_terms`). The one of timm's plain ViT and DeiT stands here.
Symbols: D width, L depth, T tokens with class tokens, N patch tokens.
"""

import torch
from timm.models.vision_transformer import VisionTransformer

Terms = dict[str, int]


def closed_form(model: torch.nn.Module, image_size: tuple[int, int]) -> tuple[Terms, Terms] | None:
    """(parameter terms, multiply-add terms) for one image of (H, W) pixels; None for a family without a closed form.

    Raises:
        ValueError: an image size that the model does not take.
    """
    if hasattr(model, "mac_terms"):
        return model.param_terms(), model.mac_terms(image_size)
    return _vit_terms(model, image_size) if _is_plain_vit(model) else None


def _is_plain_vit(model: torch.nn.Module) -> bool:
    """Whether a model is a VisionTransformer of timm's with no more parts than the closed form counts, as DeiT and the first ViTs."""
    if type(model) is not VisionTransformer or not model.blocks:
        return False
    block = model.blocks[0]
    extras = (block.ls1, block.attn.q_norm, block.attn.k_norm, block.attn.norm, block.mlp.norm, model.norm_pre, model.fc_norm)
    return (
        all(isinstance(part, torch.nn.Identity) for part in extras)
        and isinstance(model.head, (torch.nn.Linear, torch.nn.Identity))
        and model.attn_pool is None
        and model.pos_embed is not None
        and isinstance(model.patch_embed.proj, torch.nn.Conv2d)
        and all(isinstance(linear, torch.nn.Linear) for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2))
        and block.attn.qkv.bias is not None
    )


def _vit_terms(model: VisionTransformer, image_size: tuple[int, int]) -> tuple[Terms, Terms]:
    D, L = model.embed_dim, len(model.blocks)
    hidden = model.blocks[0].mlp.fc1.out_features
    patches, class_tokens = model.patch_embed.proj, model.num_prefix_tokens
    params = {
        "patch_embed": patches.weight.numel() + (D if patches.bias is not None else 0),
        "pos_embed": model.pos_embed.numel(),
        "class_tokens": class_tokens * D,
        "layer_norms": L * 4 * D + 2 * D,
        "projections": L * (4 * D * D + 4 * D),
        "mlp": L * (2 * D * hidden + hidden + D),
        "head": model.num_classes * (D + 1),
    }
    (height, width), (patch_height, patch_width) = image_size, model.patch_embed.patch_size
    if height % patch_height or width % patch_width:
        raise ValueError(f"{height}x{width}: not a multiple of the patch size {patch_height}x{patch_width}")
    N = (height // patch_height) * (width // patch_width)
    T = N + class_tokens
    macs = {
        "patch_embed": N * patches.weight.numel(),
        "projections": L * T * 4 * D * D,
        "attention": L * 2 * T * T * D,  # Q·Kᵀ and its product with V
        "mlp": L * T * 2 * D * hidden,
        "head": D * model.num_classes,
    }
    return params, macs
