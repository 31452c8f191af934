"""TTT mixer of a Vittt block, after the convolution and the first LayerNorm (Algorithm 1, Eq. 11 and 12).

This is the default interpretation of the paper; `repro.models.read_block` has the alternatives.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension (D = H·d), R directions (1 or 2), C chunk length.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import selected_backend, ttt_linear, ttt_linear_bidir
from kernels.dispatch import compute_dtype, no_autocast
from kernels.ttt_linear.op import one_direction
from kernels.ttt_linear.plain import ttt_linear_plain
from kernels.ttt_linear.reference import Arguments, InnerLearning, ttt_linear_dual

from .as_built import are_as_built, built_conv
from .backbone import call_scans, convolve_scans, pad_for_scans
from .image_model import init_linear
from .reading import Reading

# Table 3, in the paper's order: each design has all parts of the designs before it, except W_q, which share_qk removes
Design = Literal["ttt_layer", "share_qk", "gating", "conv1d", "dual", "conv2d"]
W0Mode = Literal["per_direction", "shared", "frozen"]
# changes of the inner learner from the paper on KV binding: `ascent` steps up the loss, `q_is_k` reads with the keys,
# `plain` removes LayerNorm and bias, and `dot` also makes the dot product the loss
Step = Literal["own", "ascent", "q_is_k", "plain", "dot"]
STEPS: tuple[Step, ...] = get_args(Step)
REDUCIBLE = ("plain", "dot")  # steps that reduce to linear attention, with a parallel form
DESIGNS: tuple[Design, ...] = get_args(Design)
W0_MODES: tuple[W0Mode, ...] = get_args(W0Mode)


def design_has(design: Design, part: Design) -> bool:
    """Return whether a design of the paper's route (Table 3) has the part that the design `part` introduces."""
    return DESIGNS.index(design) >= DESIGNS.index(part)


def name_conv1d(design: Design, reading: Reading) -> tuple[str, ...]:
    """Return the names of a design's Conv1d layers in an interpretation: `conv_k`, `conv_q`, both or none."""
    has_both = design_has(design, "conv1d")
    if not (has_both or (design_has(design, "gating") and reading.conv1d_arrival != "together")):
        return ()
    if reading.conv1d_count == 1:
        return ("conv_k",)
    if has_both:
        return "conv_k", "conv_q"
    return ("conv_k" if reading.conv1d_arrival == "key_with_gate" else "conv_q",)


def ttt_linear_macs(tokens: int, heads: int, head_dim: int, chunk_size: int, step: Step) -> int:
    """Count the multiply-adds of the inner learner in one direction, in the recurrent form.

    Per head and token, K·W, Q·W and the update of the state have d² each; Q·Kᵀ and A·G have n·d each in a chunk of n
    tokens. The last chunk may be shorter. `chunk_size` 0 takes all tokens as one chunk. A reducible step does not
    update the state after the last chunk, and `dot` computes no prediction K·W.
    """
    b = chunk_size or tokens
    saved = ((tokens - 1) % b + 1) * (step in REDUCIBLE) + tokens * (step == "dot")
    squares = tokens // b * b * b + (tokens % b) ** 2
    return heads * ((3 * tokens - saved) * head_dim * head_dim + 2 * squares * head_dim)


def _take_direction(arguments: Arguments, r: int) -> list[Tensor]:
    """Return the nine tensors of `Arguments` for direction `r`, without the axis of directions.

    The inner rates are (B, T, H) if the directions share them, else (B, T, R, H): only a `Reading` has the latter, which
    the operator for two directions does not take.
    """
    rates = arguments.lr if arguments.lr.ndim == 3 else arguments.lr[:, :, r]
    return one_direction(arguments._replace(lr=rates)[:9], r)


def replay_inner_learning(arguments: Arguments) -> InnerLearning:
    """Compute the inner gradients (B,T,R,H,d) and losses (B,T,R,H) by the reference implementation, for probes.

    Both are taken at the state at the start of each token's chunk.
    """
    options = {"chunk_size": arguments.chunk_size, "eps": arguments.eps, "return_inner": True}
    found = [
        ttt_linear_dual(*_take_direction(arguments, r), reverse=flag, **options)[1]
        for r, flag in enumerate(arguments.reverse)
    ]
    return InnerLearning(*(torch.stack(parts, 2) for parts in zip(*found, strict=True)))


