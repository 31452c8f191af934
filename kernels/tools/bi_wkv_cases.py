"""Bi-WKV for `check`, `bench`, `resources` and the tests; `operators` says what each name means.

Shape letters: B samples, T tokens, C channels.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..bi_wkv import bi_wkv, op, selected_backend, triton_bwd, triton_fwd
from .bench import BATCH, FORWARD, TOKENS, Maker, ours
from .check import DTYPES, ROUNDING
from .resources import Compilation

NAME = "bi_wkv"
INPUTS = ("w", "u", "k", "v")
ACTIVATIONS = ("k", "v")
FLOOR = 1.0  # values and output gradients have that size; at one token the gradients of w, u and k are zero
LARGE_DECAY = 3.0
CHANNELS = (192, 384, 768)  # VRWKV-T, S, B

GOALS = {"forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 30, " %")}
AT = "B 64, T 6400, 192 channels, bf16"
PEER = None
DISTRIBUTIONS: dict[str, str] = {}

KERNELS = {
    "bi_wkv_forward": (triton_fwd, triton_fwd.forward_kernel, {"KEEP": False}),
    "bi_wkv_forward_keeping_states": (triton_fwd, triton_fwd.forward_kernel, {"KEEP": True}),
    "bi_wkv_backward": (triton_bwd, triton_bwd.backward_kernel, {}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One shape: B samples, T tokens, C channels; w and u have the size 1/T, as in models, or `LARGE_DECAY`."""

    batch: int = BATCH
    tokens: int
    channels: int
    large_decay: bool = False

    def bytes(self, passes: str) -> int:
        """The least that must be read and written: k, v and out; then k, v, dout, dk and dv. w and u are left out."""
        rows = self.batch * self.tokens * self.channels * 2
        return 3 * rows if passes == FORWARD else 8 * rows

    def flop(self, passes: str) -> int:
        """2 per multiply-add by the operator's own formulas; the backward pass without its repetition of the forward pass."""
        shape = (self.batch, self.tokens, self.channels)
        return op.forward_flops(shape) + (0 if passes == FORWARD else op.backward_flops(shape))


COMPARED = Sizes(tokens=6400, channels=192)
SMALL = Sizes(batch=2, tokens=9, channels=5)
TYPICAL = Sizes(batch=2, tokens=197, channels=35)
# few channels, since the reference has fp64 values of all pairs of tokens
LONG = tuple(Sizes(batch=1, tokens=tokens, channels=2) for tokens in (4200, 6400))


def limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """The kernels' own error, which grows with the exponents and with T, plus a multiple of the results' rounding.

    The gradients of k, u and w are sums of v − out with the kept output, which is rounded. In those of w, terms weighted by distance
    cancel, most of all where a large decay leaves only a few.
    """
    times = {"out": 1, "v": 1, "k": 4, "u": 4, "w": 64 if sizes.large_decay else 16}
    own = 2e-4 if sizes.large_decay else 1e-4 if sizes.tokens > 1000 else 1e-5
    return own + ROUNDING[dtype] * times[name]


