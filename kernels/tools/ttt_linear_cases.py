"""The cases of TTT-Linear. Shape letters: B samples, T tokens, R directions, H heads, D head width.

flash-linear-attention (the extra `bench`) has one direction and no LayerNorm residual on q. For timing it gets its
cheapest equivalent: one call with the two directions as further heads, without the flips that it would need, and tuned
again for each shape (see `peers`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..ttt_linear import op, triton_bwd, triton_fwd, triton_phases, ttt_linear, ttt_linear_bidir
from ..ttt_linear.op import one_direction
from ..ttt_linear.triton_bwd import back_configs, backward_kernel, replay_configs
from ..ttt_linear.triton_phases import ROWS, output_configs, output_kernel, state_configs, state_kernel
from . import cases, peers
from .cases import BOTH, DTYPES, TOKENS, Check, normal_drawer
from .check import compare_peer

LENGTHS = (1, 2, 15, 16, 17, 63, 81, 196, 197)
EPS = 1e-6
WIDTHS = (3, 6, 12)  # heads of Vittt-T, S, B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """One shape: B samples, T tokens, H heads of width D, a direction for each flag of `reverse`.

    `alike` has tokens that differ little and a small W0, as in an untrained model. A mean of Z would grow by chunk.
    """

    heads: int
    head_dim: int = 64
    chunk_size: int = 16
    reverse: tuple[bool, ...] = BOTH
    alike: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "reverse": list(self.reverse), "eps": EPS}

    def tensor_bytes(self) -> tuple[int, int]:
        """q, k, v and lr; out. States, parameters and their gradients are left out: under 3 % of it at T >= 784."""
        rows = self.batch * self.tokens * len(self.reverse) * self.heads * self.head_dim * 2
        return 3 * rows + 2 * self.batch * self.tokens * self.heads, rows

    def flop_of(self, passes: str) -> int:
        shape = (self.batch, self.tokens, len(self.reverse), self.heads, self.head_dim)
        return getattr(op, f"{passes}_flops")(shape, self.chunk_size)


def small(tokens: int, heads: int, **sizes: Any) -> Sizes:
    """Sizes of a check, with more samples where there are few tokens.

    At one token the gradient of lr is one number per sample and head, which can cancel between the directions.
    """
    return Sizes(batch=max(1, 4 // tokens), tokens=tokens, heads=heads, **sizes)


class TTTLinearCases(cases.Cases):
    def limit(self, name: str, dtype: torch.dtype, sizes: Sizes) -> float:
        """Products' operands are rounded to `dtype`; the gradients of lr and token_scale sum over whole rows."""
        over_rows = name in ("lr", "token_scale")
        if dtype == torch.float32:
            return 1e-3 if over_rows and sizes.tokens < 15 else 1e-5
        return {torch.float16: 2e-2 if over_rows else 5e-3, torch.bfloat16: 5e-2 if over_rows else 2e-2}[dtype]

    def draw(self, seed: int, sizes: Sizes, device: Any = "cpu") -> list[Tensor]:
        """fp64: q, k, v and dout have values of bf16, the others values of fp32."""
        normal = normal_drawer(seed, dtype=torch.float64)
        B, T, R, H, D = sizes.batch, sizes.tokens, len(sizes.reverse), sizes.heads, sizes.head_dim
        q, k, v, dout = (normal(B, T, R, H, D) for _ in range(4))
        if sizes.alike:
            q, k, v = (0.3 * normal(R, H, D) + 0.05 * x for x in (q, k, v))
        q, k, v, dout = (x.bfloat16().double() for x in (q, k, v, dout))
        lr = torch.sigmoid(normal(B, T, H)) / D
        token_scale = 1 / torch.arange(1, sizes.chunk_size + 1).double() + normal(R, sizes.chunk_size, scale=0.05)
        W0 = normal(R, H, D, D, scale=0.02 if sizes.alike else 0.05)
        b0 = normal(R, H, D, scale=0.1)
        ln_bias = normal(R, H, D, scale=0.1)
        ln_weight = normal(R, H, D, scale=0.1, mean=1.0)
        rest = (x.float().double() for x in (lr, token_scale, W0, b0, ln_weight, ln_bias))
        return [x.to(device) for x in (q, k, v, *rest, dout)]

    def bind(self, sizes: Sizes) -> Callable[..., Tensor]:
        how = {"chunk_size": sizes.chunk_size, "eps": EPS}
        if sizes.reverse == BOTH:
            return functools.partial(ttt_linear_bidir, **how)

        def run(*inputs: Tensor, backend: str) -> Tensor:
            directions = enumerate(sizes.reverse)
            outs = [
                ttt_linear(*one_direction(inputs, r), reverse=flag, backend=backend, **how) for r, flag in directions
            ]
            return torch.stack(outs, 2)

        return run

    def ragged(self, interpreted: bool) -> list[Sizes]:
        return [small(tokens, heads) for tokens in LENGTHS for heads in (1, 3)]

    def variants(self) -> Iterator[tuple[str, Sizes]]:
        yield from (("chunk size", small(81, 1, chunk_size=chunk_size)) for chunk_size in triton_fwd.CHUNK_SIZES)
        yield "tokens that are alike", small(324, 1, chunk_size=4, alike=True)
        yield from (("head width", small(81, 1, head_dim=width)) for width in triton_fwd.WIDTHS)
        if torch.cuda.is_available():  # more than fill any device: one phase forward, one launch backward
            yield from (("many programs", dataclasses.replace(small(tokens, 3), batch=128)) for tokens in (1, 17, 197))
            yield "many programs", dataclasses.replace(small(81, 3, chunk_size=32), batch=128)

    def shapes(self) -> list[Sizes]:
        return [Sizes(tokens=tokens, heads=heads) for heads in WIDTHS for tokens in TOKENS]

    def layer_inputs(self, sizes: Sizes, device: torch.device) -> list[Tensor]:
        """q, k, v and lr in bf16, v a slice of wider rows; parameters in fp32."""
        normal = normal_drawer(0, device)
        B, T, H, D, C = sizes.batch, sizes.tokens, sizes.heads, sizes.head_dim, sizes.chunk_size
        q, k = (normal(B, T, 2, H, D).bfloat16() for _ in range(2))
        v = normal(B, T, 5, H, D).bfloat16()[:, :, 3:]  # the layer's gate, kq and v are one projection
        lr = (torch.sigmoid(normal(B, T, H)) / D).bfloat16()
        scale = (1 / torch.arange(1, C + 1, device=device)).repeat(2, 1)
        W0, b0 = normal(2, H, D, D, scale=0.02), torch.zeros(2, H, D, device=device)
        return [q, k, v, lr, scale, W0, b0, torch.ones_like(b0), torch.zeros_like(b0)]

    def compile_time(self, dtype: torch.dtype, chunk_size: int = 16, width: int = 64) -> cases.CompileTime:
        return {"chunk_size": chunk_size}, triton_fwd.constants(width, chunk_size), (dtype, chunk_size, width)

    def kernels(self, arguments: Any, dout: Tensor, config: Any = None, backward_config: Any = None) -> list[Tensor]:
        """In one phase or two, as `config` is."""
        out, states = triton_phases.forward(arguments, True, config)
        return [out, *triton_bwd.backward(dout, states, arguments, backward_config)]

    def configs(self, dtype: torch.dtype) -> tuple[list[triton.Config], list[Any]]:
        """Both passes also have pairs of configs, for their two launches."""
        forward, backward = super().configs(dtype)
        sizes = self.compile_time(dtype)[2]
        phases = zip(state_configs(*sizes), output_configs(*sizes), strict=True)
        forward = [*forward, *(triton_phases.TwoPhases(*pair) for pair in phases)]
        pairs = zip(replay_configs(*sizes), back_configs(*sizes), strict=True)
        return forward, [*backward, *(triton_bwd.TwoPasses(*pair) for pair in pairs)]

    def prepare(self, name: str, sizes: Sizes, device: torch.device) -> tuple[Callable[..., Tensor], list[Tensor]]:
        function, inputs = super().prepare(name, sizes, device)
        if name in self.PEERS:
            kind = name.removeprefix("fla ")
            function = functools.partial(peers.both_directions(kind), chunk_size=sizes.chunk_size)
        return function, inputs

    def peer_checks(self, device: Any) -> Iterator[Check]:
        sizes = Sizes(batch=2, tokens=250, heads=3, reverse=(False,))
        for kind in peers.KINDS:
            name = f"flash-linear-attention's {kind}_ttt_linear"
            yield name, compare_peer, (self, name, sizes, functools.partial(self.run_peer, kind, device)), {}

    def run_peer(self, kind: str, device: Any, sizes: Sizes) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The results of flash-linear-attention and of the kernels where they agree, lr constant within a chunk."""
        q, k, v, lr, *shared, dout = self.draw(0, sizes, device)
        dout = dout / 2**8  # the peer's gradient of its rates is fp16, and would overflow
        q, k, v, dout = (x[:, :, 0].to(DTYPES["fp16"]) for x in (q, k, v, dout))
        leaves = [x.requires_grad_() for x in (q, k, v, lr[:, ::16].float(), *(x[0].float() for x in shared))]
        results = []
        for function in (
            functools.partial(peers.out, kind, chunk_size=16),
            functools.partial(ttt_linear, backend="triton"),
        ):
            per_token = leaves[3].repeat_interleave(16, 1)[:, : sizes.tokens]
            out = function(*leaves[:3], per_token, *leaves[4:])
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
        # the peer keeps normalised keys, residuals, their means and the states in q's dtype
        return tuple(results)


CASES = TTTLinearCases(
    NAME="ttt_linear",
    op=op,
    triton_fwd=triton_fwd,
    triton_bwd=triton_bwd,
    CPU_BACKENDS=("numba", "torch"),
    INPUTS=("q", "k", "v", "lr", "token_scale", "W0", "b0", "ln_weight", "ln_bias"),
    ACTIVATIONS=("q", "k", "v"),
    SMALL=Sizes(batch=2, tokens=6, heads=1, head_dim=16, chunk_size=4),
    TYPICAL=small(197, 3),
    LONG=tuple(small(tokens, 3) for tokens in (4200, 6400)),  # 1120 × 960 and 1280 × 1280 pixels
    OPTIONS=("head_dim", "chunk_size"),
    COMPARED=Sizes(tokens=6400, heads=3),
    GOALS={
        "forward_speedup_over_fla": ("forward, against the faster of flash-linear-attention's two", 2, " ×"),
        "forward_backward_speedup_over_fla": ("forward and backward, against the faster of the two", 2, " ×"),
        "forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 40, " %"),
    },
    AT="B 64, T 6400, 3 heads, both directions, bf16",
    PEERS=tuple(f"fla {kind}" for kind in peers.KINDS),
    PEER=peers.PACKAGE,
    PEER_MISSING="flash-linear-attention is not installed (the extra `bench`)",
    DISTRIBUTIONS={"fla_core": "fla-core"},  # the package that holds its kernels
    KERNELS={
        "ttt_linear_forward": (triton_fwd.configs, triton_fwd.forward_kernel, {"KEEP": False}),
        "ttt_linear_forward_keeping_states": (triton_fwd.configs, triton_fwd.forward_kernel, {"KEEP": True}),
        "ttt_linear_forward_state": (state_configs, state_kernel, {"ROWS": ROWS, "KEEP": False}),
        "ttt_linear_forward_state_keeping_states": (state_configs, state_kernel, {"ROWS": ROWS, "KEEP": True}),
        "ttt_linear_forward_output": (output_configs, output_kernel, {"ROWS": ROWS}),
        "ttt_linear_backward_replay": (replay_configs, backward_kernel, {"PASS": triton_bwd.REPLAY.value}),
        "ttt_linear_backward_back": (back_configs, backward_kernel, {"PASS": triton_bwd.BACK.value}),
        "ttt_linear_backward": (triton_bwd.configs, backward_kernel, {"PASS": triton_bwd.BOTH.value}),
    },
    OPERANDS=("q", "k", "v", "out", "dout", "dq", "dk", "dv", "G", "S", "tiles", "squares"),
    TYPES={"eps": "fp32"},
    COMPILED=tuple({"chunk_size": chunk_size} for chunk_size in triton_fwd.CHUNK_SIZES),
)
