"""The cases of the operators around the scan. Shape letters: B samples, T tokens, D width, F hidden width.

There is no peer: what they replace is plain PyTorch, which is the backend `torch`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from ..around import op, triton_bwd, triton_fwd
from ..around.reference import ONES
from . import cases
from .cases import ROUNDING, TOKENS, normal_drawer
from .check import cast

WIDTHS = (192, 384, 768)  # Vittt-T, S, B
EPS = 1e-6
ACTIVATIONS = {"conv_norm": ("tokens",), "scan_convs": ("x",), "gated_norm": ("z", "gate"), "gated_linear": ("x",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """One shape: B samples, T tokens in rows of a grid of `height`, width D; SwiGLU's hidden width is that of Vittt."""

    channels: int
    height: int = 1
    kind: str

    @property
    def hidden(self) -> int:
        return int(8 * self.channels / 3)

    @property
    def options(self) -> dict[str, Any]:
        return {"conv_norm": {"height": self.height, "eps": EPS}, "gated_norm": {"eps": EPS}}.get(self.kind, {})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input and of the output, which of `gated_linear` is without its ones."""
        B, T, D, F = self.batch, self.tokens, self.channels, self.hidden
        return {
            "conv_norm": {"tokens": (B, T, D), "weight": (D, 3, 3), "gamma": (D,), "beta": (D,), "out": (2, B, T, D)},
            "scan_convs": {
                "x": (B, T, 2 * D),
                "k_weight": (2 * D, 4),
                "k_bias": (2 * D,),
                "q_weight": (2 * D, 4),
                "q_bias": (2 * D,),
                "out": (2, B, T, 2 * D),
            },
            "gated_norm": {"z": (B, T, 2, D), "gate": (B, T, D), "weight": (D,), "bias": (D,), "out": (B, T, D)},
            "gated_linear": {"x": (B, T, D), "weight": (2 * F, D), "bias": (2 * F,), "out": (B, T, F)},
        }[self.kind]

    def tensor_bytes(self) -> tuple[int, int]:
        """Those of the activations."""
        found = {name: 2 * math.prod(shape) for name, shape in self.shapes().items()}
        return sum(found[name] for name in ACTIVATIONS[self.kind]), found["out"]

    def flop_of(self, passes: str) -> int:
        D = self.channels
        macs = {"conv_norm": 9 * D, "scan_convs": 16 * D, "gated_norm": 0, "gated_linear": 2 * D * self.hidden}
        return 2 * self.batch * self.tokens * macs[self.kind] * (1 if passes == "forward" else 2)


@dataclasses.dataclass(kw_only=True, eq=False)
class AroundCases(cases.Cases):
    """The cases of one of the operators, its name in the sizes."""

    PLAIN: Sizes  # what the other sizes are variations of

    def limit(self, name: str, dtype: torch.dtype, sizes: Sizes) -> float:
        """Rounding of the output, of what it is computed from, and of what lies between; sums over tokens in fp32."""
        return 1e-5 + 3 * ROUNDING[dtype]

    def draw(self, seed: int, sizes: Sizes, device: Any = "cpu") -> list[Tensor]:
        """Activations with values of bf16, the others with values of fp32; norms' weights near 1."""
        normal, drawn = normal_drawer(seed, dtype=torch.float64), []
        shapes = sizes.shapes()
        if sizes.kind == "gated_linear":
            shapes["out"] = (*shapes["out"][:2], sizes.hidden + ONES)
        for name, shape in shapes.items():
            if name in (*self.ACTIVATIONS, "out"):
                drawn.append(normal(*shape).bfloat16())
            else:
                mean = 1.0 if name == "gamma" or (name, sizes.kind) == ("weight", "gated_norm") else 0.0
                drawn.append(normal(*shape, scale=0.2, mean=mean).float())
        return [x.double().to(device) for x in drawn]

    def bind(self, sizes: Sizes) -> Callable[..., Tensor]:
        return partial(getattr(op, sizes.kind), **sizes.options)

    def ragged(self, interpreted: bool) -> list[Sizes]:
        lengths = ((1, 1), (2, 1), (3, 3), (35, 5), (81, 9), (196, 14), (197, 1), (4200, 60))
        lengths = [each for each in lengths if not interpreted or each[0] in (1, 2, 35, 81)]
        return [dataclasses.replace(self.PLAIN, tokens=tokens, height=height) for tokens, height in lengths]

    def variants(self) -> Iterator[tuple[str, Sizes]]:
        for channels in (16, 24, 192):
            yield "width", dataclasses.replace(self.PLAIN, channels=channels)

    def shapes(self) -> list[Sizes]:
        return [
            Sizes(tokens=tokens, height=int(tokens**0.5), channels=channels, kind=self.NAME)
            for channels in WIDTHS
            for tokens in TOKENS
        ]

    def layer_inputs(self, sizes: Sizes, device: torch.device) -> list[Tensor]:
        return cast(self, self.draw(0, sizes, device)[:-1], torch.bfloat16)

    def compile_time(self, dtype: torch.dtype, channels: int = 192) -> cases.CompileTime:
        hidden = dataclasses.replace(self.PLAIN, channels=channels).hidden
        constants = {"D": channels, "WIDTH": triton.next_power_of_2(channels), "HIDDEN": hidden, "PAD": ONES}
        return {"channels": channels}, constants, (dtype, channels)

    def kernels(self, arguments: Any, dout: Tensor, config: Any = None, backward_config: Any = None) -> list[Tensor]:
        out = getattr(triton_fwd, self.NAME)(arguments, config)
        return [out, *getattr(triton_bwd, self.NAME)(dout, arguments, backward_config)]


