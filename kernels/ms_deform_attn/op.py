"""The public op multi-scale deformable attention: argument checks, backends, autograd, FLOP count.

The fast backends are one operator with a fake kernel, a backward that is an operator itself, and FLOP formulas, so that
torch.compile(fullgraph=True), inference mode, autocast, checkpointing and FlopCounterMode see one opaque operation. The Triton
files, and Triton with them, are imported nowhere else. The reference backend is plain operations under autograd.

Shape letters: B images, S tokens of all levels, Q queries, M heads, L levels, P points, C channels of a head.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import dispatch
from . import torch_path
from .reference import ms_deform_attn_formula


def ms_deform_attn(
    value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Each query's weighted sum of bilinear samples, at points of its own on the maps of several levels, head by head.

        out_q = Σ_l Σ_p weight_qlp · value_l(x, y)    with the pixel coordinates (x, y) = location_qlp · (w_l, h_l) − 0.5

    value_l(x, y) interpolates between the four pixels around (x, y), whose centres have whole coordinates; outside the map
    everything is zero. It is `grid_sample(2 · location − 1, bilinear, padding zeros, align_corners=False)`. weights are used as
    they are: the softmax, over all points of all levels, is the layer's.

    Coordinates, samples and sums are fp32 (fp64 for fp64 inputs), whatever the dtype and under autocast. Inputs are not written
    to. NaN in a location or a weight, or infinity, fills the output of its query and head with NaN. Kept for the backward pass are
    the inputs alone. Differentiable in every tensor, once (the reference backend: as often as one likes); in locations almost
    everywhere, and where a point lies on a pixel's row or column, the derivative is the one from the right.

    Args:
        value: (B,S,M,C), one dtype of fp64, fp32, bf16, fp16: the levels' maps row by row, one after the other, S = Σ h·w.
        shapes: (h, w) of each of the L levels, ints.
        locations: (B,Q,M,L,P,2), (x, y) in [0,1] from a map's left upper corner to its right lower one, or outside.
        weights: (B,Q,M,L,P). locations and weights are fp32 or of value's dtype.
        backend: `auto`, `triton`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,Q,M,C) in value's dtype.

    Raises:
        TypeError: an argument of a wrong type or dtype. ValueError: a wrong shape, device or value. Both name the argument.
    """
    _check(value, shapes, locations, weights)
    dispatch.check_backend(backend)
    if backend == "reference":
        with dispatch.no_autocast(value.device.type):
            return ms_deform_attn_formula(value, shapes, locations, weights)
    return _forward_op(value, [size for shape in shapes for size in shape], locations, weights, backend)


def selected_backend(
    backend: str, device: torch.device | str, *, head_dim: int = 32, levels: int = 1, dtype: torch.dtype = torch.float32
) -> str:
    """The backend that will run for a request, `triton`, `torch` or `reference`; it is recorded with every result.

    `triton` is one kernel for the forward pass and two, with a sort between them, for the backward pass, for NVIDIA GPUs from sm_80
    on (and for the CPU under Triton's interpreter, slowly). It has no atomics: two runs give the same bits. `torch` is
    `grid_sample` with its own backward, for any device and any size; on CUDA, that adds the gradient of value in any order, and
    refuses to where torch is to be deterministic. `reference` is the equation point by point under autograd. `auto` takes `triton`
    on a GPU where it can run these sizes, else `torch`.

    Args:
        backend: the request.
        device: where the tensors are.
        head_dim, levels, dtype: C, L, and the dtype of value.

    Raises:
        ValueError: an unknown backend, or one that cannot run there.
    """
    return dispatch.choose_backend(backend, device, lambda there: _triton_obstacle(there, int(head_dim), levels, dtype))


@functools.cache
def _triton_obstacle(device: torch.device, head_dim: int, levels: int, dtype: torch.dtype) -> str | None:
    """What keeps the Triton kernels from running there, or None."""
    if obstacle := dispatch.package_obstacle():
        return obstacle
    from . import triton_fwd

    return dispatch.device_obstacle("value", device, triton_fwd.INTERPRETED) or triton_fwd.unsupported(dtype, head_dim, levels)