def draw(seed: int, sizes: Sizes, device: Any = "cpu", *, decay: float | None = None, keys: float = 1.0) -> list[Tensor]:
    """w, u, k, v and dout, fp64: w and u of either sign with values of fp32, the others with values of bf16.

    `decay` and `keys` are the standard deviations of w and u, and of k; without `decay` it is that of `sizes`.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T, C = sizes.batch, sizes.tokens, sizes.channels
    decay = decay or (LARGE_DECAY if sizes.large_decay else 1 / T)
    w, u = ((decay * torch.randn(C, generator=generator, dtype=torch.float64)).float() for _ in range(2))
    k, v, dout = (scale * torch.randn(B, T, C, generator=generator, dtype=torch.float64) for scale in (keys, 1.0, 1.0))
    return [x.double().to(device) for x in (w, u, k.bfloat16(), v.bfloat16(), dout.bfloat16())]


def bind(sizes: Sizes) -> Callable[..., Tensor]:
    """`bi_wkv`."""
    return bi_wkv


def arguments(inputs: Sequence[Tensor], sizes: Sizes) -> list[Any]:
    """The arguments of the custom op."""
    return list(inputs)


def kernels(
    arguments: Sequence[Any], dout: Tensor, config: triton.Config | None = None, backward_config: triton.Config | None = None
) -> tuple[Tensor, ...]:
    """The output and the gradient of each input."""
    out, states = triton_fwd.forward(*arguments, True, config)
    return out, *triton_bwd.backward(dout, out, states, *arguments, backward_config)


def ragged(interpreted: bool) -> list[Sizes]:
    """Full, short and missing blocks of tokens and of channels; the interpreter is slow and gets the short sequences."""
    lengths = (1, 2, 7, 8, 9, 41) if interpreted else (1, 2, 7, 8, 9, 41, 196, 197, 784)
    return [Sizes(batch=2, tokens=tokens, channels=channels) for tokens in lengths for channels in (5, 35)]


def variants() -> Iterator[tuple[str, Sizes]]:
    """Decays of either sign that need more than one exponent for a block."""
    yield "large decay", Sizes(batch=2, tokens=41, channels=35, large_decay=True)


def select(backend: str, sizes: Sizes, dtype: torch.dtype, device: Any) -> str:
    """The backend that runs for a request."""
    return selected_backend(backend, device, dtype=dtype)


def configs(dtype: torch.dtype) -> tuple[list[triton.Config], list[triton.Config]]:
    """The candidates, forward and backward."""
    return triton_fwd.configs(), triton_bwd.configs()


def peer_checks(device: Any) -> tuple[()]:
    """None: Vision-RWKV's own kernel computes something else, see `reference.bi_wkv_formula`."""
    return ()


def shapes() -> list[Sizes]:
    """B 64: every number of channels at every length."""
    return [Sizes(tokens=tokens, channels=channels) for channels in CHANNELS for tokens in TOKENS]


def layer_inputs(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Arguments of `bi_wkv` as a layer gives them: w and u in fp32 and divided by T, k and v in bf16."""
    generator = torch.Generator(device).manual_seed(0)
    B, T, C = sizes.batch, sizes.tokens, sizes.channels
    w, u = (torch.randn(C, generator=generator, device=device) / T for _ in range(2))
    return [w, u, *(torch.randn(B, T, C, generator=generator, device=device).bfloat16() for _ in range(2))]


def implementations(sizes: Sizes) -> dict[str, Maker]:
    """Ours alone."""
    return ours(bi_wkv, functools.partial(layer_inputs, sizes))


def missing(name: str) -> str | None:
    """There are no others."""
    return None


def tuners() -> list[tuple[Any, Any]]:
    """Both kernels."""
    return [
        (kernel, triton_fwd.tuned(kernel, module.configs, torch.bfloat16))
        for module, kernel in ((triton_fwd, triton_fwd.forward_kernel), (triton_bwd, triton_bwd.backward_kernel))
    ]


def compilations() -> Iterator[Compilation]:
    """Every kernel, dtype and config, with the 192 channels of VRWKV-T."""
    for name, (module, _, _) in KERNELS.items():
        for dtype in DTYPES:
            for i in range(len(module.configs())):
                yield compilation(name, dtype, number=i)


def compilation(name: str, dtype: str, channels: int = 192, number: int = 0) -> Compilation:
    """One of `KERNELS` in one of its configs; number 0 is the default one."""
    module, kernel, own = KERNELS[name]
    return Compilation(
        name=name,
        kernel=kernel,
        operands=("k", "v", "out", "dout", "dk", "dv"),
        constants={"C": channels, **own},
        config=module.configs()[number],
        dtype=dtype,
        sizes={"channels": channels},
        default=number == 0,
    )
