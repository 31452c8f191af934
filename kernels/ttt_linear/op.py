"""Public operator TTT-Linear: argument checks, choice of a backend, FLOP counts.

The custom op has a direction axis of length 1 or 2. Shape letters as in `reference`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import dispatch
from ..custom_op import CustomOp
from . import torch_path
from .reference import Arguments, ttt_linear_dual

_MIN_HEAD_DIM = 4  # a LayerNorm of two values gives ±1, whose sign rounding can flip


def _load_triton():
    """Import the modules of the backend `triton` when it runs: a CPU may have no Triton, see `dispatch.Load`."""
    from . import triton_bwd, triton_phases

    return triton_phases, triton_bwd


def _load_loops():
    """Import the module of the backend `numba` when it runs; it has both passes, see `dispatch.Load`."""
    from . import numba_path

    return numba_path, numba_path


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    chunk_size: int = 16,
    reverse: bool = False,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Run the inner learner of Vision-TTT in one direction: a linear map with LayerNorm that learns along the tokens.

    For every chunk of n ≤ chunk_size consecutive tokens, starting from W = W0, β = b0, with ℓ = ½‖LN(Z) − (V − K)‖²:

        Z = KW + β,  G = dℓ/dZ,  A = tril(c[:n] lrᵀ) ⊙ (QKᵀ + 1),  O = QW + β − AG,  out = Q + γ ⊙ norm(O) + μ
        W ← W − Kᵀ(c[n−1] lr ⊙ G),  β ← β − Σ_t c[n−1] lr_t G_t

    State, statistics and accumulators are fp32 (fp64 for fp64 inputs). So are products, except that the triton backend
    rounds their operands to q's dtype. Inputs are not written to; NaN propagates. Every tensor argument has a gradient.
    Second derivatives need the reference backend.

    Args:
        q, k, v: (B,T,H,D) with D of 4 or more, of one dtype: fp64, fp32, bf16 or fp16. The tensors below are fp32 or of
            that dtype.
        lr: (B,T,H), inner learning rates.
        token_scale: (chunk_size,), c of the equations.
        W0: (H,D,D), start weight, row-vector convention.
        b0, ln_weight, ln_bias: (H,D), start bias, γ and μ.
        chunk_size: tokens per inner gradient step; may exceed T. The last chunk may be shorter.
        reverse: scan from t = T−1 to 0, with chunks cut from that end: the same as flipping q, k, v and lr along T,
            scanning forward, and flipping the output.
        eps: added to the variance in the LayerNorms, above 0.
        backend: `auto`, `triton`, `numba`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,T,H,D) in q's dtype.

    Raises:
        TypeError: an argument has a wrong type or dtype. ValueError: a wrong shape, device or value. Both name it.
    """
    parameters = token_scale, W0, b0, ln_weight, ln_bias
    _check("ttt_linear", (), (q, k, v, lr, *parameters), chunk_size, eps)
    if not isinstance(reverse, bool):
        raise TypeError(f"ttt_linear: reverse is {reverse!r}, expected True or False")
    q, k, v = q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2)
    x = Arguments(q, k, v, lr, *(parameter.unsqueeze(0) for parameter in parameters), chunk_size, [reverse], eps)
    return CUSTOM_OP(x, backend).squeeze(2)


