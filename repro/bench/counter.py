"""Multiply-adds of a forward pass, counted operator by operator; see `flops` for what counts as one."""

from collections import Counter

import torch
from torch.utils.flop_counter import flop_registry

from kernels.custom_op import SeesParts

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
