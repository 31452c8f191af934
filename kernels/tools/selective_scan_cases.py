"""The selective scan for `check`, `bench`, `resources` and the tests; `operators` says what each name means.

mamba-ssm's own operator has the layout (B,E,T) and one direction. For timing it gets its cheapest equivalent: inputs in that layout,
those of the second direction and its gate flipped beforehand, two calls, and one flip of the second output.

Shape letters: B samples, T tokens, R directions, E channels, N states of a channel; B and C are also tensors of the equations.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..selective_scan import op, selected_backend, selective_scan, selective_scan_bidir, triton_bwd, triton_fwd
from .bench import BATCH, FORWARD, TOKENS, Maker, ours
from .check import BOTH, DTYPES, ROUNDING, judge, make_row, relative_errors
from .resources import Compilation

NAME = "selective_scan"
INPUTS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
ACTIVATIONS = ("u", "delta", "B", "C", "z")
FLOOR = 1.0  # at one token the gradient of A is zero
PEER_LIMIT = 2e-2  # fp16: it rounds its outputs before the gate's gradient
CHANNELS = (384, 768, 1536)  # Vim-T, S, B

GOALS = {
    "forward_speedup_over_mamba_ssm": ("forward, against mamba-ssm", 1, " ×"),
    "forward_backward_speedup_over_mamba_ssm": ("forward and backward, against mamba-ssm", 1, " ×"),
    "forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 30, " %"),
}
AT = "B 64, T 6400, 384 channels, 16 states, both directions, bf16"
PEER = "mamba_ssm"
DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm"}

KERNELS = {
    "selective_scan_forward": (triton_fwd.forward_kernel, lambda N: {"KEEP": False}),
    "selective_scan_forward_keeping_states": (triton_fwd.forward_kernel, lambda N: {"KEEP": True}),
    "selective_scan_backward": (triton_bwd.backward_kernel, lambda N: {"SPAN": triton_bwd.span(N)}),
}
CONFIG = triton.Config({}, num_warps=1, num_stages=1)  # the only one, see `triton_fwd.launch`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One shape: B samples, T tokens, E channels of N states, with the gate z, a direction for each flag of `reverse`."""

    batch: int = BATCH
    tokens: int
    channels: int
    state_dim: int = 16
    reverse: tuple[bool, ...] = BOTH

    def bytes(self, passes: str) -> int:
        """The least that must be read and written: u, delta, B, C, z and out; then these without out, dout, and their gradients.

        States, parameters and their gradients are left out.
        """
        tokens, R = self.batch * self.tokens * 2, len(self.reverse)
        rows, readings, gate = tokens * R * self.channels, tokens * R * self.state_dim, tokens * self.channels
        inputs = 2 * rows + 2 * readings + gate
        return inputs + rows if passes == FORWARD else 3 * inputs + 2 * rows

    def flop(self, passes: str) -> int:
        """2 per multiply-add by the operator's own formulas; the backward pass without its repetition of the forward pass."""
        shape = (self.batch, self.tokens, len(self.reverse), self.channels)
        return op.forward_flops(shape, self.state_dim) + (0 if passes == FORWARD else op.backward_flops(shape, self.state_dim))


COMPARED = Sizes(tokens=6400, channels=384)
SMALL = Sizes(batch=2, tokens=4, channels=9, state_dim=8)
TYPICAL = Sizes(batch=2, tokens=197, channels=48)
LONG = tuple(Sizes(batch=1, tokens=tokens, channels=48) for tokens in (4200, 6400))


def limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """The kernels' own error in sums over T, plus the rounding of results that are in `dtype`."""
    return (1e-4 if sizes.tokens > 1000 else 1e-5) + (ROUNDING[dtype] if name in ("out", *ACTIVATIONS) else 0.0)


