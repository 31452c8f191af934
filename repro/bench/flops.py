"""Parameters and multiply-adds (MACs) of any timm-registered model at any image size.

A MAC is one multiply-add of a matrix product, of a convolution, or of an operator of `kernels`. Norms, activations,
softmax, pooling, interpolation and element-wise arithmetic are free. Papers of this field call MACs "FLOPs";
`torch.utils.flop_counter` counts two FLOPs per MAC.

A model with a closed form is counted without a forward pass. The families of this project have theirs as methods
(`param_terms`, `mac_terms`); those of timm's plain ViT and DeiT are here. Any other model runs once on the meta device,
with unfused attention, under a dispatch mode that refuses unknown operators, so none is silently counted as zero.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch.utils.flop_counter import flop_registry

from kernels.custom_op import SeesParts

from . import build

# ATen operators without multiply-adds, besides those that PyTorch tags as views or pointwise
_FREE_ATEN = frozenset(
    # new tensors, copies and layout
    "empty empty_like new_empty empty_strided new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full "
    "full_like new_full arange linspace eye scalar_tensor lift_fresh clone copy_ _to_copy cat stack constant_pad_nd "
    "roll flip repeat index _unsafe_index index_select gather scatter slice_scatter select_scatter tril triu _unsafe_view as_strided_ "
    "_local_scalar_dense embedding "
    # reductions and orderings
    "sum mean amax amin max min var var_mean std argmax argmin linalg_vector_norm cumsum sort topk any all "
    # normalisation, softmax, pooling
    "native_layer_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training native_group_norm "
    "_fused_rms_norm _softmax _log_softmax avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d "
    # interpolation
    "upsample_bilinear2d upsample_bicubic2d "
    # random numbers
    "bernoulli_ native_dropout rand randn uniform_ normal_".split()
)


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
    """

    num_params: int
    macs: int
    method: Literal["analytic", "counter"]
    param_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    mac_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    paper_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def macs_g(self) -> float:
        return self.macs / 1e9

    @property
    def macs_g_paper_convention(self) -> float:
        return sum(self.paper_terms.values()) / 1e9


def cost(name: str, options: Mapping[str, Any], image_size: tuple[int, int]) -> Cost:
    """Count the parameters and MACs of a registered model for one image of (H, W) pixels.

    Raises:
        ValueError: an unknown model, an image size that it refuses, an operator whose multiply-adds are unknown, or a
            closed form whose parameters do not add up to the model's.
    """
    model = build.build_eval_model(name, options, image_size, fused=False, device="meta")
    num_params = sum(p.numel() for p in model.parameters())
    found = closed_form(model, image_size)
    if found is None:
        return Cost(num_params, counted_macs(model, image_size), "counter")
    param_terms, mac_terms = found
    if sum(param_terms.values()) != num_params:
        raise ValueError(f"{name}: the closed form has {sum(param_terms.values())} parameters, the model {num_params}")
    paper_terms = model.paper_mac_terms(image_size) if hasattr(model, "paper_mac_terms") else {}
    return Cost(num_params, sum(mac_terms.values()), "analytic", param_terms, mac_terms, paper_terms)


def closed_form(model: torch.nn.Module, image_size: tuple[int, int]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Return (parameter terms, multiply-add terms) for one image of (H, W) pixels; None without a closed form.

    Raises:
        ValueError: an image size that the model does not take.
    """
    if hasattr(model, "mac_terms"):
        return model.param_terms(), model.mac_terms(image_size)
    return _vit_terms(model, image_size) if _is_plain_vit(model) else None


def _is_plain_vit(model: torch.nn.Module) -> bool:
    """Tell whether a model is timm's VisionTransformer with no parts that the closed form omits; DeiT is one."""
    if type(model) is not VisionTransformer or not model.blocks:
        return False
    block = model.blocks[0]
    if type(block) is not Block or type(block.mlp) is not Mlp:
        return False
    extras = (
        block.ls1,
        block.attn.q_norm,
        block.attn.k_norm,
        block.attn.norm,
        block.mlp.norm,
        model.norm_pre,
        model.fc_norm,
    )
    return (
        all(isinstance(part, torch.nn.Identity) for part in extras)
        and isinstance(model.head, (torch.nn.Linear, torch.nn.Identity))
        and model.attn_pool is None
        and model.pos_embed is not None
        and isinstance(model.patch_embed.proj, torch.nn.Conv2d)
        and all(
            isinstance(linear, torch.nn.Linear)
            for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2)
        )
        and block.attn.qkv.bias is not None
    )


def _vit_terms(model: VisionTransformer, image_size: tuple[int, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the closed form of a plain ViT; D is the width, L the depth, N patch tokens, T all tokens."""
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


def counted_macs(model: torch.nn.Module, image_size: tuple[int, int]) -> int:
    """Count the MACs of one forward pass of a (1, 3, H, W) image by operator, on the model's own device.

    Raises:
        ValueError: an operator ran that neither has a FLOP formula registered with PyTorch nor is known to be free.
    """
    image = torch.empty(1, 3, *image_size, device=next(model.parameters()).device)
    with torch.no_grad(), OperatorCounter() as counter:
        model(image)
    return counter.macs


class OperatorCounter(SeesParts):
    """A dispatch mode that adds up the MACs of every operator; it raises the errors of `counted_macs`.

    On the meta device nothing escapes the count, because a kernel launched past the dispatcher cannot run there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flops: Counter[str] = Counter()

    @property
    def macs(self) -> int:
        return self._flops.total() // 2

    def macs_of(self, operator: str) -> int:
        """Return the MACs of one operator, such as `aten.mm`; 0 if no operator of this name ran.

        So after a renaming of an operator, counts that subtract it by its old name are too large, without an error.
        """
        return self._flops[operator] // 2

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        formula = _OWN_FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is None and not _is_free(func):
            # a mode is off inside its own handler; re-entering it counts the parts of a composite operator
            with self:
                out = func.decompose(*args, **kwargs)
            if out is NotImplemented:
                raise ValueError(f"{func}: unknown to the MAC counter; register a formula with register_flop_formula")
            return out
        out = func(*args, **kwargs)
        if formula is not None:
            self._flops[str(func._overloadpacket)] += formula(*args, **kwargs, out_val=out)
        return out


def _convolution_backward_flops(
    grad_out,
    x,
    weight,
    bias_sizes,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    output_mask,
    *,
    out_val,
) -> int:
    """Count the FLOPs of a convolution's gradients; each of input and weight has as many as the convolution itself.

    PyTorch's own formula ignores the groups in the gradient of the weight. The operator occurs in a forward pass if an
    inner learner is a convolution.
    """
    positions = x if transposed else grad_out
    return 2 * sum(output_mask[:2]) * positions.numel() * weight[0].numel()


_OWN_FORMULAS = {torch.ops.aten.convolution_backward: _convolution_backward_flops}


def _is_free(func: torch._ops.OpOverload) -> bool:
    if func.namespace == "prim":
        return func._opname == "device"
    if func.namespace != "aten":
        return False
    return func.is_view or torch.Tag.pointwise in func.tags or func._opname in _FREE_ATEN
