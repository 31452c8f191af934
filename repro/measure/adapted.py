"""What a backbone with its ViT-Adapter costs: Table 2's two counts, which leave out necks and heads.

`Cost.macs` is in the one convention of `flops`. The papers around Table 2 count otherwise, and the terms of `AdaptedCost` add up
to their number. For ViT, VRWKV, ViT3 and Vittt that is a count by module hooks: beside the multiply-adds, 1 for every output of a
convolution with a bias, 2 for every element of a LayerNorm, 1 for every element into ReLU and max pooling; 29·N·D per layer of
Bi-WKV, by its authors' code. The deformable attention's samples enter as 660·N·D, a fit: 5 for every channel, of D, of 12 samples
of N queries in the four injectors and 4 samples of 5.25·N queries in the first four extractors. With it every row of ViT and VRWKV
is the printed one to 0.06 % on the left and, by the digits printed there, 0.25 % on the right. Vim's blocks are Eq. 13,
6TD² + 18·T·2D·16, which leaves out convolutions and small projections, as Vim's rows of Table 1 do.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..models.adapter import STRIDE, ViTAdapter, build_adapter
from ..models.vim import STATE_DIM, Vim
from ..models.vrwkv import VRWKV
from .build import fused_attention
from .flops import Cost, OperatorCounter

_SAMPLING_FIT = 660  # per patch token and channel
_BI_WKV = 29  # per token and channel
_VIM_SCAN = 18  # per token, channel of the scan and state, of both directions
# what hooks count of a module beside its multiply-adds
_HOOKS: dict[type[nn.Module], tuple[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], int]]] = {
    nn.Conv2d: ("conv_bias", lambda module, x, out: out.numel() if module.bias is not None else 0),
    nn.ConvTranspose2d: ("conv_bias", lambda module, x, out: out.numel() if module.bias is not None else 0),
    nn.LayerNorm: ("layer_norm", lambda module, x, out: 2 * out.numel()),
    nn.ReLU: ("relu", lambda module, x, out: out.numel()),
    nn.MaxPool2d: ("max_pool", lambda module, x, out: x.numel()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedCost(Cost):
    """As `Cost`, and the terms of the papers' convention, whose sum is theirs."""

    paper_terms: Mapping[str, int]

    @property
    def macs_g_paper_convention(self) -> float:
        return sum(self.paper_terms.values()) / 1e9


def adapted_cost(backbone: str, resolution: tuple[int, int], options: Mapping[str, Any] | None = None) -> AdaptedCost:
    """Parameters and multiply-adds of a backbone with its adapter for one image of `resolution` = (H, W) pixels.

    Args:
        backbone: registered name.
        resolution: the model is built for its own training's size, whatever this is.
        options: what else the backbone takes.

    Raises:
        ValueError: a model that has no adapter, a side that is no multiple of 32, or an operator whose multiply-adds are unknown.
    """
    if any(side % STRIDE for side in resolution):
        raise ValueError(f"{resolution[0]}x{resolution[1]}: not a multiple of {STRIDE}; the adapter would pad it")
    with fused_attention(False), torch.device("meta"):
        model = build_adapter(backbone, options=options).eval()
        image = torch.empty(1, 3, *resolution)
    hooked: Counter[str] = Counter()
    for module in model.modules():
        for kind, (term, count) in _HOOKS.items():
            if isinstance(module, kind):
                module.register_forward_hook(
                    lambda module, args, out, term=term, count=count: hooked.update({term: count(module, args[0], out)})
                )
    with torch.no_grad(), OperatorCounter() as counter:
        model(image)
    terms = {"multiply_adds": counter.macs - counter.macs_of("vision_ttt.ms_deform_attn"), **hooked}
    _replace_operators(model, image, counter, terms)
    return AdaptedCost(sum(p.numel() for p in model.parameters()), counter.macs, "counter", paper_terms=terms)


def _replace_operators(model: ViTAdapter, image: torch.Tensor, counter: OperatorCounter, terms: dict[str, int]) -> None:
    """What hooks do not see, by formula: the samples, Bi-WKV, and all of Vim's blocks."""
    D, L, backbone = model.embed_dim, model.depth, model.backbone
    with torch.no_grad():
        tokens, (h, w) = backbone.embed(image)
    terms["sampling"] = _SAMPLING_FIT * h * w * D
    if isinstance(backbone, VRWKV):
        terms["multiply_adds"] -= counter.macs_of("vision_ttt.bi_wkv")
        terms["bi_wkv"] = L * _BI_WKV * h * w * D
    if isinstance(backbone, Vim):
        with torch.no_grad(), OperatorCounter() as blocks:
            for block in backbone.blocks:
                tokens = block(tokens, (h, w))
        T = tokens.shape[1]
        terms["multiply_adds"] -= blocks.macs
        terms["eq_13"] = L * (6 * T * D * D + _VIM_SCAN * T * 2 * D * STATE_DIM)
