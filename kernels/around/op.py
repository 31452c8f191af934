"""The operators around the scan: choice of a backend, FLOP counts.

The forward pass of each is one kernel launch. `repro.models.fused_launches` calls these operators on the backend
`triton`, with tensors that it has arranged itself: they do not check their arguments. The backend `torch` is the
reference formula. It serves tests, and tensors that the kernels cannot take. Shape letters as in `reference`.
"""

import functools
import math
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
    """Import the modules of the backend `triton` when it runs: a CPU may have no Triton, see `dispatch.Load`."""
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


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


def _register(
    arguments: type,
    formula: Callable[[Any], Tensor],
    shape: Callable[[Any], tuple],
    macs: Callable[[Any], int],
    has_loops: bool = False,
) -> CustomOp:
    """Register the operator of these arguments, the first of which sets its device and dtype.

    Its name is that of its formula. Its kernels and its loop are the functions of that name in `triton_fwd`,
    `triton_bwd` and `numba_path`. The cases of the tools find the operator in this module by the name in capitals.

    Args:
        arguments: its NamedTuple.
        formula: its equation, see `reference`.
        shape: arguments -> the shape of the output.
        macs: arguments with shapes in place of tensors -> the multiply-adds of the forward pass; element-wise
            operations count as free, as in PyTorch's FLOP counter.
        has_loops: whether it has a loop for numba.
    """
    name, leading = formula.__name__.removesuffix("_formula"), arguments._fields[0]
    return CustomOp(
        name,
        arguments,
        leading=leading,
        select=lambda backend, x: selected_backend(
            backend, x[0].device, dtype=x[0].dtype, leading=leading, has_loops=has_loops
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
    ConvNorm, conv_norm_formula, lambda x: (2, *x.tokens.shape), lambda x: 9 * math.prod(x.tokens), has_loops=True
)
SCAN_CONVS = _register(ScanConvs, scan_convs_formula, lambda x: (2, *x.x.shape), lambda x: 8 * math.prod(x.x))
GATED_NORM = _register(GatedNorm, gated_norm_formula, lambda x: x.gate.shape, lambda x: 0, has_loops=True)
GATED_LINEAR = _register(
    GatedLinear,
    gated_linear_formula,
    lambda x: (*x.x.shape[:-1], x.weight.shape[0] // 2 + ONES),
    lambda x: math.prod(x.x) * x.weight[0],
)
