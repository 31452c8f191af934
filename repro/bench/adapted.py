"""Costs of a plain backbone with its ViT-Adapter: the two counts of Table 2, without necks and heads.

`Cost.macs` follows the convention of `flops`. The papers in Table 2 count differently, and `Cost.paper_terms` add up to
their number. For ViT, VRWKV, ViT3 and Vittt they count by module hooks. The hooks add 1 for every output of a
convolution with a bias, 2 for every element of a LayerNorm, and 1 for every element that enters ReLU or max pooling.

The samples of deformable attention count as 660·N·D, which is a fit: 5 per channel, for D channels of 12 samples of N
queries in the four injectors, and of 4 samples of 5.25·N queries in the first four extractors. With this term, every
row of ViT and VRWKV agrees with the paper to 0.06 % on the left side of the table, and to 0.25 %, which is the
precision of the printed digits, on the right side. `reported_mac_terms` of a family replaces terms that its own paper
counts differently: Bi-WKV of VRWKV, the blocks of Vim.
"""

import functools
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from ..models.adapter import STRIDES, ViTAdapter
from ..models.pyramid import build_pyramid
from .build import fused_attention
from .counter import OperatorCounter
from .flops import Cost

_SAMPLING_FIT = 660  # per patch token and channel
# classes of modules -> (term, function of the module, its first input and its output: operations besides multiply-adds)
_HOOKS: dict[tuple[type[nn.Module], ...], tuple[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], int]]] = {
    (nn.Conv2d, nn.ConvTranspose2d): (
        "conv_bias",
        lambda module, x, out: out.numel() if module.bias is not None else 0,
    ),
    (nn.LayerNorm,): ("layer_norm", lambda module, x, out: 2 * out.numel()),
    (nn.ReLU,): ("relu", lambda module, x, out: out.numel()),
    (nn.MaxPool2d,): ("max_pool", lambda module, x, out: x.numel()),
}


def adapted_cost(backbone: str, image_size: tuple[int, int]) -> Cost:
    """Count parameters and multiply-adds of a registered backbone with its adapter for one image of (H, W) pixels.

    Raises:
        ValueError: a model without an adapter, a side that is no multiple of 32, or an operator without a count.
    """
    if any(side % STRIDES[-1] for side in image_size):
        raise ValueError(f"{image_size[0]}x{image_size[1]}: not a multiple of {STRIDES[-1]}; the adapter would pad it")
    model, hooked = _build_hooked(backbone)
    hooked.clear()
    image = torch.empty(1, 3, *image_size, device="meta")
    with torch.no_grad(), OperatorCounter() as counter:
        model(image)
    # a copy of `hooked`: `_replace_uncounted` runs modules again, and their hooks would count twice
    terms = {"multiply_adds": counter.macs - counter.macs_of("vision_ttt.ms_deform_attn"), **hooked}
    _replace_uncounted(model, image, counter, terms)
    return Cost(sum(p.numel() for p in model.parameters()), counter.macs, "counter", paper_terms=terms)


@functools.lru_cache(maxsize=1)  # the rows of a backbone follow each other, and one model takes all their image sizes
def _build_hooked(backbone: str) -> tuple[ViTAdapter, Counter[str]]:
    """Build a backbone for its own training size, with its adapter, and the counter into which its hooks add terms."""
    with fused_attention(False), torch.device("meta"):
        model = build_pyramid(backbone).eval()
    if not isinstance(model, ViTAdapter):
        raise ValueError(f"{backbone}: is not a plain backbone, so it has no adapter")
    hooked: Counter[str] = Counter()
    for module in model.modules():
        for kinds, (term, count) in _HOOKS.items():
            if isinstance(module, kinds):
                module.register_forward_hook(
                    lambda module, args, out, term=term, count=count: hooked.update({term: count(module, args[0], out)})
                )
    return model, hooked


def _replace_uncounted(model: ViTAdapter, image: torch.Tensor, counter: OperatorCounter, terms: dict[str, int]) -> None:
    """Add to `terms` what the papers count by formula: the samples, and what the backbone's family reports.

    What the family's formula replaces is subtracted from `multiply_adds`: an operator, or all blocks, which are counted
    in a run of their own. `counter` has counted the whole model.
    """
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
