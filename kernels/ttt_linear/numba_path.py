"""TTT-Linear on CPUs: inference by the loop of `cpu_learner`; what autograd has to know, by the operations of
`torch_path`.

Shape letters as in `reference`.
"""

import numpy as np
import torch
from torch import Tensor

from .. import threads
from ..cpu_learner import learn
from ..dispatch import compute_dtype
from . import torch_path
from .reference import Arguments
from .torch_path import backward as backward
from .torch_path import states_shape as states_shape


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """out (B,T,R,H,D) in q's dtype; states in the compute dtype, of shape `states_shape`."""
    if keep_states or x.q.shape[-1] % 4:
        return torch_path.forward(x, keep_states)
    dtype, (B, _, R, H, D) = compute_dtype(x.q.dtype), x.q.shape
    q, k, v, lr, scale, W, b, gamma, mu = (each.to(dtype).contiguous() for each in x[:9])
    state = torch.cat([W, b.unsqueeze(-2)], -2)
    state = (state - state.mean(-1, keepdim=True)).contiguous()
    out, back = torch.empty_like(q), np.array(x.reverse, np.int64)
    threads.run(
        learn, B * R * H, (False,) * D, q, k, v, lr, scale, state, gamma, mu, out, back, q.numpy().dtype.type(x.eps)
    )
    return out.to(x.q.dtype), q.new_empty(states_shape(q.shape, x.chunk_size, False))
