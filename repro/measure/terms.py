"""Closed forms: parameters and multiply-adds of Vittt, ViT3 and plain ViT/DeiT as named terms that add up to the totals.

Symbols: D width, L depth, H heads, d = D/H, R directions, T tokens with class tokens, N = h·w patch tokens, b chunk length.
The multiply-adds per token and layer of Vittt are the projections n_proj·D², SwiGLU 3·D·hidden, the inner learner
(3d + 2b)·D per direction, Conv1d 8·D per direction, DWConv 9·D and the learning rate D·H; then the patch convolution and the
head. Eq. 14 of the paper, 6TD² + 6TDd + 4bTD, is the projections and the inner learner of two directions.

ViT3's inner step has 6·N·C·d multiply-adds in the heads (K, its transpose and Q, with two d x d matrices each) and 2·9·N·d in
the convolution (the gradient of its window, and its output); its damping is element-wise.
"""

import torch
from timm.models.vision_transformer import VisionTransformer

from ..models.ttt_mixer import CONV_KERNEL, design_has
from ..models.vit3 import ViT3
from ..models.vittt import Vittt, class_positions

Terms = dict[str, int]


def closed_form(model: torch.nn.Module, resolution: tuple[int, int]) -> tuple[Terms, Terms] | None:
    """(parameter terms, MAC terms) for one image of `resolution` = (H, W) pixels; None for a family without a closed form."""
    if isinstance(model, Vittt):
        return _vittt(model, resolution)
    if isinstance(model, ViT3):
        return _vit3(model, resolution)
    if is_plain_vit(model):
        return _vit(model, resolution)
    return None


def ttt_linear_macs(tokens: int, heads: int, head_dim: int, chunk_size: int) -> int:
    """MACs of the inner learner, one direction: per chunk of n tokens and head, K·W, Q·W and the state's update with d² per
    token each, and Q·Kᵀ and A·G with n·d per token each. The last chunk may be shorter. `chunk_size` 0 is one chunk of all.
    """
    b = chunk_size or tokens
    squares = tokens // b * b * b + (tokens % b) ** 2
    return heads * (3 * tokens * head_dim * head_dim + 2 * squares * head_dim)


def is_plain_vit(model: torch.nn.Module) -> bool:
    """Whether a timm VisionTransformer has just the parts that the closed form knows: DeiT and the ViTs of the first papers."""
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


def _vittt(model: Vittt, resolution: tuple[int, int]) -> tuple[Terms, Terms]:
    D, L, H = model.embed_dim, model.depth, model.num_heads
    d = D // H
    hidden = int(8 * D / 3)
    has = {part: design_has(model.design, part) for part in ("share_qk", "gating", "conv1d", "dual", "conv2d")}
    R = 2 if has["dual"] else 1
    # q (until it is shared with k), k and v for each direction; gate and output once
    projections = R * (2 if has["share_qk"] else 3) + has["gating"] + 1

    built_for = _patches(model, model.img_size)
    class_tokens = len(class_positions(model.pool, built_for))
    token_scale = model.chunk_size or built_for + class_tokens
    states = {"per_direction": R, "shared": 1, "frozen": 0}[model.w0]  # a frozen W0 is a buffer and no parameter
    params = {
        "patch_embed": _patch_weight(model.patch_embed) + D,
        "pos_embed": (built_for + class_tokens) * D,
        "class_tokens": class_tokens * D,
        "layer_norms": L * 4 * D + 2 * D,
        "projections": L * projections * D * D,
        "conv1d": L * R * 2 * (CONV_KERNEL * D + D) * has["conv1d"],
        "dwconv": L * 9 * D * has["conv2d"],
        "learning_rate": L * (D * H + H),
        "inner_state": L * states * H * d * d,
        "inner_bias_and_norm": L * R * 3 * D,
        "token_scale": L * R * token_scale,
        "post_norm": L * 2 * D,
        "swiglu": L * (3 * D * hidden + 2 * hidden + D),
        "head": _head_params(D, model.num_classes),
    }
    N = _patches(model, resolution)
    T = N + class_tokens
    macs = {
        "patch_embed": N * _patch_weight(model.patch_embed),
        "projections": L * T * projections * D * D,
        "conv1d": L * T * R * 2 * CONV_KERNEL * D * has["conv1d"],
        "dwconv": L * N * 9 * D * has["conv2d"],
        "learning_rate": L * T * D * H,
        "inner_learner": L * R * ttt_linear_macs(T, H, d, model.chunk_size),
        "swiglu": L * T * 3 * D * hidden,
        "head": D * model.num_classes,
    }
    return params, macs


def _vit3(model: ViT3, resolution: tuple[int, int]) -> tuple[Terms, Terms]:
    C, L = model.embed_dim, model.depth
    d = C // model.num_heads
    qkv, proj = 3 * C + 3 * d, C + d  # outputs of the one, inputs of the other
    params = {
        "patch_embed": _patch_weight(model.patch_embed) + C,
        "cpe": L * (9 * C + C),
        "layer_norms": L * 4 * C + 2 * C,
        "projections": L * ((C + 1) * qkv + (proj + 1) * C),
        "inner_start": L * (2 * C * d + 9 * d),
        "mlp": L * (8 * C * C + 5 * C),
        "head": _head_params(C, model.num_classes),
    }
    h, w = model.grid_of(*resolution)
    N = h * w
    macs = {
        "patch_embed": N * _patch_weight(model.patch_embed),
        "cpe": L * N * 9 * C,
        "projections": L * N * C * (qkv + proj),
        "inner_glu": L * 6 * N * C * d,
        "inner_conv": L * 2 * 9 * N * d,
        "mlp": L * N * 8 * C * C,
        "head": C * model.num_classes,
    }
    return params, macs


def _vit(model: VisionTransformer, resolution: tuple[int, int]) -> tuple[Terms, Terms]:
    D, L = model.embed_dim, len(model.blocks)
    hidden = model.blocks[0].mlp.fc1.out_features
    class_tokens = model.num_prefix_tokens
    params = {
        "patch_embed": model.patch_embed.proj.weight.numel() + (D if model.patch_embed.proj.bias is not None else 0),
        "pos_embed": model.pos_embed.numel(),
        "class_tokens": class_tokens * D,
        "layer_norms": L * 4 * D + 2 * D,
        "projections": L * (4 * D * D + 4 * D),
        "mlp": L * (2 * D * hidden + hidden + D),
        "head": _head_params(D, model.num_classes),
    }
    patch_height, patch_width = model.patch_embed.patch_size
    if resolution[0] % patch_height or resolution[1] % patch_width:
        raise ValueError(f"{resolution[0]}x{resolution[1]}: not a multiple of the patch size {patch_height}x{patch_width}")
    N = (resolution[0] // patch_height) * (resolution[1] // patch_width)
    T = N + class_tokens
    macs = {
        "patch_embed": N * model.patch_embed.proj.weight.numel(),
        "projections": L * T * 4 * D * D,
        "attention": L * 2 * T * T * D,  # Q·Kᵀ and its product with V
        "mlp": L * T * 2 * D * hidden,
        "head": D * model.num_classes,
    }
    return params, macs


def _patches(model: Vittt, resolution: tuple[int, int]) -> int:
    return (resolution[0] // model.patch_size) * (resolution[1] // model.patch_size)


def _patch_weight(conv: torch.nn.Conv2d) -> int:
    kernel_height, kernel_width = conv.kernel_size
    return conv.in_channels * conv.out_channels * kernel_height * kernel_width


def _head_params(dim: int, num_classes: int) -> int:
    return num_classes * (dim + 1)
