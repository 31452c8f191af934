"""Public operators around the scan: choice of a backend, shape checks, FLOP counts.

The forward pass of each is one kernel launch. The models call these operators where `selected_backend` returns
`triton`, and for inference on CPUs also where it returns `numba`; elsewhere they run plain PyTorch. The backend `torch`
is the reference formula. It serves tests, and tensors that the kernels cannot take. Shape letters as in `reference`.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..custom_op import CustomOp
from .reference import (
    ONES,
    ConvNorm,
    GatedLinear,
    GatedNorm,
    ScanConvs,
    conv_norm_formula,
    gated_linear_formula,
    gated_norm_formula,
    scan_convs_formula,
)


def _load_triton():
    """Import the modules with the Triton kernels when a CUDA tensor comes first: a CPU may have no Triton."""
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


def conv_norm(
    tokens: Tensor,
    weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    height: int,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Add a depth-wise 3 x 3 convolution on the grid to the tokens, and apply LayerNorm to the sum.

    Args:
        tokens: (B,T,D), row by row on a grid of `height` rows.
        weight: (D,3,3) of the convolution, which pads the grid with zeros and has no bias.
        gamma, beta: (D,) of the norm.
        height: rows of the grid; it divides T.
        eps: added to the variance.
        backend: `auto`, `triton`, `numba`, `torch` or `reference`.

    Returns:
        (2,B,T,D) in the tokens' dtype: the sum, then its norm.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    tensors = {"tokens": tokens, "weight": weight, "gamma": gamma, "beta": beta}
    *_, D = _check_first("conv_norm", tensors, "(B,T,D)", (None, None, None))
    _check_others("conv_norm", tensors, {"weight": (D, 3, 3), "gamma": (D,), "beta": (D,)})
    if height < 1 or tokens.shape[1] % height:
        raise ValueError(f"conv_norm: height is {height}, and the {tokens.shape[1]} tokens are no grid of as many rows")
    return CONV_NORM(ConvNorm(tokens, weight, gamma, beta, height, eps), backend)


def scan_convs(
    x: Tensor, k_weight: Tensor, k_bias: Tensor, q_weight: Tensor, q_bias: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Compute keys and queries of both directions by causal depth-wise convolutions over four tokens of one input.

    Args:
        x: (B,T,2D), the forward direction's channels first. A slice of longer rows is not copied.
        k_weight, q_weight: (2D,4), taps in the order of each direction's scan; the last one is for the token itself.
        k_bias, q_bias: (2D,).
        backend: `auto`, `triton`, `torch` or `reference`.

    Returns:
        (2,B,T,2D) in x's dtype: keys, then queries.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    tensors = {"x": x, "k_weight": k_weight, "k_bias": k_bias, "q_weight": q_weight, "q_bias": q_bias}
    *_, E = _check_first("scan_convs", tensors, "(B,T,2D)", (None, None, None))
    _check_others("scan_convs", tensors, {"k_weight": (E, 4), "k_bias": (E,), "q_weight": (E, 4), "q_bias": (E,)})
    if E % 2:
        raise ValueError(f"scan_convs: x has {E} channels, expected as many for each of two directions")
    return SCAN_CONVS(ScanConvs(x, k_weight, k_bias, q_weight, q_bias), backend)


def gated_norm(
    z: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-6, backend: str = "auto"
) -> Tensor:
    """Compute GELU(gate) ⊙ LN(Σ_r z_r) over both directions r, with the tanh approximation of GELU.

    Args:
        z: (B,T,2,D).
        gate: (B,T,D). A slice of longer rows is not copied.
        weight, bias: (D,) of the norm.
        eps: added to the variance.
        backend: `auto`, `triton`, `numba`, `torch` or `reference`.

    Returns:
        (B,T,D) in z's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    tensors = {"z": z, "gate": gate, "weight": weight, "bias": bias}
    B, T, _, D = _check_first("gated_norm", tensors, "(B,T,2,D)", (None, None, 2, None))
    _check_others("gated_norm", tensors, {"gate": (B, T, D), "weight": (D,), "bias": (D,)}, same_dtype=("gate",))
    return GATED_NORM(GatedNorm(z, gate, weight, bias, eps), backend)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor, *, backend: str = "auto") -> Tensor:
    """Compute SiLU(a) ⊙ b with [a, b] = x Wᵀ + bias, and append eight columns of ones.

    The next matrix product adds its bias through the columns of ones.

    Args:
        x: (B,T,D).
        weight: (2F,D), a's rows first. bias: (2F,).
        backend: `auto`, `triton`, `torch` or `reference`.

    Returns:
        (B,T,F+8) in x's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    tensors = {"x": x, "weight": weight, "bias": bias}
    *_, D = _check_first("gated_linear", tensors, "(B,T,D)", (None, None, None))
    rows = weight.shape[0] // 2 * 2 if weight.dim() else 0
    _check_others("gated_linear", tensors, {"weight": (rows, D), "bias": (rows,)})
    return GATED_LINEAR(GatedLinear(x, weight, bias), backend)


def selected_backend(
    backend: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    leading: str = "tokens",
    has_loops: bool = True,
) -> str:
    """Return the backend that will run for a request: `triton`, `numba`, `torch` or `reference`.

    Args:
        backend: the requested one, or `auto`.
        device: where the tensors are.
        dtype: that of the activations.
        leading: the name of the first activation, for messages.
        has_loops: whether the operator has a loop for `numba`, as `conv_norm` and `gated_norm` have; its gradients are
            those of `torch`.

    Raises:
        ValueError: as `dispatch.choose_backend`.
    """
    return dispatch.choose_backend(backend, device, leading, _load_triton, dtype, leading, has_loops=has_loops)


@functools.cache
def _load(name: str) -> tuple[Any, Any]:
    """Return the forward and backward pass of one operator as the namespaces that `CustomOp` takes."""
    forward, backward = (getattr(module, name) for module in _load_triton())
    return SimpleNamespace(forward=forward), SimpleNamespace(backward=backward)


@functools.cache
def _load_loops(name: str, formula: Callable[[Any], Tensor]) -> tuple[Any, Any]:
    """Return the numba loop of one operator, and its formula, which autograd differentiates."""
    from . import numba_path

    return SimpleNamespace(forward=getattr(numba_path, name)), SimpleNamespace(forward=formula)


def _check_first(op: str, tensors: dict[str, Any], letters: str, sizes: tuple[int | None, ...]) -> tuple[int, ...]:
    """Check the first tensor and return its shape, from which the shapes of the others follow."""
    leading = next(iter(tensors))
    dispatch.check_are_tensors(op, tensors)
    dispatch.check_leading(op, leading, tensors[leading], letters, sizes)
    return tuple(tensors[leading].shape)


def _check_others(
    op: str, tensors: dict[str, Tensor], shapes: dict[str, tuple], same_dtype: tuple[str, ...] = ()
) -> None:
    leading = next(iter(tensors))
    dispatch.check_others(
        op, leading, tensors, {leading: tuple(tensors[leading].shape), **shapes}, (leading, *same_dtype)
    )


def _register(
    name: str,
    arguments: type,
    leading: str,
    formula: Callable[[Any], Tensor],
    shape: Callable[[Any], tuple],
    macs: Callable[[Any], int],
    has_loops: bool = True,
) -> CustomOp:
    """Register the operator `name`, with its `formula`, the shape of its output, and its multiply-adds.

    Its kernels and its loop are the functions of that name in `triton_fwd`, `triton_bwd` and `numba_path`. The
    cases of the tools find the operator in this module by the name in capitals.
    """
    return CustomOp(
        name,
        arguments,
        leading=leading,
        select=lambda backend, x: selected_backend(
            backend, getattr(x, leading).device, dtype=getattr(x, leading).dtype, leading=leading, has_loops=has_loops
        ),
        reference=formula,
        torch_path=SimpleNamespace(forward=formula),
        load_triton=functools.partial(_load, name),
        load_loops=functools.partial(_load_loops, name, formula),
        result_shapes=lambda module, x: (shape(x),),
        forward_flops=lambda x: 2 * macs(x),
        backward_flops=lambda x: 4 * macs(x),
        kept=(),
    )


CONV_NORM = _register(
    "conv_norm", ConvNorm, "tokens", conv_norm_formula, lambda x: (2, *x.tokens.shape), lambda x: 9 * _size(x.tokens)
)
SCAN_CONVS = _register(
    "scan_convs",
    ScanConvs,
    "x",
    scan_convs_formula,
    lambda x: (2, *x.x.shape),
    lambda x: 8 * _size(x.x),
    has_loops=False,
)
# element-wise operations count as free, as in PyTorch's FLOP counter
GATED_NORM = _register("gated_norm", GatedNorm, "z", gated_norm_formula, lambda x: x.gate.shape, lambda x: 0)
GATED_LINEAR = _register(
    "gated_linear",
    GatedLinear,
    "x",
    gated_linear_formula,
    lambda x: (*x.x.shape[:-1], x.weight.shape[0] // 2 + ONES),
    lambda x: _size(x.x) * x.weight[0],
    has_loops=False,
)


def _size(shape: tuple) -> int:
    """Return B·T·D. For FLOP counts `CustomOp` passes shapes in place of tensors."""
    B, T, D = shape
    return B * T * D
