"""The TTT mixer, which follows the convolution and the first LayerNorm of a Vittt block (Algorithm 1, Eq. 11 and 12).

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension (D = H·d), R directions (1 or 2), C chunk length.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import selected_backend, ttt_linear, ttt_linear_bidir
from kernels.ttt_linear.reference import Arguments, InnerLearning, ttt_linear_dual

from .backbone import convolve_scans, init_linear, pad_for_scans

# Table 3, in the paper's order: every design has all parts of the previous ones, except W_q, which share_qk removes
Design = Literal["ttt_layer", "share_qk", "gating", "conv1d", "dual", "conv2d"]
W0Mode = Literal["per_direction", "shared", "frozen"]
DESIGNS: tuple[Design, ...] = get_args(Design)
W0_MODES: tuple[W0Mode, ...] = get_args(W0Mode)

CONV_KERNEL = 4
ETA_BASE = 1.0


def design_has(design: Design, part: Design) -> bool:
    """Whether a design of the paper's route (Table 3) has the part that the design `part` introduces."""
    return DESIGNS.index(design) >= DESIGNS.index(part)


def ttt_linear_macs(tokens: int, heads: int, head_dim: int, chunk_size: int) -> int:
    """Multiply-adds of the inner learner in one direction.

    Per head and token, K·W, Q·W and the update of the state have d² each; Q·Kᵀ and A·G have n·d each in a chunk of n tokens. The
    last chunk may be shorter. `chunk_size` 0 takes all tokens as one chunk.
    """
    b = chunk_size or tokens
    squares = tokens // b * b * b + (tokens % b) ** 2
    return heads * (3 * tokens * head_dim * head_dim + 2 * squares * head_dim)


def replay_inner_learning(arguments: Arguments) -> InnerLearning:
    """The gradients (B,T,R,H,d) and losses (B,T,R,H) of the inner learners at the start states of their chunks, by the reference."""
    found = []
    for r, reverse in enumerate(arguments.reverse):
        q, k, v = (x[:, :, r] for x in arguments[:3])
        options = {"chunk_size": arguments.chunk_size, "reverse": reverse, "eps": arguments.eps, "return_inner": True}
        found.append(ttt_linear_dual(q, k, v, arguments.lr, *(x[r] for x in arguments[4:9]), **options)[1])
    return InnerLearning(*(torch.stack(parts, 2) for parts in zip(*found, strict=True)))


