"""Arguments of the selective scan, and its recurrence token by token, against which every backend is tested.

Plain PyTorch operations, differentiable by autograd, in fp64 for fp64 inputs and in fp32 otherwise.

Shape letters: B images, T tokens, K sequences of the tokens, R routes, E channels, N states of a channel; the tensors
B, C and D are those of the equations. A route is one scan: over one of the sequences, in one direction, with parameters
of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype


class Arguments(NamedTuple):
    """Arguments of every backend, for R routes.

    u: (B,T,K,E), where K divides R: route r scans the sequence u[:, :, r mod K]. delta: (B,T,R,E), u's dtype. A:
    (R,E,N). B, C: (B,T,R,N). D, delta_bias: (R,E). z: (B,T,E), shared by the routes, or None. reverse: R flags; a route
    with True is scanned from the last token. full_precision: whether the output is left in the compute dtype.

    Backends take the tensors by their places, and return the gradients in this order.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    z: Tensor | None
    delta_bias: Tensor
    reverse: Sequence[bool]
    full_precision: bool

    @property
    def out_dtype(self) -> torch.dtype:
        """Return the dtype of the output (B,T,R,E). `CustomOp` asks for it by this name, else it takes u's dtype."""
        return compute_dtype(self.u.dtype) if self.full_precision else self.u.dtype


def selective_scan_recurrence(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    *,
    reverse: bool = False,
    full_precision: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the recurrence of the selective scan in one direction, from h = 0.

        h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t u_t        y_t = Σ_n C_t h_t + D u_t        out_t = y_t SiLU(z_t)

    Args:
        u, delta: (B,T,E), any floating dtype; Δ = softplus(delta + delta_bias).
        A: (E,N). B, C: (B,T,N). D, delta_bias: (E,).
        z: (B,T,E), or None for no gate.
        reverse: scan from the last token to the first.
        full_precision: leave the output in the compute dtype.
        return_last_state: also return h after the last token of the scan.

    Returns:
        (B,T,E) in u's dtype or the compute dtype; with `return_last_state`, a pair with (B,E,N) in the compute dtype.
    """
    dtype = compute_dtype(u.dtype)
    tokens = range(u.shape[1])
    step = F.softplus(delta.to(dtype) + delta_bias.to(dtype))
    rates, skip = A.to(dtype), D.to(dtype)
    h = torch.zeros(u.shape[0], *A.shape, dtype=dtype, device=u.device)
    outs = []
    for t in reversed(tokens) if reverse else tokens:
        u_t, step_t, B_t, C_t = u[:, t].to(dtype), step[:, t], B[:, t].to(dtype), C[:, t].to(dtype)
        h = torch.exp(step_t[..., None] * rates) * h + (step_t * u_t)[..., None] * B_t[:, None]
        outs.append((h * C_t[:, None]).sum(-1) + skip * u_t)
    y = torch.stack(outs[::-1] if reverse else outs, 1)
    out = (y if z is None else y * F.silu(z.to(dtype))).to(dtype if full_precision else u.dtype)
    return (out, h) if return_last_state else out