def draw(seed: int, sizes: Sizes, device: Any = "cpu") -> list[Tensor]:
    """The eight inputs and dout, fp64: parameters have values of fp32, the others of bf16. Step sizes from 1e-3 to 5, rates to −20."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    images, T, R, E, N = sizes.batch, sizes.tokens, len(sizes.reverse), sizes.channels, sizes.state_dim
    u, delta, dout = (normal(images, T, R, E).bfloat16() for _ in range(3))
    B, C = (normal(images, T, R, N).bfloat16() for _ in range(2))
    A, D, bias = -torch.exp(normal(R, E, N)), normal(R, E), normal(R, E, scale=2.0, mean=-2.0)
    z = normal(images, T, E).bfloat16()
    return [x.double().to(device) for x in (u, delta, A.float(), B, C, D.float(), z, bias.float(), dout)]


def bind(sizes: Sizes) -> Callable[..., Tensor]:
    """`selective_scan_bidir`; for other directions than `BOTH`, a call of `selective_scan` for each."""
    if sizes.reverse == BOTH:
        return selective_scan_bidir

    def run(*inputs: Tensor, backend: str) -> Tensor:
        outs = [selective_scan(*one_direction(inputs, r), reverse=flag, backend=backend) for r, flag in enumerate(sizes.reverse)]
        return torch.stack(outs, 2)

    return run


def one_direction(inputs: Sequence[Tensor], r: int = 0) -> list[Tensor]:
    """The arguments of `selective_scan` for index r of the direction axis."""
    u, delta, A, B, C, D, z, bias = inputs
    return [u[:, :, r], delta[:, :, r], A[r], B[:, :, r], C[:, :, r], D[r], z, bias[r]]


def arguments(inputs: Sequence[Tensor], sizes: Sizes) -> list[Any]:
    """The arguments of the custom op."""
    return [*inputs, list(sizes.reverse)]


def kernels(
    arguments: Sequence[Any], dout: Tensor, config: triton.Config | None = None, backward_config: triton.Config | None = None
) -> tuple[Tensor, ...]:
    """The output and the gradient of each input; the kernels have one config."""
    out, states = triton_fwd.forward(*arguments, True)
    return out, *triton_bwd.backward(dout, states, *arguments)


def ragged(interpreted: bool) -> list[Sizes]:
    """Full, short and missing groups of tokens and blocks of channels; the interpreter is slow and gets the short sequences."""
    lengths = (1, 2, 5) if interpreted else (1, 2, 3, 63, 64, 65, 196, 197, 784)
    return [Sizes(batch=2, tokens=tokens, channels=channels) for tokens in lengths for channels in (8, 48)]


def variants() -> Iterator[tuple[str, Sizes]]:
    """A second group of tokens; other numbers of states; one direction."""
    yield "two groups of tokens", Sizes(batch=1, tokens=66, channels=8)
    yield from (("states", Sizes(batch=1, tokens=17, channels=40, state_dim=N)) for N in triton_fwd.STATE_DIMS)
    yield from (("direction", Sizes(batch=1, tokens=17, channels=40, reverse=(flag,))) for flag in BOTH)


def select(backend: str, sizes: Sizes, dtype: torch.dtype, device: Any) -> str:
    """The backend that runs for a request."""
    return selected_backend(backend, device, state_dim=sizes.state_dim, dtype=dtype)


def configs(dtype: torch.dtype) -> tuple[list[triton.Config], list[triton.Config]]:
    """There is one config, forward and backward."""
    return [CONFIG], [CONFIG]


def peer_checks(device: Any) -> Iterator[tuple[str, Callable[..., dict[str, Any]], tuple, dict[str, Any]]]:
    """mamba-ssm's."""
    yield "mamba-ssm's selective_scan_fn", peer, (device,), {}


def peer(device: Any, sizes: Sizes = TYPICAL) -> dict[str, Any]:
    """One row: mamba-ssm against the kernels, in fp16 with parameters in fp32."""
    result = make_row(NAME, "mamba-ssm's selective_scan_fn gives the same", sizes, "fp16")
    if reason := missing(PEER):
        return result | {"passed": None, "reason": reason}
    names = *INPUTS, "dout"
    low = *ACTIVATIONS, "dout"
    *leaves, dout = (x.half() if name in low else x.float() for name, x in zip(names, draw(0, sizes, device), strict=True))
    kept = dict(zip(("out", *INPUTS), kernels(arguments(leaves, sizes), dout), strict=True))
    leaves = [x.requires_grad_() for x in leaves]
    out = mamba_ssm(*in_its_layout(leaves)).movedim(-1, 1)
    theirs = dict(zip(("out", *INPUTS), (out, *torch.autograd.grad(out, leaves, dout)), strict=True))
    return result | judge(relative_errors(theirs, kept), dict.fromkeys(kept, PEER_LIMIT))


