"""Parameters and multiply-adds (MACs) of any timm-registered model at any resolution.

One convention everywhere: a MAC is one multiply-add of a matrix product or a convolution, or of an operator of `kernels`; norms,
activations, softmax, pooling, interpolation and element-wise arithmetic are free. Papers of this field call these "FLOPs";
`torch.utils.flop_counter` counts two FLOPs per MAC.

Vittt, ViT3 and plain ViT/DeiT are counted by a closed form (`terms`), which needs no forward pass and so no time at 1280 x 1280.
Every other model is counted by running it on the meta device with unfused attention, under a mode that refuses operators
it cannot classify: an uncounted operator is an error, never a zero.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from . import build, terms

# Operators of ATen without multiply-adds, beyond those that PyTorch itself marks as views or as pointwise.
_FREE_ATEN = frozenset(
    # new tensors, copies and layout
    "empty empty_like new_empty empty_strided new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full "
    "full_like new_full arange linspace eye scalar_tensor lift_fresh clone copy_ _to_copy cat stack constant_pad_nd "
    "roll flip repeat index _unsafe_index index_select gather scatter slice_scatter select_scatter tril triu _unsafe_view as_strided_ "
    "_local_scalar_dense "
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
    """What one forward pass of one image costs.

    Args:
        params: learned values; buffers, such as a frozen W0, do not count.
        macs: multiply-adds for one image.
        method: `analytic` or `counter`.
        param_terms, mac_terms: the named terms whose sums are `params` and `macs`; empty for the counter.
    """

    params: int
    macs: int
    method: Literal["analytic", "counter"]
    param_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    mac_terms: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def macs_g(self) -> float:
        return self.macs / 1e9


def cost(name: str, options: Mapping[str, Any], resolution: tuple[int, int]) -> Cost:
    """Parameters and MACs of a model for one image of `resolution` = (H, W) pixels.

    Raises:
        ValueError: an unknown model, a resolution that it refuses, or an operator whose multiply-adds are unknown.
    """
    model = build.create(name, options, resolution, fused=False, device="meta")
    params = sum(p.numel() for p in model.parameters())
    closed_form = terms.closed_form(model, resolution)
    if closed_form is None:
        return Cost(params, counted_macs(model, resolution), "counter")
    param_terms, mac_terms = closed_form
    if sum(param_terms.values()) != params:
        raise ValueError(f"{name}: the closed form has {sum(param_terms.values())} parameters, the model {params}")
    return Cost(params, sum(mac_terms.values()), "analytic", param_terms, mac_terms)


def counted_macs(model: torch.nn.Module, resolution: tuple[int, int]) -> int:
    """MACs of one forward pass of a (1, 3, H, W) image, counted operator by operator on the model's own device.

    Raises:
        ValueError: an operator ran that is neither counted by PyTorch's registry of FLOP formulas nor known to be free.
    """
    counter = OperatorCounter()
    image = torch.empty(1, 3, *resolution, device=next(model.parameters()).device)
    with torch.no_grad(), counter:
        model(image)
    return counter.macs


class OperatorCounter(TorchDispatchMode):
    """Adds up the MACs of every operator dispatched inside the context; see `counted_macs` for what it raises.

    It sees what PyTorch's dispatcher sees. On the meta device that is everything, because a kernel launched past the
    dispatcher cannot run there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flops: Counter[str] = Counter()

    @property
    def macs(self) -> int:
        return self._flops.total() // 2

    def macs_of(self, operator: str) -> int:
        """Of one operator, named as `aten.mm`."""
        return self._flops[operator] // 2

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        formula = _OWN_FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is None and not _is_free(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is NotImplemented:
                raise ValueError(f"{func}: not known to the MAC counter; register a formula with register_flop_formula")
            return out
        out = func(*args, **kwargs)
        if formula is not None:
            self._flops[str(func._overloadpacket)] += formula(*args, **kwargs, out_val=out)
        return out


def _convolution_backward_flops(
    grad_out, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask, *, out_val
) -> int:
    """Each gradient asked for, of the input and of the weight, has the multiply-adds of the convolution itself.

    PyTorch's formula counts the weight's as if every group met every other. A forward pass runs this operator where an inner
    learner's model is a convolution.
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


def saved_percent(ours: int, baseline: int) -> float:
    """How many percent fewer MACs `ours` has than `baseline`."""
    return 100 * (1 - ours / baseline)
