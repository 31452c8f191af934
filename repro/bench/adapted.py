"""Costs of a plain backbone with its ViT-Adapter: the two counts of Table 2, without necks and heads.

`Cost.macs` follows the convention of `flops`. The papers in Table 2 count differently, and `Cost.paper_terms` add up to
their number. For ViT, VRWKV, ViT3 and Vittt they count by module hooks. The hooks add 1 for every output of a
convolution with a bias, 2 for every element of a LayerNorm, and 1 for every element that enters ReLU or max pooling.

The samples of deformable attention count as 660·N·D, which is a fit: 5 per channel, for D channels of 12 samples of N
queries in the four injectors, and of 4 samples of 5.25·N queries in the first four extractors. With this term, every
row of ViT and VRWKV agrees with the paper to 0.06 % on the left side of the table, and to 0.25 %, which is the
precision of the printed digits, on the right side. `reported_mac_terms` of a family replaces terms that its own paper
counts
differently: Bi-WKV of VRWKV, the blocks of Vim.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..models.adapter import STRIDES, ViTAdapter
from ..models.pyramid import build_pyramid
from .build import fused_attention
from .flops import Cost, OperatorCounter

_SAMPLING_FIT = 660  # per patch token and channel
# class of a module -> (term, operations that its hook counts in addition to the multiply-adds)
_HOOKS: dict[type[nn.Module], tuple[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], int]]] = {
    nn.Conv2d: ("conv_bias", lambda module, x, out: out.numel() if module.bias is not None else 0),
    nn.ConvTranspose2d: ("conv_bias", lambda module, x, out: out.numel() if module.bias is not None else 0),
    nn.LayerNorm: ("layer_norm", lambda module, x, out: 2 * out.numel()),
    nn.ReLU: ("relu", lambda module, x, out: out.numel()),
    nn.MaxPool2d: ("max_pool", lambda module, x, out: x.numel()),
}


def adapted_cost(backbone: str, image_size: tuple[int, int], options: Mapping[str, Any] | None = None) -> Cost:
    """Count parameters and multiply-adds of a backbone with its adapter for one image of (H, W) pixels.

    `backbone` is a registered name. The backbone is built with these options for its own training size.

    Raises:
        ValueError: a model without an adapter, a side that is no multiple of 32, or an operator without a count.
    """
    if any(side % STRIDES[-1] for side in image_size):
        raise ValueError(f"{image_size[0]}x{image_size[1]}: not a multiple of {STRIDES[-1]}; the adapter would pad it")
    with fused_attention(False), torch.device("meta"):
        model, image = build_pyramid(backbone, options=options).eval(), torch.empty(1, 3, *image_size)
    if not isinstance(model, ViTAdapter):
        raise ValueError(f"{backbone}: is not a plain backbone, so it has no adapter")
    hooked: Counter[str] = Counter()
    for module in model.modules():
        for kind, (term, count) in _HOOKS.items():
            if isinstance(module, kind):
                module.register_forward_hook(
                    lambda module, args, out, term=term, count=count: hooked.update({term: count(module, args[0], out)})
                )
    with torch.no_grad(), OperatorCounter() as counter:
        model(image)
    # a copy of `hooked`: `_replace_uncounted` runs modules again, and their hooks would count twice
    terms = {"multiply_adds": counter.macs - counter.macs_of("vision_ttt.ms_deform_attn"), **hooked}
    _replace_uncounted(model, image, counter, terms)
    return Cost(sum(p.numel() for p in model.parameters()), counter.macs, "counter", paper_terms=terms)


def _replace_uncounted(model: ViTAdapter, image: torch.Tensor, counter: OperatorCounter, terms: dict[str, int]) -> None:
    """Add the terms that the papers count by formula: the samples, and the terms that the backbone's family reports."""
    backbone = model.backbone
    with torch.no_grad():
        tokens, grid = backbone.embed(image)
    terms["sampling"] = _SAMPLING_FIT * grid[0] * grid[1] * model.embed_dim
    if not hasattr(backbone, "reported_mac_terms"):
        return
    replaced, reported = backbone.reported_mac_terms(grid)
    if replaced == "blocks":
        with torch.no_grad(), OperatorCounter() as blocks:
            for block in backbone.blocks:
                tokens = block(tokens, grid)
        terms["multiply_adds"] -= blocks.macs
    else:
        terms["multiply_adds"] -= counter.macs_of(replaced)
    terms.update(reported)
