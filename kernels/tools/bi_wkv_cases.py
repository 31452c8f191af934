"""The cases of Bi-WKV. Shape letters: B samples, T tokens, C channels.

There is no peer: Vision-RWKV's own kernel computes something else, see `reference.bi_wkv_formula`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..bi_wkv import bi_wkv, op, triton_bwd, triton_fwd
from ..bi_wkv.triton_fwd import SEGMENT, configs, forward_kernel
from . import cases
from .cases import ROUNDING, TOKENS, normal_drawer

LARGE_DECAY = 3.0
CHANNELS = (192, 384, 768)  # VRWKV-T, S, B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """One shape: B samples, T tokens, C channels; w and u have the size 1/T, as in models, or `LARGE_DECAY`."""

    channels: int
    large_decay: bool = False

    def tensor_bytes(self) -> tuple[int, int]:
        rows = self.batch * self.tokens * self.channels * 2
        return 2 * rows, rows

    def flop_of(self, passes: str) -> int:
        return getattr(op, f"{passes}_flops")((self.batch, self.tokens, self.channels))


class BiWKVCases(cases.Cases):
    def limit(self, name: str, dtype: torch.dtype, sizes: Sizes) -> float:
        """The kernels' own error, which grows with the exponents and with T, plus a multiple of the results' rounding.

        On a GPU a power of two has an error of 2⁻²², and a state takes one for each block of tokens that it passes.

        The gradients of k, u and w are sums of v − out with the kept output, which is rounded. In those of w, terms
        weighted by distance cancel, most of all where a large decay leaves only a few.
        """
        times = {"out": 1, "v": 1, "k": 4, "u": 4, "w": 64 if sizes.large_decay else 16}
        step = 0.0 if triton_fwd.INTERPRETED else 2.0**-21
        own = 2e-4 if sizes.large_decay else max(sizes.tokens * step, 1e-4 if sizes.tokens > 1000 else 1e-5)
        return own + ROUNDING[dtype] * times[name]

    def draw(
        self, seed: int, sizes: Sizes, device: Any = "cpu", *, decay: float | None = None, keys: float = 1.0
    ) -> list[Tensor]:
        """w, u, k, v and dout, fp64: w and u of either sign with values of fp32, the others with values of bf16.

        `decay` and `keys` are the standard deviations of w and u, and of k; without `decay` it is that of `sizes`.
        """
        normal = normal_drawer(seed, dtype=torch.float64)
        B, T, C = sizes.batch, sizes.tokens, sizes.channels
        decay = decay or (LARGE_DECAY if sizes.large_decay else 1 / T)
        w, u = (normal(C, scale=decay).float() for _ in range(2))
        k, v, dout = (normal(B, T, C, scale=scale).bfloat16() for scale in (keys, 1.0, 1.0))
        return [x.double().to(device) for x in (w, u, k, v, dout)]

    def bind(self, sizes: Sizes) -> Callable[..., Tensor]:
        return bi_wkv

    def ragged(self, interpreted: bool) -> list[Sizes]:
        lengths = (1, 2, 7, 8, 9, 41) if interpreted else (1, 2, 7, 8, 9, 41, 196, 197, 784)
        return [Sizes(batch=2, tokens=tokens, channels=channels) for tokens in lengths for channels in (5, 35)]

    def variants(self) -> Iterator[tuple[str, Sizes]]:
        """Decays of either sign that need more than one exponent for a block."""
        yield "large decay", Sizes(batch=2, tokens=41, channels=35, large_decay=True)

    def shapes(self) -> list[Sizes]:
        return [Sizes(tokens=tokens, channels=channels) for channels in CHANNELS for tokens in TOKENS]

    def layer_inputs(self, sizes: Sizes, device: torch.device) -> list[Tensor]:
        """w and u in fp32 and divided by T, k and v in bf16."""
        normal = normal_drawer(0, device)
        B, T, C = sizes.batch, sizes.tokens, sizes.channels
        w, u = (normal(C) / T for _ in range(2))
        return [w, u, *(normal(B, T, C).bfloat16() for _ in range(2))]

    def compile_time(self, dtype: torch.dtype, channels: int = 192) -> cases.CompileTime:
        return {"channels": channels}, {"C": channels}, (dtype,)


CASES = BiWKVCases(
    NAME="bi_wkv",
    op=op,
    triton_fwd=triton_fwd,
    triton_bwd=triton_bwd,
    CPU_BACKENDS=("numba", "torch"),
    INPUTS=("w", "u", "k", "v"),
    ACTIVATIONS=("k", "v"),
    FLOOR=1.0,  # values and output gradients have that size; at one token the gradients of w, u and k are zero
    SMALL=Sizes(batch=2, tokens=9, channels=5),
    TYPICAL=Sizes(batch=2, tokens=197, channels=35),
    # few channels, since the reference has fp64 values of all pairs of tokens
    LONG=tuple(Sizes(batch=1, tokens=tokens, channels=2) for tokens in (4200, 6400)),
    COMPARED=Sizes(tokens=6400, channels=192),
    GOALS={"forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 30, " %")},
    AT="B 64, T 6400, 192 channels, bf16",
    KERNELS={
        "bi_wkv_forward": (configs, forward_kernel, {"KEEP": False, "SEGMENT": 0}),
        "bi_wkv_forward_segments": (configs, forward_kernel, {"KEEP": False, "SEGMENT": SEGMENT}),
        "bi_wkv_forward_keeping_states": (configs, forward_kernel, {"KEEP": True, "SEGMENT": SEGMENT}),
        "bi_wkv_forward_sums": (configs, triton_fwd.sums_kernel, {"SEGMENT": SEGMENT, "ADJOINT": False}),
        "bi_wkv_backward_sums": (configs, triton_fwd.sums_kernel, {"SEGMENT": SEGMENT, "ADJOINT": True}),
        "bi_wkv_forward_ends": (triton_fwd.ends_configs, triton_fwd.ends_kernel, {"SEGMENT": SEGMENT}),
        "bi_wkv_backward": (configs, triton_bwd.backward_kernel, {"SEGMENT": 0}),
        "bi_wkv_backward_segments": (configs, triton_bwd.backward_kernel, {"SEGMENT": SEGMENT}),
    },
    OPERANDS=("k", "v", "out", "dout", "dk", "dv"),
)
