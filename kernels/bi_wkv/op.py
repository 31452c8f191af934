"""Public operator Bi-WKV: argument checks, choice of a backend, FLOP counts.

Shape letters as in `reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import dispatch
from ..custom_op import CustomOp
from . import torch_path
from .reference import Arguments, bi_wkv_formula


def _load_triton():
    """Import the modules of the backend `triton` when it runs: a CPU may have no Triton, see `dispatch.Load`."""
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


def _load_loops():
    """Import the module of the backend `numba` when it runs; it has both passes, see `dispatch.Load`."""
    from . import numba_path

    return numba_path, numba_path


def bi_wkv(w: Tensor, u: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto") -> Tensor:
    """Mix tokens in both directions as Vision-RWKV: a softmax over all tokens in each channel, in linear time.

        out_t = [Σ_{i≠t} e^{k_i − (|t−i| − 1) w} v_i + e^{k_t + u} v_t] / [the same without v]

    w and u come ALREADY DIVIDED BY T, as the equation has them here: a model divides its decay and bonus itself. This
    is the paper's equation; the official CUDA kernel deviates from it, see `reference.bi_wkv_formula`.

    Sums and their exponents are fp32 (fp64 for fp64 inputs), whatever the dtype. Their relative error is about 1e-7
    times the largest exponent that matters, at any T. |w| T may be at most 1e7. `torch` and `numba` refuse a larger
    one; `triton`, whose check would wait for the device, gives NaN. |u| and |k| must stay below 1e29. Inputs are not
    written to. A NaN fills its channel of its image. Every argument has a gradient. Second derivatives need the
    reference backend.

    Args:
        w: (C,), the decay per token; if negative, far tokens weigh more.
        u: (C,), the bonus of the token itself. w and u are fp32 or of k's dtype.
        k, v: (B,T,C), of one dtype: fp64, fp32, bf16 or fp16.
        backend: `auto`, `triton`, `numba`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,T,C) in k's dtype.

    Raises:
        TypeError: an argument has a wrong type or dtype. ValueError: a wrong shape, device or value. Both name it.
    """
    tensors = {"w": w, "u": u, "k": k, "v": v}
    dispatch.check_are_tensors("bi_wkv", tensors)
    dispatch.check_leading("bi_wkv", "k", k, "(B,T,C)", (None, None, None))
    shapes = {"w": (k.shape[2],), "u": (k.shape[2],), "k": tuple(k.shape), "v": tuple(k.shape)}
    dispatch.check_others("bi_wkv", "k", tensors, shapes, ("k", "v"))
    return CUSTOM_OP(Arguments(w, u, k, v), backend)


def selected_backend(backend: str, device: torch.device | str, *, dtype: torch.dtype = torch.float32) -> str:
    """Return the backend that will run, `triton`, `numba`, `torch` or `reference`; every result records it.

    `triton` is one kernel for the forward pass and one for the backward pass, for long sequences three launches and
    five, for NVIDIA GPUs from sm_80 on (and, slowly, for the CPU under Triton's interpreter). `numba` is one loop for
    each pass, for CPUs. `torch` is batched PyTorch operations with a hand-written backward pass, for any device.
    `reference` is the equation over all pairs of tokens under autograd. `auto` takes `triton` on a GPU that can run it,
    `numba` on a CPU where it is installed, else `torch`. `dtype` is k's. Errors are those of `dispatch.choose_backend`.
    """
    return dispatch.choose_backend(backend, device, "k", _load_triton, dtype, has_loops=True)


def forward_flops(shape: Sequence[int]) -> int:
    """Count the FLOPs for k of shape (B,T,C): 2 for each of the 6 multiply-adds of a token and channel.

    These are e^{−w} times the state plus the token, for numerator and denominator in two directions, and the token
    itself with e^u. The paper's own count is 29 per token and channel.
    """
    B, T, C = shape
    return 2 * 6 * B * T * C


def backward_flops(shape: Sequence[int]) -> int:
    """Count 2 FLOPs for each of the 17 multiply-adds of a token and channel, without the repeated forward pass.

    6 for the adjoint sums as for the forward pass, 2 for the adjoint token, 1 for dv, 2 for dk, 2 for du, 4 for dw.
    """
    B, T, C = shape
    return 2 * 17 * B * T * C


CUSTOM_OP = CustomOp(
    "bi_wkv",
    Arguments,
    leading="k",
    select=lambda backend, x: selected_backend(backend, x.k.device, dtype=x.k.dtype),
    reference=lambda x: bi_wkv_formula(*x),
    torch_path=torch_path,
    load_triton=_load_triton,
    load_loops=_load_loops,
    result_shapes=lambda module, x, keep_states: (x.k.shape, module.states_shape(x.k.shape, keep_states)),
    # for the counts of FLOPs `CustomOp` passes x with shapes in place of tensors
    forward_flops=lambda x: forward_flops(x.k),
    backward_flops=lambda x: backward_flops(x.k),
    kept=("out", "states"),
)
