"""Cases of TTT-Linear. Shape letters: B samples, T tokens, R directions, H heads, D head width."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ttt_linear import op, triton_bwd, triton_fwd, triton_phases, ttt_linear, ttt_linear_bidir
from ..ttt_linear.op import one_direction
from . import cases, peers
from .cases import BOTH_DIRECTIONS, IMAGE_TOKENS, Random, long, ragged, special

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """Sizes of a case: B samples, T tokens, H heads of width D, a direction for each flag of `reverse`.

    `alike` has tokens that differ little and a small W0, as in an untrained model: there a mean of Z would grow from
    chunk to chunk.
    """

    heads: int
    head_dim: int = 64
    chunk_size: int = 16
    reverse: tuple[bool, ...] = BOTH_DIRECTIONS
    alike: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "reverse": list(self.reverse), "eps": EPS}


def small(tokens: int, heads: int, **sizes: Any) -> Sizes:
    """Return the sizes of a check, with more samples where there are few tokens.

    At one token the gradient of lr is one number per sample and head, which can cancel between the directions.
    """
    return Sizes(**{"batch": max(1, 4 // tokens), "tokens": tokens, "heads": heads} | sizes)


def find_limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return the largest relative error in `dtype`, to which the operands of products are rounded.

    The gradients of lr and token_scale sum over whole rows.
    """
    over_rows = name in ("lr", "token_scale")
    if dtype == torch.float32:
        return 1e-3 if over_rows and sizes.tokens < 15 else 1e-5
    return {torch.float16: 2e-2 if over_rows else 5e-3, torch.bfloat16: 5e-2 if over_rows else 2e-2}[dtype]


def make(sizes: Sizes, random: Random) -> list[Tensor]:
    """Draw the inputs and dout; token_scale is near 1/t for the t-th token of a chunk, as models start with."""
    normal, (T, R, H, D) = random.normal, (sizes.tokens, len(sizes.reverse), sizes.heads, sizes.head_dim)
    q, k, v, dout = (normal(sizes.batch, T, R, H, D) for _ in range(4))
    if sizes.alike:
        q, k, v = (0.3 * normal(R, H, D) + 0.05 * x for x in (q, k, v))
    lr = torch.sigmoid(normal(sizes.batch, T, H)) / D
    token_scale = normal(R, sizes.chunk_size, scale=0.05)
    token_scale += 1 / torch.arange(1, sizes.chunk_size + 1).to(token_scale)
    W0 = normal(R, H, D, D, scale=0.02 if sizes.alike else 0.05)
    b0 = normal(R, H, D, scale=0.1)
    ln_bias = normal(R, H, D, scale=0.1)
    ln_weight = normal(R, H, D, scale=0.1, mean=1.0)
    return [q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, dout]


def lay_out(sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, lr: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Return the inputs in a layer's layout.

    lr is in bf16; v is a slice of wider rows, since the layer's gate, kq and v are one projection.
    """
    return [q, k, torch.cat([v.new_zeros(*v.shape[:2], 3, *v.shape[3:]), v], 2)[:, :, 3:], lr.bfloat16(), *parameters]


def bind(sizes: Sizes) -> Callable[..., Tensor]:
    """Return the public operator for both directions; for others, calls of the one for a single direction."""
    how = {"chunk_size": sizes.chunk_size, "eps": EPS}
    if sizes.reverse == BOTH_DIRECTIONS:
        return functools.partial(ttt_linear_bidir, **how)

    def run(*inputs: Tensor, backend: str) -> Tensor:
        directions = enumerate(sizes.reverse)
        outs = [ttt_linear(*one_direction(inputs, r), reverse=flag, backend=backend, **how) for r, flag in directions]
        return torch.stack(outs, 2)

    return run


def list_configs(dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Return the configs of the forward and of the backward pass, each of which `check` compares with the reference.

    They are those for chunks of 16 tokens: first of one launch, then pairs for two launches, in which each candidate
    stands once. The two phases have equally many candidates, and so have the two passes; `map` would drop others.
    """
    fwd, bwd, sizes = triton_phases, triton_bwd, (dtype, 16)
    phases = map(fwd.TwoPhases, fwd.state_configs(*sizes), fwd.output_configs(*sizes))
    passes = map(bwd.TwoPasses, bwd.replay_configs(*sizes), bwd.back_configs(*sizes))
    return [*triton_fwd.configs(*sizes), *phases], [*bwd.configs(*sizes), *passes]


def prepare_fla(name: str, sizes: Sizes, inputs: list[Tensor]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return flash-linear-attention's operator and its inputs, which need two directions.

    Call it anew for each shape, since fla is then tuned again.
    """
    kind = name.removeprefix("fla ")
    return functools.partial(peers.both_directions(kind), chunk_size=sizes.chunk_size), inputs


def run_fla(kind: str, own: cases.Cases, sizes: Sizes, device: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the results of flash-linear-attention and of the kernels, with lr constant within a chunk."""
    q, k, v, lr, *shared, dout = own.draw(0, sizes, device)
    dout = dout / 2**8  # the peer's gradient of its rates is fp16, and would overflow
    q, k, v, dout = (x[:, :, 0].half() for x in (q, k, v, dout))
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


CASES = cases.Cases(
    NAME="ttt_linear",
    op=op,
    CPU_BACKENDS=("numba", "torch"),
    ACTIVATIONS=("q", "k", "v"),
    OPTIONS=("head_dim", "chunk_size"),
    make=make,
    bind=bind,
    limit=find_limit,
    configs=list_configs,
    lay_out=lay_out,
    SMALL=Sizes(batch=2, tokens=6, heads=1, head_dim=16, chunk_size=4),
    TYPICAL=small(197, 3),
    CASES=[
        *ragged(*(small(tokens, heads) for tokens in (1, 2, 15, 16, 17, 63, 81, 196, 197) for heads in (1, 3))),
        *special("chunk size", *(small(81, 1, chunk_size=chunk_size) for chunk_size in triton_fwd.CHUNK_SIZES)),
        *special("tokens that are alike", small(324, 1, chunk_size=4, alike=True)),
        *special("head width", *(small(81, 1, head_dim=width) for width in triton_fwd.WIDTHS)),
        # more than fill any device: one phase forward, one launch backward
        *special("many programs", *(small(T, 3, batch=128) for T in (1, 17, 197)), on_gpu_alone=True),
        *special("many programs", small(81, 3, batch=128, chunk_size=32), on_gpu_alone=True),
        *long(*(small(tokens, 3) for tokens in (4200, 6400))),  # 1120 × 960 and 1280 × 1280 pixels
    ],
    # heads of Vittt-T, S, B
    SHAPES=[Sizes(tokens=tokens, heads=heads) for heads in (3, 6, 12) for tokens in IMAGE_TOKENS],
    COMPARED=Sizes(tokens=6400, heads=3),
    PEERS=cases.Peers(
        package=peers.PACKAGE,
        distribution="fla-core",  # the package that holds its kernels
        names=tuple(f"fla {kind}" for kind in peers.PEER_KINDS),
        prepare=prepare_fla,
        checks={
            f"flash-linear-attention's {kind}_ttt_linear": (
                Sizes(batch=2, tokens=250, heads=3, reverse=(False,)),
                functools.partial(run_fla, kind),
            )
            for kind in peers.PEER_KINDS
        },
        missing="flash-linear-attention is not installed (the extra `bench`)",
    ),
)
