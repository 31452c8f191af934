"""Cases of the operators around the scan. Shape letters: B samples, T tokens, D width, F hidden width.

There is no peer: they replace plain PyTorch, which is the backend `torch`.
"""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ..around import op, triton_bwd, triton_fwd
from ..around.reference import ONES
from . import cases
from .cases import IMAGE_TOKENS, ROUNDING, Random, long, ragged, special

_WIDTHS = (192, 384, 768)  # Vittt-T, S, B; the candidates of the kernels are those of the first
EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """Sizes of a case of the operator `kind`: B samples, T tokens on a grid of `height` rows, D channels."""

    channels: int
    height: int = 1
    kind: str

    @property
    def options(self) -> dict[str, Any]:
        return {"conv_norm": {"height": self.height, "eps": EPS}, "gated_norm": {"eps": EPS}}.get(self.kind, {})


def make(sizes: Sizes, random: Random) -> list[Tensor]:
    """Draw the inputs and dout; norms' weights are near 1, other parameters near 0. F is 8/3 D, as in Vittt's SwiGLU."""
    B, T, D, F = sizes.batch, sizes.tokens, sizes.channels, int(8 * sizes.channels / 3)
    wide, convolution = (B, T, 2 * D), [(2 * D, 4), (2 * D,)]
    rows, *parameters, out = {
        "conv_norm": ((B, T, D), (D, 3, 3), (D,), (D,), (2, B, T, D)),
        "scan_convs": (wide, *convolution, *convolution, (2, *wide)),
        "gated_norm": ((B, T, 2, D), (D,), (D,), (B, T, D)),
        "gated_linear": ((B, T, D), (2 * F, D), (2 * F,), (B, T, F + ONES)),
    }[sizes.kind]
    drawn = [random.normal(*rows)]
    if sizes.kind == "gated_norm":
        drawn.append(random.normal(B, T, D))  # the gate
    weight = {"conv_norm": 1, "gated_norm": 0}.get(sizes.kind)  # the place of a norm's weight among the parameters
    drawn += [random.normal(*each, scale=0.2, mean=float(i == weight)) for i, each in enumerate(parameters)]
    return [*drawn, random.normal(*out)]


def describe_cases(name: str, activations: tuple[str, ...], forward: Any, backward: Any, *, loops: bool) -> cases.Cases:
    """Return the cases of the operator `name`.

    Args:
        activations: the inputs that a layer gives it in low precision.
        forward, backward: (dtype, width) -> the candidates of its kernels.
        loops: whether it has a loop for numba.
    """
    custom_op, sized = getattr(op, name.upper()), partial(Sizes, kind=name)
    plain = partial(sized, batch=2, tokens=35, height=5, channels=24)
    # tokens -> rows of their grid, of the sizes that run anywhere, and of those on a GPU alone
    grids = {1: 1, 2: 1, 35: 5, 81: 9}, {3: 3, 196: 14, 197: 1, 4200: 60}
    anywhere, gpu = ([plain(tokens=T, height=height) for T, height in each.items()] for each in grids)
    return cases.Cases(
        NAME=name,
        op=SimpleNamespace(
            CUSTOM_OP=custom_op,
            selected_backend=partial(op.selected_backend, leading=custom_op.leading, has_loops=loops),
        ),
        CPU_BACKENDS=("numba", "torch") if loops else ("torch",),
        ACTIVATIONS=activations,
        OUT_BATCH=int(name in ("conv_norm", "scan_convs")),
        make=make,
        bind=lambda sizes: lambda *inputs, backend: custom_op(custom_op.arguments(*inputs, **sizes.options), backend),
        # rounding of the output, of the inputs and of the values between them; sums over tokens in fp32
        limit=lambda name, dtype, sizes: 1e-5 + 3 * ROUNDING[dtype],
        configs=lambda dtype: (forward(dtype, _WIDTHS[0]), backward(dtype, _WIDTHS[0])),
        SMALL=plain(tokens=6, height=2, channels=16),
        TYPICAL=plain(tokens=196, height=14),
        CASES=[
            *ragged(*anywhere),
            *ragged(*gpu, on_gpu_alone=True),
            *special("width", *(plain(channels=channels) for channels in (16, 24, 192))),
            *long(plain(batch=1, tokens=6400, height=80)),
        ],
        SHAPES=[sized(tokens=T, height=int(T**0.5), channels=channels) for channels in _WIDTHS for T in IMAGE_TOKENS],
        COMPARED=sized(tokens=6400, height=80, channels=192),
    )


FWD, BWD = triton_fwd, triton_bwd
CASES = (
    describe_cases("conv_norm", ("tokens",), FWD.grid_configs, BWD.row_configs, loops=True),
    describe_cases("scan_convs", ("x",), FWD.block_configs, BWD.block_configs, loops=False),
    describe_cases("gated_norm", ("z", "gate"), FWD.row_configs, BWD.row_configs, loops=True),
    describe_cases("gated_linear", ("x",), FWD.product_configs, BWD.activation_configs, loops=False),
)
