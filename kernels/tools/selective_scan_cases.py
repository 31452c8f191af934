"""Cases of the selective scan: Vim's two routes of 16 states, MambaVision's one of 8, VMamba's four of one.

Shape letters: B samples, T tokens, K sequences, R routes, E channels, N states of a channel.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..selective_scan import op, selective_scan_bidir, selective_scan_routes, triton_fwd
from . import cases, peers
from .cases import BOTH_DIRECTIONS, IMAGE_TOKENS, ROUNDING, Random, long, ragged, special

ACTIVATIONS = ("u", "delta", "B", "C", "z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """Sizes of a case: B samples, T tokens, E channels of N states, a route for each flag of `reverse`.

    The routes scan `sequences`, or one each where that is 0; `gate`: with z; `full_precision` is the operator's.
    """

    channels: int
    state_dim: int = 16
    reverse: tuple[bool, ...] = BOTH_DIRECTIONS
    sequences: int = 0
    gate: bool = True
    full_precision: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"reverse": list(self.reverse), "full_precision": self.full_precision}


VMAMBA = dict(state_dim=1, reverse=(False, False, True, True), sequences=2, gate=False, full_precision=True)
MAMBAVISION = dict(state_dim=8, reverse=(False,), gate=False)


def find_limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return the kernels' own error in sums over T, plus the rounding of results that are in `dtype`."""
    rounded = name in ACTIVATIONS or (name == "out" and not sizes.full_precision)
    return (1e-4 if sizes.tokens > 1000 else 1e-5) + (ROUNDING[dtype] if rounded else 0.0)


def make(sizes: Sizes, random: Random) -> list[Tensor | None]:
    """Draw the inputs and dout, with step sizes from 1e-3 to 5 and rates down to −20."""
    normal, (images, T, E, N) = random.normal, (sizes.batch, sizes.tokens, sizes.channels, sizes.state_dim)
    R = len(sizes.reverse)
    u = normal(images, T, sizes.sequences or R, E)
    delta, dout = (normal(images, T, R, E) for _ in range(2))
    B, C = (normal(images, T, R, N) for _ in range(2))
    A, D, bias = -torch.exp(normal(R, E, N)), normal(R, E), normal(R, E, scale=2.0, mean=-2.0)
    z = normal(images, T, E) if sizes.gate else None
    return [u, delta, A, B, C, D, z, bias, dout]


def lay_out(
    sizes: Sizes, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, bias: Tensor
) -> list[Tensor | None]:
    """Return the inputs in a layer's layout.

    delta, B and C have the route first in memory, as slices of batched products; z is a slice of a wider projection.
    """
    # delta comes from a projection of rank E / 32, which is Vim's width / 16
    N, low_rank = sizes.state_dim, delta[..., : sizes.channels // 32]
    delta, parts = (x.movedim(2, 0).contiguous().movedim(0, 2) for x in (delta, torch.cat([low_rank, B, C], -1)))
    z = None if z is None else torch.cat([z, z], -1)[..., sizes.channels :]
    return [u, delta, A, parts[..., -2 * N : -N], parts[..., -N:], D, z, bias]


def bind(sizes: Sizes) -> Callable[..., Tensor]:
    """Return the public operator of the backbones with two routes or more, with its options; MambaVision calls another."""
    if sizes.reverse == BOTH_DIRECTIONS and not sizes.sequences:
        return functools.partial(selective_scan_bidir, full_precision=sizes.full_precision)
    return functools.partial(selective_scan_routes, **sizes.options)


def run_mamba(own: cases.Cases, sizes: Sizes, device: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the results of mamba-ssm and of the kernels, in fp16 with parameters in fp32."""
    *leaves, dout = own.cast(own.draw(0, sizes, device), torch.float16)
    kept = own.kernels(own.arguments(leaves, sizes), dout)
    leaves = [x.requires_grad_() for x in leaves]
    out = peers.mamba_ssm(*peers.in_layout_of_mamba(leaves)).movedim(-1, 1)
    # mamba-ssm rounds its outputs before it computes the gate's gradient
    return (out, *torch.autograd.grad(out, leaves, dout)), kept


def list_sizes(*lengths: int, **more: Any) -> list[Sizes]:
    """Return sizes of two images of 40 channels for each number of tokens; `more` has what differs from that."""
    return [Sizes(**{"batch": 2, "tokens": tokens, "channels": 40} | more) for tokens in lengths]


one = functools.partial(list_sizes, batch=1)
# tokens of ragged rows: SHORT also run under the interpreter, OTHERS and all of VMamba's on a GPU alone
SHORT, OTHERS = (1, 2, 5), (3, 63, 64, 65, 196, 197, 784)
TYPICAL = Sizes(batch=2, tokens=197, channels=48)
CASES = cases.Cases(
    NAME="selective_scan",
    op=op,
    CPU_BACKENDS=("numba", "torch"),
    ACTIVATIONS=ACTIVATIONS,
    OPTIONS=("state_dim",),
    FLOOR=1.0,  # at one token the gradient of A is zero
    make=make,
    bind=bind,
    limit=find_limit,
    configs=lambda dtype: (triton_fwd.configs(),) * 2,
    lay_out=lay_out,
    SMALL=Sizes(batch=2, tokens=4, channels=9, state_dim=8),
    TYPICAL=TYPICAL,
    CASES=[
        *ragged(*(sizes for T in SHORT for channels in (8, 48) for sizes in list_sizes(T, channels=channels))),
        *ragged(*list_sizes(*OTHERS, channels=8), *list_sizes(*OTHERS, channels=48), on_gpu_alone=True),
        *ragged(*list_sizes(*SHORT, *OTHERS, channels=48, **VMAMBA), on_gpu_alone=True),
        *special("two groups of tokens", *one(66, channels=8)),
        *special("states", *(Sizes(batch=1, tokens=17, channels=40, state_dim=N) for N in triton_fwd.STATE_DIMS)),
        *special("VMamba's routes", *one(1, 8, 19, **VMAMBA)),
        *special("routes that share a sequence", *one(9, channels=8, reverse=(False, True, True), sequences=1)),
        *special("MambaVision's window", *list_sizes(9, **MAMBAVISION)),
        *special("direction", *(Sizes(batch=1, tokens=17, channels=40, reverse=(flag,)) for flag in BOTH_DIRECTIONS)),
        *long(*one(4200, 6400, channels=48)),
    ],
    SHAPES=[
        # Vim-T, S, B
        *(Sizes(tokens=tokens, channels=channels) for channels in (384, 768, 1536) for tokens in IMAGE_TOKENS),
        # VMamba-B's stages 1 and 3 at 224 pixels
        *(Sizes(tokens=tokens, channels=channels, **VMAMBA) for tokens, channels in ((3136, 256), (196, 1024))),
        Sizes(tokens=196, channels=256, **MAMBAVISION),  # MambaVision-B's stage 3, windows of 14 x 14
    ],
    COMPARED=Sizes(tokens=6400, channels=384),
    PEERS=cases.Peers(
        package="mamba_ssm",
        distribution="mamba-ssm",
        names=("mamba-ssm",),
        prepare=lambda name, sizes, inputs: (
            peers.mamba_ssm,
            [x.contiguous() for x in peers.in_layout_of_mamba(inputs)],
        ),
        checks={"mamba-ssm's selective_scan_fn": (TYPICAL, run_mamba)},
        missing="mamba-ssm is not installed",
        takes=lambda sizes: sizes.reverse == BOTH_DIRECTIONS,
    ),
)