def shapes() -> list[Sizes]:
    """B 64, N 16, both directions: every number of channels at every length."""
    return [Sizes(tokens=tokens, channels=channels) for channels in CHANNELS for tokens in TOKENS]


def layer_inputs(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Arguments of `selective_scan_bidir` as a layer gives them: activations in bf16, parameters in fp32.

    delta, B and C have the direction first in memory and are slices of batched products; z is a slice of a wider projection.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    images, T, E, N = sizes.batch, sizes.tokens, sizes.channels, sizes.state_dim
    u = normal(images, T, 2, E).bfloat16()
    delta = normal(2, images, T, E).bfloat16().permute(1, 2, 0, 3)
    parts = normal(2, images, T, E // 32 + 2 * N).bfloat16().permute(1, 2, 0, 3)  # the first slice is delta's low rank, D / 16
    z = normal(images, T, 2 * E).bfloat16()[..., E:]
    A = -torch.arange(1.0, N + 1, device=device).expand(2, E, N).contiguous()
    return [u, delta, A, parts[..., -2 * N : -N], parts[..., -N:], torch.ones(2, E, device=device), z, normal(2, E) - 4]


def implementations(sizes: Sizes) -> dict[str, Maker]:
    """Ours, and mamba-ssm's."""
    inputs = functools.partial(layer_inputs, sizes)

    def theirs(device: torch.device) -> tuple[Callable[..., Tensor], list[Tensor]]:
        return mamba_ssm, [x.contiguous() for x in in_its_layout(inputs(device))]

    return ours(selective_scan_bidir, inputs) | {"mamba-ssm": theirs}


def in_its_layout(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `selective_scan_bidir` as `mamba_ssm` takes them: tokens last, in the order of the scan, z for each direction."""
    u, delta, A, B, C, D, z, bias = inputs
    scanned = [torch.stack((x[:, :, 0], x[:, :, 1].flip(1)), 1).mT for x in (u, delta, B, C, z.unsqueeze(2).expand_as(u))]
    return [*scanned[:2], A, *scanned[2:4], D, scanned[4], bias]


def mamba_ssm(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor) -> Tensor:
    """mamba-ssm's operator on `in_its_layout`: (B,2,E,T), with the tokens of both directions in the order of the input."""
    scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    forward, backward = (
        scan(u[:, r], delta[:, r], A[r], B[:, r], C[:, r], D[r], z[:, r], delta_bias[r], delta_softplus=True) for r in (0, 1)
    )
    return torch.stack((forward, backward.flip(-1)), 1)


def missing(name: str) -> str | None:
    """Why mamba-ssm cannot run."""
    return None if importlib.util.find_spec("mamba_ssm") else "mamba-ssm is not installed"


def tuners() -> tuple[()]:
    """None: there is one config."""
    return ()


def compilations() -> Iterator[Compilation]:
    """Every kernel and dtype, with the 16 states and the gate of Vim."""
    yield from (compilation(name, dtype) for name in KERNELS for dtype in DTYPES)


def compilation(name: str, dtype: str, state_dim: int = 16, gate: bool = True) -> Compilation:
    """One of `KERNELS` at one size."""
    kernel, own = KERNELS[name]
    return Compilation(
        name=name,
        kernel=kernel,
        operands=("u", "delta", "B", "C", "z", "out", "dout", "du", "ddelta"),
        constants=triton_fwd.constants(state_dim, gate) | own(state_dim),
        config=CONFIG,
        dtype=dtype,
        sizes={"state_dim": state_dim, "gate": gate},
    )