def make(name: str, kernels: Mapping[str, tuple], operands: tuple[str, ...], has_loops: bool = True) -> AroundCases:
    """The cases of the operator of that name. `kernels`: name -> candidates, kernel."""
    custom_op = getattr(op, name.upper())
    plain = Sizes(batch=2, tokens=35, height=5, channels=24, kind=name)
    return AroundCases(
        NAME=name,
        op=SimpleNamespace(
            CUSTOM_OP=custom_op,
            selected_backend=partial(op.selected_backend, leading=custom_op.leading, has_loops=has_loops),
        ),
        CPU_BACKENDS=("numba", "torch") if has_loops else ("torch",),
        triton_fwd=triton_fwd,
        triton_bwd=triton_bwd,
        INPUTS=tuple(plain.shapes())[:-1],
        ACTIVATIONS=ACTIVATIONS[name],
        PLAIN=plain,
        OUT_BATCH=int(name in ("conv_norm", "scan_convs")),
        SMALL=dataclasses.replace(plain, tokens=6, height=2, channels=16),
        TYPICAL=dataclasses.replace(plain, tokens=196, height=14),
        LONG=(dataclasses.replace(plain, batch=1, tokens=6400, height=80),),
        COMPARED=Sizes(tokens=6400, height=80, channels=192, kind=name),
        GOALS={"forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 60, " %")},
        AT="B 64, T 6400, 192 channels, bf16",
        KERNELS={f"{name}_{part}": (configs, kernel, {}) for part, (configs, kernel) in kernels.items()},
        OPERANDS=(*ACTIVATIONS[name], *operands, "out", "dout"),
        TYPES={"eps": "fp32", "size": "i64:16", "rows": "i32:16"},
    )


CASES = (
    make(
        "conv_norm",
        {
            "forward": (triton_fwd.grid_configs, triton_fwd.conv_norm_kernel),
            "backward_norm": (triton_bwd.row_configs, triton_bwd.norm_backward_kernel),
            "backward": (triton_bwd.row_configs, triton_bwd.conv_backward_kernel),
        },
        ("g", "dtokens"),
    ),
    make(
        "scan_convs",
        {
            "forward": (triton_fwd.block_configs, triton_fwd.scan_convs_kernel),
            "backward": (triton_bwd.block_configs, triton_bwd.scan_convs_backward_kernel),
        },
        ("dx",),
        has_loops=False,
    ),
    make(
        "gated_norm",
        {
            "forward": (triton_fwd.row_configs, triton_fwd.gated_norm_kernel),
            "backward": (triton_bwd.row_configs, triton_bwd.gated_norm_backward_kernel),
        },
        ("dz", "dgate"),
    ),
    make(
        "gated_linear",
        {
            "forward": (triton_fwd.product_configs, triton_fwd.gated_linear_kernel),
            "backward": (triton_bwd.activation_configs, triton_bwd.activation_backward_kernel),
        },
        ("weight", "h", "dh"),
        has_loops=False,
    ),
)
