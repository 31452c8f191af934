"""Other people's kernels, with the interface of ours.

**flash-linear-attention**'s TTT-Linear (package `flash-linear-attention`, the extra `bench`). Its inner learning rate
is one factor per query row, with the last row's for the state update; ours is c[row] · lr[column]. The two compute the
same where our lr is constant within a chunk. It has one direction. Its public functions put the residual on O = QW + β
− AG, where ours has it on Q. Therefore `out` takes O from the autograd function under the public one and applies the
output norm itself, with the package's own kernel. Then each of our gradients has its counterpart; that of lr is summed
over a chunk.

Its kernels are tuned once per process and chunk size, for the dtype and T of the first call, and the choice is kept on
disk. Here the disk is left out, and `forget_tuning` makes it tune again: each shape is measured with the config that
suits it. For timing it gets its cheapest equivalent: one call with the two directions as further heads, without the
flips that it would need.

**mamba-ssm**'s selective scan has the layout (B,E,T) and one direction. For timing, Vim's shapes give it its cheapest
equivalent: inputs in that layout, those of the second direction and its gate flipped beforehand, two calls, and one
flip of the second output. Shape letters: B samples, T tokens, H heads, D head width, E channels.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

PEER_KINDS = ("chunk", "fused_chunk")
PACKAGE = "fla"
EPS = 1e-6  # the default of `kernels.ttt_linear`


def _import(name: str) -> ModuleType:
    """Import a module of the package `fla`, which is told at its first import not to keep its tuning on disk.

    Raises:
        ImportError: it is not installed. RuntimeError: it was imported before, and keeps its tuning on disk.
    """
    os.environ["FLA_CACHE_RESULTS"] = "0"
    module = importlib.import_module(f"{PACKAGE}.{name}")
    if importlib.import_module(f"{PACKAGE}.utils.env").FLA_CACHE_RESULTS:
        raise RuntimeError(
            "fla was imported with FLA_CACHE_RESULTS on: its kernels would keep an earlier size's tuning"
        )
    return module


def arguments(*inputs: Tensor, chunk_size: int) -> dict[str, Any]:
    """Return the keyword arguments of fla's functions, from the nine tensors of `kernels.ttt_linear`.

    The layout (B,T,H,D) is the same.
    """
    q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias = inputs
    B, T = q.shape[:2]
    c = token_scale.repeat(-(-T // chunk_size))[:T]
    eta = (c[None, :, None] * lr)[..., None]
    return {
        "q": q,
        "k": k,
        "v": v,
        # its kernels want these three in q's dtype, and sum the gradients of w and b in that dtype, too
        "w": ln_weight.to(q.dtype),
        "b": ln_bias.to(q.dtype),
        "eta": eta.to(q.dtype),
        "scale": 1.0,  # the default is D^-1/2
        "eps": EPS,
        "chunk_size": chunk_size,
        "initial_state": W0.expand(B, *W0.shape),
        "initial_state_bias": b0[None, :, None].expand(B, b0.shape[0], 1, b0.shape[1]),
    }


def forget_tuning() -> None:
    """Make fla's kernels tune again at their next call; a tuner may lie below other wrappers of a kernel."""
    for kind in PEER_KINDS:
        for kernel in vars(_import(f"ops.ttt.{kind}")).values():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None:
                kernel.cache.clear()


def both_directions(kind: str) -> Callable[..., Tensor]:
    """Return fla's `kind` as a function of `ttt_linear_bidir`'s tensors, to be tuned again at its first call.

    Both directions scan forward, as 2·H heads of one call, and have the first one's token scale.
    """
    forget_tuning()
    function = getattr(_import("ops.ttt"), f"{kind}_ttt_linear")

    def run(
        q: Tensor, k: Tensor, v: Tensor, lr: Tensor, token_scale: Tensor, *shared: Tensor, chunk_size: int
    ) -> Tensor:
        H = q.shape[3]
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        given = arguments(
            q, k, v, lr.repeat(1, 1, 2), token_scale[0], *(x.flatten(0, 1) for x in shared), chunk_size=chunk_size
        )
        return function(**given, output_final_state=False)[0].unflatten(2, (2, H))

    return run


def out(kind: str, *inputs: Tensor, chunk_size: int) -> Tensor:
    """Return `kernels.ttt_linear` of nine tensors in one direction, where lr is constant in each chunk.

    It is computed by fla's autograd function, see the top of this module.
    """
    given = arguments(*inputs, chunk_size=chunk_size)
    q, weight, bias = given["q"], given["w"], given["b"]
    module = _import(f"ops.ttt.{kind}")
    # the last arguments are for sequences of different lengths
    function, more = (module.ChunkTTTLinearFunction, 2) if kind == "chunk" else (module.FusedChunkTTTLinearFunction, 1)
    state = given["initial_state"], given["initial_state_bias"]
    scan = weight, bias, chunk_size, given["eta"], given["scale"], EPS, *state, False
    O = function.apply(q, given["k"], given["v"], *scan, *[None] * more)[0]
    B, T, H, D = O.shape
    group_norm = _import("modules.layernorm").group_norm
    y = group_norm(O.reshape(B, T, H * D), weight=weight.reshape(-1), bias=bias.reshape(-1), eps=EPS, num_groups=H)
    return q + y.reshape(B, T, H, D)


def in_layout_of_mamba(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Lay out `selective_scan_bidir`'s tensors for `mamba_ssm`: tokens last, in scan order, and z per direction."""
    u, delta, A, B, C, D, z, bias = inputs
    scanned = (u, delta, B, C, z.unsqueeze(2).expand_as(u))
    u, delta, B, C, z = (torch.stack((x[:, :, 0], x[:, :, 1].flip(1)), 1).mT for x in scanned)
    return [u, delta, A, B, C, D, z, bias]


def mamba_ssm(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor
) -> Tensor:
    """Run mamba-ssm's operator on the tensors of `in_layout_of_mamba`.

    The result is (B,2,E,T), with the tokens of both directions in the order of the input.
    """
    scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    forward, backward = (
        scan(u[:, r], delta[:, r], A[r], B[:, r], C[:, r], D[r], z[:, r], delta_bias[r], delta_softplus=True)
        for r in (0, 1)
    )
    return torch.stack((forward, backward.flip(-1)), 1)