class TTTMixer(nn.Module):
    """Token mixer by test-time training: Linear -> Conv1d -> TTT-Linear -> norm -> gate -> Linear.

    Args:
        num_heads: heads H; D must be a multiple of it.
        num_tokens: number of tokens that the model is built for. It is the length of the learned token scale if
            `chunk_size` is 0.
        design: which design of the paper's route, Table 3.
        chunk_size: tokens per inner gradient step (the paper's mini-batch b); 0 takes the whole sequence as one chunk.
        w0: initial state: one per direction, one shared by both, or random and frozen (Fig. 7b: W0^2, W0^1, W0^0).
        eps: eps of the LayerNorms, the inner one included.
        step: the inner learner; see `STEPS`.

    Raises:
        ValueError: a width that is not a multiple of the heads.
    """

    eta_base = 1.0  # the largest inner learning rate, times d
    token_scale: nn.Parameter | None  # None only in a `Reading`

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
        step: Step = "own",
    ):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.chunk_size, self.eps, self.backend, self.step = chunk_size, eps, "auto", step
        self.built_chunk = chunk_size or num_tokens
        self.design = design
        self.directions = 2 if design_has(design, "dual") else 1
        self.separate_q = not design_has(design, "share_qk")
        self.has_gate = design_has(design, "gating")
        self.build(w0)
        self.reset_parameters()
        # unused parameters must be neither trained nor saved; they were drawn first, so that a seed gives all steps the
        # same initial values. They stay as buffers because `_arrange` and `scale_per_token` read them
        if step == "q_is_k" and self.convs.pop("conv_q", None):
            del self.conv_q
        if step in REDUCIBLE:
            for name in ("b0", "ln_weight", "ln_bias"):
                unused = getattr(self, name).detach()
                delattr(self, name)
                self.register_buffer(name, unused, persistent=False)

    def build(self, w0: W0Mode) -> None:
        """Build the layers; their order decides which random numbers of a seed each gets."""
        dim, R = self.dim, self.directions
        # one matrix for all projections of x, in the order in which `_project` splits it: gate, q, k (or kq), v; all
        # but the gate have one part per direction. `fused_block` reads the rows in this order
        self.split_sizes = [dim] * self.has_gate + [R * dim] * (2 + self.separate_q)
        self.in_proj = nn.Linear(dim, sum(self.split_sizes), bias=False)
        self.lr_proj = nn.Linear(dim, self.num_heads)
        self.build_convs(name_conv1d(self.design, Reading()))
        self.build_start(w0, norms=R)
        # delta of c[j] = max(0, 1/(j+1) + delta_j)
        self.token_scale = nn.Parameter(torch.zeros(R, self.built_chunk))
        self.post_norm = nn.LayerNorm(dim, eps=self.eps)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def build_convs(self, names: tuple[str, ...], kernel: int = 4, *, bias: bool = True) -> None:
        """Build the causal Conv1d layers; weights are in scan order, the forward scan's first.

        They pad nothing, since `pad_for_scans` pads each direction on its own side. `convs` describes them to
        `are_as_built`, which decides whether their weights are read in place of a call.
        """
        channels, self.conv1d_kernel = self.directions * self.dim, kernel
        self.convs = dict.fromkeys(names, built_conv(nn.Conv1d, kernel, 0, bias=bias))
        for name in names:
            self.add_module(name, nn.Conv1d(channels, channels, kernel, groups=channels, bias=bias))

    def build_start(self, w0: W0Mode, norms: int) -> None:
        """Build the initial state of the inner learners: W0, and `norms` sets of b0, γ and μ."""
        R, H, d = self.directions, self.num_heads, self.head_dim
        state = torch.empty(1 if w0 == "shared" else R, H, d, d)
        if w0 == "frozen":
            self.register_buffer("W0", state)
        else:
            self.W0 = nn.Parameter(state)
        self.b0 = nn.Parameter(torch.zeros(norms, H, d))
        self.ln_weight = nn.Parameter(torch.ones(norms, H, d))
        self.ln_bias = nn.Parameter(torch.zeros(norms, H, d))

    def reset_parameters(self, w0_std: float = 0.02) -> None:
        """Initialise this module's own parameters; convolutions keep PyTorch's default."""
        for name in ("in_proj", "out_proj", "gate_proj"):
            if (linear := getattr(self, name, None)) is not None:
                init_linear(linear)
        nn.init.normal_(self.lr_proj.weight, std=0.02)
        nn.init.zeros_(self.lr_proj.bias)
        nn.init.normal_(self.W0, std=w0_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map normalised tokens (B, T, D), T >= 1, to (B, T, D), in their dtype or autocast's."""
        gate, arguments = self._project(x_BTD)
        return self.out_proj(self._merge(self._read(arguments).flatten(3), gate))

    def _read(self, arguments: Arguments) -> Tensor:
        """Return the outputs of the inner learners plus the queries, (B, T, R, H, d)."""
        if self.step in REDUCIBLE:
            return self._learn_plainly(arguments) + arguments.q
        return self._learn(arguments)

    def _learn(self, arguments: Arguments) -> Tensor:
        """Run TTT-Linear, which adds the queries itself: (B, T, R, H, d)."""
        self._refuse_parallel()
        options = {"chunk_size": arguments.chunk_size, "eps": self.eps, "backend": self.backend}
        if self.directions == 2 and arguments.lr.ndim == 3:
            return ttt_linear_bidir(*arguments[:9], **options)
        outs = [
            ttt_linear(*_take_direction(arguments, r), reverse=flag, **options)
            for r, flag in enumerate(arguments.reverse)
        ]
        return torch.stack(outs, 2)

    def _learn_plainly(self, arguments: Arguments) -> Tensor:
        """Run the inner learners without LayerNorm and bias, (B, T, R, H, d); `_read` adds the queries.

        c[j] is the scale of the j-th token of a chunk and η a token's learning rate. Sums go over the tokens s <= t of
        the chunk. A chunk starts from W and b, and its last state is the start of the next chunk:

            own    ℓ_s = ½‖LN(k_s W + b) − (v_s − k_s)‖²   G_s = ∂ℓ_s/∂(k_s W + b)   f_t = q_t + LN(q_t W_t + b_t)
            plain  ℓ_s = ½‖k_s W − (v_s − k_s)‖²           G_s = k_s W − (v_s − k_s)  f_t = q_t + q_t W_t
            dot    ℓ_s = −⟨k_s W, v_s − k_s⟩               G_s = −(v_s − k_s)         f_t = q_t + q_t W_t

            W_t = W − c[j] Σ_s η_s k_sᵀ G_s                b_t = b − c[j] Σ_s η_s G_s

        `plain` and `dot` have no b and no LN. All else is equal, also the initial values that a seed gives.
        """
        v = arguments.v
        arguments = arguments._replace(v=v.to(compute_dtype(v.dtype)) - arguments.k)  # v is the target there
        options = {
            "loss": "mse" if self.step == "plain" else "dot",
            "chunk_size": arguments.chunk_size,
            "form": self.selected_backend(v.dtype),
        }
        with no_autocast(v.device.type):
            outs = [
                # q, k, v, lr, token_scale and W0
                ttt_linear_plain(*_take_direction(arguments, r)[:6], reverse=flag, **options)
                for r, flag in enumerate(arguments.reverse)
            ]
        return torch.stack(outs, 2)

    def _merge(self, z_BTRD: Tensor, gate: Tensor | None) -> Tensor:
        """Sum the directions (B, T, R, D) to (B, T, D), normalise, and multiply by the gate (B, T, D) if there is one."""
        z = self.post_norm(z_BTRD.sum(2))
        return z if gate is None else gate * z

    def _project(self, x_BTD: Tensor) -> tuple[Tensor | None, Arguments]:
        """Return the gate (B, T, D) or None, and the arguments of the inner learners."""
        parts = list(self.in_proj(x_BTD).split(self.split_sizes, dim=-1))
        v, k = parts.pop(), parts.pop()
        q = parts.pop() if self.separate_q else k
        q, k = self._convolve(q, k)
        return self._find_gate(parts, x_BTD, q, k), self._arrange(x_BTD, q, k, v)

    def _convolve(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the causal Conv1d layers that exist to queries and keys (B, T, R·D); both read `k`.

        A design with Conv1d has one projection for queries and keys, so `q` is then `k`. Layers that are as built run as
        one convolution of both directions; others, say with a hook, are called.
        """
        if not self.convs:
            return q, k
        parts, count = k.chunk(self.directions, dim=-1), self.conv1d_kernel - 1
        layers = {name: getattr(self, name) for name in self.convs}
        if are_as_built(self, self.convs):
            padded = pad_for_scans(parts, count)
            found = {
                name: convolve_scans(padded, conv.weight.chunk(self.directions), conv.bias)
                for name, conv in layers.items()
            }
        else:
            found = {name: call_scans((conv,), parts, count) for name, conv in layers.items()}
        return found.get("conv_q", q), found.get("conv_k", k)

    def _find_gate(self, parts: list[Tensor], x_BTD: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the gate (B, T, D), or None for a design without one.

        `parts` is what is left of the projection of x: the gate before its activation, or nothing. The other arguments
        are for `ReadMixer`, where the gate may come from them.
        """
        return F.gelu(parts[0], approximate="tanh") if parts else None

    def _arrange(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Arguments:
        """Collect the inner learners' arguments from q, k and v, (B, T, R·D) or (B, T, R, H, d).

        Each direction has its own W0, b0, γ and μ by default; `expand` repeats those that a reading shares.
        """
        (B, T, _), (R, H, d) = x_BTD.shape, (self.directions, self.num_heads, self.head_dim)
        q, k, v = (t.view(B, T, R, H, d) for t in (q, k, v))
        if self.step == "q_is_k":
            q = k
        chunk_size = self.chunk_size or T
        inner = (x.expand(R, H, d) for x in (self.b0, self.ln_weight, self.ln_bias))
        state = self.scale_per_token(chunk_size), self.W0.expand(R, H, d, d), *inner
        return Arguments(q, k, v, self.learning_rate(x_BTD), *state, chunk_size, (False, True)[:R], self.eps)

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the backend of TTT-Linear that runs here for q of `dtype`, at the built number of tokens.

        For the steps `plain` and `dot` it is `recurrent` or `parallel`, the form that then runs; `auto` means parallel on
        a GPU. `set_backend` finds a layer by the name of this method.

        Raises:
            ValueError: `parallel` for another step, or a backend that does not run here.
        """
        if self.step in REDUCIBLE:
            on_gpu = self.b0.is_cuda
            return "parallel" if self.backend == "parallel" or (self.backend == "auto" and on_gpu) else "recurrent"
        self._refuse_parallel()
        return selected_backend(
            self.backend, self.b0.device, head_dim=self.head_dim, chunk_size=self.built_chunk, dtype=dtype
        )

    def _refuse_parallel(self) -> None:
        """Raise a ValueError for the backend `parallel`, which only the steps of `REDUCIBLE` have."""
        if self.backend == "parallel":
            raise ValueError(
                "backend parallel: the LayerNorm of the inner learner stands between a step and the state; use step plain or dot"
            )

    def learning_rate(self, x_BTD: Tensor) -> Tensor:
        """Compute the inner learning rates (B, T, H), sigmoid(x_t · w_h + a_h) / d; the step `ascent` negates them.

        `fused_block` does not call it: there the factor `eta_base` / d is part of the token scale.
        """
        rates = torch.sigmoid(self.lr_proj(x_BTD)) * (self.eta_base / self.head_dim)
        return -rates if self.step == "ascent" else rates

    def scale_per_token(self, chunk_size: int) -> Tensor:
        """Compute c (R, chunk_size): max(0, start_j + delta_j), with delta_j = 0 beyond the learned length.

        `start` is 1/(j+1), see `_start_scale`. Without a learned delta, as a `Reading` may have it, c is `start`.
        """
        places = torch.arange(1, chunk_size + 1, device=self.b0.device, dtype=self.b0.dtype)
        start = self._start_scale(places).expand(self.directions, -1)
        delta = self.token_scale
        if delta is None:
            return start
        # chunk_size 0 makes the whole sequence a chunk, whose length changes with the image
        if delta.shape[1] != chunk_size:
            delta = F.pad(delta[:, :chunk_size], (0, max(0, chunk_size - delta.shape[1])))
        return F.relu(start + delta)

    def _start_scale(self, places: Tensor) -> Tensor:
        """Return the scale before training of the tokens at these places in a chunk, counted from 1: (chunk_size,)."""
        return 1 / places