def ttt_linear_bidir(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    chunk_size: int = 16,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Learn in both directions at once, for a Vittt layer: index 0 forward, 1 backward, each with its own parameters.

    It equals `ttt_linear` on each index of the direction axis, the second one with reverse=True. Arguments and errors
    are the same except for these shapes.

    Args:
        q, k, v: (B,T,2,H,D).
        lr: (B,T,H), shared by both directions.
        token_scale: (2,chunk_size). W0: (2,H,D,D). b0, ln_weight, ln_bias: (2,H,D).

    Returns:
        out (B,T,2,H,D) in q's dtype, both directions in the order of the input.
    """
    tensors = q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias
    _check("ttt_linear_bidir", (2,), tensors, chunk_size, eps)
    return CUSTOM_OP(Arguments(*tensors, chunk_size, [False, True], eps), backend)


def one_direction(inputs: Sequence[Tensor], r: int = 0) -> list[Tensor]:
    """Return the tensors of `ttt_linear` for index r of the direction axis, from those of `ttt_linear_bidir`.

    With r = 0 it also takes off a direction axis of length 1.
    """
    q, k, v, lr, *parameters = inputs
    return [q[:, :, r], k[:, :, r], v[:, :, r], lr, *(x[r] for x in parameters)]


def selected_backend(
    backend: str,
    device: torch.device | str,
    *,
    head_dim: int = 64,
    chunk_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return the backend that will run, `triton`, `numba`, `torch` or `reference`; every result records it.

    `triton` is one kernel for each pass, or two where few programs would leave a GPU idle, for NVIDIA GPUs from sm_80
    on (and, slowly, for the CPU under Triton's interpreter). `numba` is one loop for each pass, for CPUs and heads
    whose width is a multiple of 4. `torch` is PyTorch operations with a backward pass segment by segment, for any
    device and any size. `reference` is the dual form under autograd: the same function and FLOP count, but slower, and
    with the memory that autograd needs. `auto` takes `triton` on a GPU that can run these sizes, `numba` on a CPU that
    has it and can run them, else `torch`. `head_dim`, `chunk_size` and `dtype` are D, the chunk size and q's dtype.
    Errors are those of `dispatch.choose_backend`.
    """
    gpu = dispatch.find_gpu(device)
    shared_kib = gpu.shared_memory_per_block_optin // 1024 if gpu else None
    sizes = int(head_dim), int(chunk_size), dtype, shared_kib
    return dispatch.choose_backend(backend, device, "q", _load_triton, *sizes, has_loops=int(head_dim) % 4 == 0)


def _reference(x: Arguments) -> Tensor:
    """Return the output by the dual form of each direction."""
    options = {"chunk_size": x.chunk_size, "eps": x.eps}
    return torch.stack(
        [ttt_linear_dual(*one_direction(x[:9], r), reverse=flag, **options) for r, flag in enumerate(x.reverse)], 2
    )


def _check(op: str, directions: tuple[int, ...], tensors: Sequence[Tensor], chunk_size: int, eps: float) -> None:
    """Raise a TypeError or ValueError that names the argument, its value and the expected one.

    `directions` is the shape of the direction axis: (2,), or () for `ttt_linear`, which has no such axis.
    """
    named = dict(zip(Arguments._fields, tensors, strict=False))  # the fields after the tensors are left out
    dispatch.check_are_tensors(op, named)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, torch.SymInt)):
        raise TypeError(f"{op}: chunk_size is {chunk_size!r}, expected an integer")
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size is {chunk_size}, expected at least 1")
    if not isinstance(eps, (float, int)) or not 0 < eps < math.inf:
        raise ValueError(f"{op}: eps is {eps!r}, expected a number above 0")

    q = named["q"]
    letters = "(B,T,2,H,D)" if directions else "(B,T,H,D)"
    dispatch.check_leading(op, "q", q, letters, (None, None, *directions, None, None))
    (B, T), (H, D) = q.shape[:2], q.shape[-2:]
    if D < _MIN_HEAD_DIM:
        raise ValueError(f"{op}: q has heads of width {D}, expected at least {_MIN_HEAD_DIM}")
    head = (*directions, H, D)
    expected = {"lr": (B, T, H), "token_scale": (*directions, chunk_size), "W0": (*head, D)}
    expected |= dict.fromkeys(("q", "k", "v"), tuple(q.shape)) | dict.fromkeys(("b0", "ln_weight", "ln_bias"), head)
    dispatch.check_others(op, "q", named, expected, ("q", "k", "v"), chunk_size=chunk_size)


def forward_flops(shape: Sequence[int], chunk_size: int) -> int:
    """Count 2 FLOPs for each multiply-add of the products KW, QW, QKᵀ, AG, KᵀG, for q of shape (B,T,R,H,D).

    A shorter last chunk counts with its true length.
    """
    B, T, R, H, D = shape
    lengths = [min(chunk_size, T - start) for start in range(0, T, chunk_size)]
    return 2 * B * R * H * sum(3 * n * D * D + 2 * n * n * D for n in lengths)


def backward_flops(shape: Sequence[int], chunk_size: int) -> int:
    """Count two products for each of the forward pass except the last state update, on which no output depends.

    This is the count of autograd on the dual form when every input needs a gradient. The repeated scan is not counted.
    """
    B, T, R, H, D = shape
    last = T % chunk_size or chunk_size
    return 2 * forward_flops(shape, chunk_size) - 2 * 2 * B * R * H * last * D * D


CUSTOM_OP = CustomOp(
    "ttt_linear",
    Arguments,
    leading="q",
    select=lambda backend, x: selected_backend(
        backend, x.q.device, head_dim=x.q.shape[-1], chunk_size=x.chunk_size, dtype=x.q.dtype
    ),
    reference=_reference,
    torch_path=torch_path,
    load_triton=_load_triton,
    load_loops=_load_loops,
    result_shapes=lambda module, x, keep_states: (x.q.shape, module.states_shape(x.q.shape, x.chunk_size, keep_states)),
    # for the counts of FLOPs `CustomOp` passes x with shapes in place of tensors
    forward_flops=lambda x: forward_flops(x.q, x.chunk_size),
    backward_flops=lambda x: backward_flops(x.q, x.chunk_size),
)