class TTTMixer(nn.Module):
    """Learns a linear model along the token sequence and reads it out: Linear -> Conv1d -> TTT-Linear -> norm -> gate -> Linear.

    Args:
        dim: width D.
        num_heads: heads H; D must be a multiple of it.
        num_tokens: number of tokens that the model is built for: the length of the learned token scale if `chunk_size` is 0.
        design: which design of the paper's route, Table 3.
        chunk_size: tokens per inner gradient step (the paper's mini-batch b); 0 takes the whole sequence as one chunk.
        w0: initial state: one per direction, one shared by both, or random and frozen (Fig. 7b: W0^2, W0^1, W0^0).
        eps: of the inner and the outer LayerNorms.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_tokens: int,
        *,
        design: Design = "conv2d",
        chunk_size: int = 16,
        w0: W0Mode = "per_direction",
        eps: float = 1e-6,
    ):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.chunk_size, self.eps, self.backend = chunk_size, eps, "auto"
        self.directions = 2 if design_has(design, "dual") else 1
        self.separate_q = not design_has(design, "share_qk")
        self.has_gate = design_has(design, "gating")
        self.has_conv1d = design_has(design, "conv1d")

        R, H, d = self.directions, num_heads, self.head_dim
        # one matrix for all bias-free projections of x, in the order in which `forward` splits them: gate, q, k (or kq), v, each for
        # all directions
        self.split_sizes = [dim] * self.has_gate + [R * dim] * (2 + self.separate_q)
        self.in_proj = nn.Linear(dim, sum(self.split_sizes), bias=False)
        self.lr_proj = nn.Linear(dim, num_heads)  # shared by both directions
        if self.has_conv1d:
            # nn.Conv1d holds and initialises the weights; they are in scan order, first those of the forward scan
            self.conv_k = nn.Conv1d(R * dim, R * dim, CONV_KERNEL, groups=R * dim)
            self.conv_q = nn.Conv1d(R * dim, R * dim, CONV_KERNEL, groups=R * dim)
        state = torch.empty(1 if w0 == "shared" else R, H, d, d)
        if w0 == "frozen":
            self.register_buffer("W0", state)
        else:
            self.W0 = nn.Parameter(state)
        self.b0 = nn.Parameter(torch.empty(R, H, d))
        self.ln_weight = nn.Parameter(torch.empty(R, H, d))
        self.ln_bias = nn.Parameter(torch.empty(R, H, d))
        self.token_scale = nn.Parameter(torch.empty(R, chunk_size or num_tokens))  # delta of c[j] = max(0, 1/(j+1) + delta_j)
        self.post_norm = nn.LayerNorm(dim, eps=eps)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters; convolutions keep PyTorch's default."""
        init_linear(self.in_proj)
        init_linear(self.out_proj)
        nn.init.normal_(self.lr_proj.weight, std=0.02)
        nn.init.zeros_(self.lr_proj.bias)
        nn.init.normal_(self.W0, std=0.02)
        nn.init.zeros_(self.b0)
        nn.init.ones_(self.ln_weight)
        nn.init.zeros_(self.ln_bias)
        nn.init.zeros_(self.token_scale)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalised tokens (B, T, D), T >= 1 -> (B, T, D) in their dtype (under autocast in that of the mode)."""
        gate, arguments = self._project(x_BTD)
        options = {"chunk_size": arguments.chunk_size, "eps": self.eps, "backend": self.backend}
        if self.directions == 1:
            q, k, v = (x[:, :, 0] for x in arguments[:3])
            z = ttt_linear(q, k, v, arguments.lr, *(x[0] for x in arguments[4:9]), **options)
        else:
            both = ttt_linear_bidir(*arguments[:9], **options)
            z = both[:, :, 0] + both[:, :, 1]
        z = self.post_norm(z.flatten(2))
        return self.out_proj(z if gate is None else gate * z)

    def _project(self, x_BTD: Tensor) -> tuple[Tensor | None, Arguments]:
        """The gate (B, T, D) or None, and what the inner learners are given."""
        (B, T, _), (R, H, d) = x_BTD.shape, self.b0.shape
        parts = list(self.in_proj(x_BTD).split(self.split_sizes, dim=-1))
        gate = F.gelu(parts.pop(0), approximate="tanh") if self.has_gate else None
        v, k = parts.pop(), parts.pop()
        q = parts.pop() if self.separate_q else k
        if self.has_conv1d:
            padded = pad_for_scans(k.chunk(R, dim=-1), CONV_KERNEL - 1)
            k, q = (convolve_scans(padded, conv.weight.chunk(R), conv.bias) for conv in (self.conv_k, self.conv_q))
        q, k, v = (t.view(B, T, R, H, d) for t in (q, k, v))
        lr, chunk_size, reverse = self.learning_rate(x_BTD), self.chunk_size or T, (False, True)[:R]
        state = self.scale_per_token(chunk_size), self.W0.expand(R, H, d, d), self.b0, self.ln_weight, self.ln_bias
        return gate, Arguments(q, k, v, lr, *state, chunk_size, reverse, self.eps)

    def selected_backend(self, dtype: torch.dtype) -> str:
        """The implementation of TTT-Linear that runs here for q of `dtype`, at the number of tokens that the layer was built for."""
        wanted = {"head_dim": self.head_dim, "chunk_size": self.token_scale.shape[1], "dtype": dtype}
        return selected_backend(self.backend, self.token_scale.device, **wanted)

    def learning_rate(self, x_BTD: Tensor) -> Tensor:
        """Inner learning rates (B, T, H): eta_base · sigmoid(x_t · w_h + a_h) / d."""
        return torch.sigmoid(self.lr_proj(x_BTD)) * (ETA_BASE / self.head_dim)

    def scale_per_token(self, chunk_size: int) -> Tensor:
        """c (R, chunk_size): max(0, 1/(j+1) + delta_j), with delta_j = 0 beyond the learned length."""
        delta = self.token_scale[:, :chunk_size]
        delta = F.pad(delta, (0, chunk_size - delta.shape[1]))
        index = torch.arange(1, chunk_size + 1, device=delta.device, dtype=delta.dtype)
        return F.relu(1 / index + delta)

    @torch.no_grad()
    def inner_losses(self, x_BTD: Tensor) -> Tensor:
        """ℓ = ½‖LN(kW + b) − (v − k)‖² of each token at the start state of its chunk: fp32 (B, T, R, H), by the reference."""
        x_BTD = x_BTD.float()
        with torch.autocast(x_BTD.device.type, enabled=False):
            return replay_inner_learning(self._project(x_BTD)[1]).loss