def _check(value, shapes, locations, weights):
    """Raise a TypeError or ValueError that names the argument, what it is and what is expected."""
    op, tensors = "ms_deform_attn", {"value": value, "locations": locations, "weights": weights}
    dispatch.check_are_tensors(op, tensors)
    pairs = isinstance(shapes, Sequence) and all(isinstance(shape, Sequence) and len(shape) == 2 for shape in shapes)
    if not pairs or not shapes or not all(isinstance(size, int | torch.SymInt) and size > 0 for shape in shapes for size in shape):
        raise ValueError(f"{op}: shapes is {shapes!r}, expected a pair (h, w) of ints of at least 1 for each level")
    S, L = sum(h * w for h, w in shapes), len(shapes)
    dispatch.check_leading(op, "value", value, f"(B,S,M,C) with S {S} as shapes has it", (None, S, None, None))
    if locations.dim() != 6 or locations.shape[1] < 1 or locations.shape[4] < 1:
        expected = "(B,Q,M,L,P,2) with every size at least 1"
        raise ValueError(f"{op}: locations has shape {tuple(locations.shape)}, expected {expected}")
    B, _, M, _ = value.shape
    Q, P = locations.shape[1], locations.shape[4]
    expected = {"value": tuple(value.shape), "locations": (B, Q, M, L, P, 2), "weights": (B, Q, M, L, P)}
    dispatch.check_others(op, "value", tensors, expected, ("value",), f", {L} levels, Q {Q} and P {P}")


def _selected_for(value: Tensor, levels: int, backend: str) -> str:
    """As `selected_backend`, for a call's own value and number of levels."""
    try:
        return selected_backend(backend, value.device, head_dim=value.shape[3], levels=levels, dtype=value.dtype)
    except ValueError as error:
        raise ValueError(f"ms_deform_attn: value has shape {tuple(value.shape)}: {error}") from None


def _passes(value: Tensor, shapes: Sequence[int], backend: str):
    """The modules that run for a call's own value and h, w, h, w, …: with `forward`, with `backward`."""
    if _selected_for(value, len(shapes) // 2, backend) == "torch":
        return torch_path, torch_path
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


@torch.library.custom_op("vision_ttt::ms_deform_attn", mutates_args=())
def _forward_op(value: Tensor, shapes: Sequence[int], locations: Tensor, weights: Tensor, backend: str) -> Tensor:
    """`shapes` is h, w, h, w, …"""
    module, _ = _passes(value, shapes, backend)
    with dispatch.no_autocast(value.device.type):
        return module.forward(value, shapes, locations, weights)


@_forward_op.register_fake
def _(value, shapes, locations, weights, backend):
    _passes(value, shapes, backend)
    return value.new_empty((*locations.shape[:3], value.shape[3]))


@torch.library.custom_op("vision_ttt::ms_deform_attn_backward", mutates_args=())
def _backward_op(
    dout: Tensor, value: Tensor, shapes: Sequence[int], locations: Tensor, weights: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    _, module = _passes(value, shapes, backend)
    with dispatch.no_autocast(value.device.type):
        return module.backward(dout, value, shapes, locations, weights)


@_backward_op.register_fake
def _(dout, value, shapes, locations, weights, backend):
    return tuple(x.new_empty(x.shape) for x in (value, locations, weights))


def _save_for_backward(ctx, inputs, output):
    value, ctx.shapes, locations, weights, ctx.backend = inputs
    ctx.save_for_backward(value, locations, weights)


def _differentiate(ctx, dout):
    value, locations, weights = ctx.saved_tensors
    gradients = _backward_op(dout, value, ctx.shapes, locations, weights, ctx.backend)
    wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3]
    dvalue, dlocations, dweights = (g if needed else None for g, needed in zip(gradients, wanted, strict=True))
    return dvalue, None, dlocations, dweights, None


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError("ms_deform_attn: this backend has no second derivative; backend='reference' has")


_forward_op.register_autograd(_differentiate, setup_context=_save_for_backward)
_backward_op.register_autograd(_refuse_second_derivative)


def forward_flops(samples_shape: Sequence[int], channels: int) -> int:
    """For weights of shape (B,Q,M,L,P): 2 for each of 5 multiply-adds per channel of a sample, its 4 neighbours and its weight.

    Coordinates and the neighbours' shares, which do not depend on the channel, are free, as are all operations of the reference
    backend to PyTorch's counter.
    """
    B, Q, M, L, P = samples_shape
    return 2 * 5 * B * Q * M * L * P * channels


def backward_flops(samples_shape: Sequence[int], channels: int) -> int:
    """2 for each of 8 multiply-adds per channel of a sample: dout times each of the 4 neighbours, from which the gradients of the
    location and the weight follow, and dout added to the gradient of each.
    """
    B, Q, M, L, P = samples_shape
    return 2 * 8 * B * Q * M * L * P * channels


@register_flop_formula(torch.ops.vision_ttt.ms_deform_attn)
def _(value_shape, shapes, locations_shape, weights_shape, *args, out_shape=None) -> int:
    return forward_flops(weights_shape, value_shape[-1])


@register_flop_formula(torch.ops.vision_ttt.ms_deform_attn_backward)
def _(dout_shape, value_shape, shapes, locations_shape, weights_shape, *args, out_shape=None) -> int:
    return backward_flops(weights_shape, value_shape[-1])
