"""Public operator multi-scale deformable attention: argument checks, choice of a backend, FLOP counts.

Shape letters as in `reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import dispatch
from ..custom_op import CustomOp
from . import torch_path
from .reference import Arguments, ms_deform_attn_formula


def _load_triton():
    """Import the modules of the backend `triton` when it runs: a CPU may have no Triton, see `dispatch.Load`."""
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


def ms_deform_attn(
    value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor, *, backend: str = "auto"
) -> Tensor:
    """For each query and head, sum bilinear samples at the query's own points on the maps of several levels.

        out_q = Σ_l Σ_p weight_qlp · value_l(x, y)    with (x, y) = location_qlp · (w_l, h_l) − 0.5, in pixels

    value_l(x, y) interpolates between the four pixels around (x, y), whose centres have whole coordinates; outside the
    map everything is zero. It is `grid_sample(2 · location − 1, bilinear, padding zeros, align_corners=False)`. The
    weights are used without a softmax: the one over all points of all levels belongs to the layer.

    Coordinates, samples and sums are fp32 (fp64 for fp64 inputs), whatever the dtype and under autocast. Inputs are not
    written to. NaN in a location or a weight, or infinity in a location, fills the output of its query and head with
    NaN; an infinite weight leaves no finite value there. Only the inputs are kept for the backward pass. Every tensor
    has a gradient; second derivatives need the reference backend. The derivative with respect to locations exists
    almost everywhere; where a point lies on a pixel's row or column, it is the one from the right.

    Args:
        value: (B,S,M,C), of one dtype: fp64, fp32, bf16 or fp16. The levels' maps row by row, one after the other, S =
            Σ h·w.
        shapes: (h, w) of each of the L levels, ints.
        locations: (B,Q,M,L,P,2), (x, y) in [0,1] from a map's upper left corner to its lower right one, or outside.
        weights: (B,Q,M,L,P). locations and weights are fp32 or of value's dtype.
        backend: `auto`, `triton`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,Q,M,C) in value's dtype.

    Raises:
        TypeError: an argument has a wrong type or dtype. ValueError: a wrong shape, device or value. Both name it.
    """
    _check(value, shapes, locations, weights)
    return CUSTOM_OP(Arguments(value, [size for shape in shapes for size in shape], locations, weights), backend)


def selected_backend(
    backend: str, device: torch.device | str, *, head_dim: int = 32, levels: int = 1, dtype: torch.dtype = torch.float32
) -> str:
    """Return the backend that will run, `triton`, `torch` or `reference`; every result records it.

    `triton` is one kernel for the forward pass, and two with a sort between them for the backward pass, for NVIDIA GPUs
    from sm_80 on (and, slowly, for the CPU under Triton's interpreter). It has no atomics: two runs give the same bits.
    `torch` is `grid_sample` with its own backward pass, for any device and any size. On CUDA, that pass adds up the
    gradient of value in no fixed order, and refuses to run where torch is to be deterministic. `reference` is the
    equation point by point under autograd. `auto` takes `triton` on a GPU that can run these sizes, else `torch`.
    `head_dim`, `levels` and `dtype` are C, L and value's dtype. Errors are those of `dispatch.choose_backend`.
    """
    return dispatch.choose_backend(backend, device, "value", _load_triton, dtype, int(head_dim), levels)


def _check(value, shapes, locations, weights):
    """Raise a TypeError or ValueError that names the argument, its value and the expected one."""
    op, tensors = "ms_deform_attn", {"value": value, "locations": locations, "weights": weights}
    dispatch.check_are_tensors(op, tensors)
    pairs = isinstance(shapes, Sequence) and all(isinstance(shape, Sequence) and len(shape) == 2 for shape in shapes)
    if (
        not pairs
        or not shapes
        or not all(isinstance(size, int | torch.SymInt) and size > 0 for shape in shapes for size in shape)
    ):
        raise ValueError(f"{op}: shapes is {shapes!r}, expected a pair (h, w) of ints of at least 1 for each level")
    S, L = sum(h * w for h, w in shapes), len(shapes)
    dispatch.check_leading(
        op, "value", value, f"(B,S,M,C) with S {S}, the sum of h·w over shapes", (None, S, None, None)
    )
    if locations.dim() != 6 or locations.shape[1] < 1 or locations.shape[4] < 1:
        expected = "(B,Q,M,L,P,2) with every size at least 1"
        raise ValueError(f"{op}: locations has shape {tuple(locations.shape)}, expected {expected}")
    B, _, M, _ = value.shape
    Q, P = locations.shape[1], locations.shape[4]
    expected = {"value": tuple(value.shape), "locations": (B, Q, M, L, P, 2), "weights": (B, Q, M, L, P)}
    dispatch.check_others(op, "value", tensors, expected, ("value",), L=L, Q=Q, P=P)


def forward_flops(samples_shape: Sequence[int], channels: int) -> int:
    """Count the FLOPs for weights of shape (B,Q,M,L,P): 2 for each of the 5 multiply-adds of a sample and channel.

    These are the 4 neighbours and the weight. Coordinates and the neighbours' shares do not depend on the channel and
    count as free, as do all operations of the reference backend in PyTorch's counter.
    """
    B, Q, M, L, P = samples_shape
    return 2 * 5 * B * Q * M * L * P * channels


def backward_flops(samples_shape: Sequence[int], channels: int) -> int:
    """Count 2 FLOPs for each of the 8 multiply-adds of a sample and channel.

    dout times each of the 4 neighbours gives the gradients of the location and the weight; and dout is added to the
    gradient of each neighbour.
    """
    B, Q, M, L, P = samples_shape
    return 2 * 8 * B * Q * M * L * P * channels


CUSTOM_OP = CustomOp(
    "ms_deform_attn",
    Arguments,
    leading="value",
    select=lambda backend, x: selected_backend(
        backend, x.value.device, head_dim=x.value.shape[3], levels=len(x.shapes) // 2, dtype=x.value.dtype
    ),
    reference=lambda x: ms_deform_attn_formula(
        x.value, list(zip(x.shapes[::2], x.shapes[1::2], strict=True)), x.locations, x.weights
    ),
    torch_path=torch_path,
    load_triton=_load_triton,
    result_shapes=lambda module, x: ((*x.locations.shape[:3], x.value.shape[3]),),
    # for the counts of FLOPs `CustomOp` passes x with shapes in place of tensors
    forward_flops=lambda x: forward_flops(x.weights, x.value[-1]),
    backward_flops=lambda x: backward_flops(x.weights, x.value[-1]),
    kept=(),
)
