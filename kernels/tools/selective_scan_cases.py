"""The cases of the selective scan: Vim's two of 16 states, MambaVision's one of 8, VMamba's four of one.

Shape letters: B samples, T tokens, K sequences, R routes, E channels, N states of a channel.

mamba-ssm's own operator has the layout (B,E,T) and one direction. For timing, Vim's shapes give it its cheapest
equivalent: inputs in that layout, those of the second direction and its gate flipped beforehand, two calls, and one
flip of the second output.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..selective_scan import op, selective_scan_bidir, selective_scan_routes, triton_bwd, triton_fwd
from ..selective_scan.triton_fwd import configs, forward_kernel
from . import cases
from .cases import BOTH, ROUNDING, TOKENS, Check, normal_drawer
from .check import cast, compare_peer
from .resources import Compilation

CHANNELS = (384, 768, 1536)  # Vim-T, S, B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """One shape: B samples, T tokens, E channels of N states, a route for each flag of `reverse`.

    The routes scan `sequences`, or one each where that is 0; `gate`: with z; `full_precision` is the operator's.
    """

    channels: int
    state_dim: int = 16
    reverse: tuple[bool, ...] = BOTH
    sequences: int = 0
    gate: bool = True
    full_precision: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"reverse": list(self.reverse), "full_precision": self.full_precision}

    @property
    def u_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.tokens, self.sequences or len(self.reverse), self.channels

    def tensor_bytes(self) -> tuple[int, int]:
        """u, delta, B, C and z; out."""
        tokens, R = self.batch * self.tokens * 2, len(self.reverse)
        inputs = (self.u_shape[2] + R) * self.channels + 2 * R * self.state_dim + self.gate * self.channels
        return tokens * inputs, tokens * R * self.channels * (2 if self.full_precision else 1)

    def flop_of(self, passes: str) -> int:
        shape = (self.batch, self.tokens, len(self.reverse), self.channels)
        return getattr(op, f"{passes}_flops")(shape, self.state_dim)


VMAMBA = dict(state_dim=1, reverse=(False, False, True, True), sequences=2, gate=False, full_precision=True)
WHOLE = {"SEGMENT": 0, "ENDS": False}  # constants of the forward kernel, for all tokens in one program
SEGMENTS = {"SEGMENT": triton_fwd.SEGMENT, "ENDS": False}
MAMBAVISION = dict(state_dim=8, reverse=(False,), gate=False)


class SelectiveScanCases(cases.Cases):
    def limit(self, name: str, dtype: torch.dtype, sizes: Sizes) -> float:
        """The kernels' own error in sums over T, plus the rounding of results that are in `dtype`."""
        rounded = name in self.ACTIVATIONS or (name == "out" and not sizes.full_precision)
        return (1e-4 if sizes.tokens > 1000 else 1e-5) + (ROUNDING[dtype] if rounded else 0.0)

    def draw(self, seed: int, sizes: Sizes, device: Any = "cpu") -> list[Tensor | None]:
        """fp64: parameters have values of fp32, the others of bf16. Step sizes from 1e-3 to 5, rates to −20."""
        normal = normal_drawer(seed, dtype=torch.float64)
        images, T, R, E, N = sizes.batch, sizes.tokens, len(sizes.reverse), sizes.channels, sizes.state_dim
        u, delta, dout = (normal(*shape).bfloat16() for shape in (sizes.u_shape, *[(images, T, R, E)] * 2))
        B, C = (normal(images, T, R, N).bfloat16() for _ in range(2))
        A, D, bias = -torch.exp(normal(R, E, N)), normal(R, E), normal(R, E, scale=2.0, mean=-2.0)
        z = normal(images, T, E).bfloat16() if sizes.gate else None
        drawn = (u, delta, A.float(), B, C, D.float(), z, bias.float(), dout)
        return [None if x is None else x.double().to(device) for x in drawn]

    def bind(self, sizes: Sizes) -> Callable[..., Tensor]:
        if sizes.reverse == BOTH and not sizes.sequences:
            return functools.partial(selective_scan_bidir, full_precision=sizes.full_precision)
        return functools.partial(selective_scan_routes, **sizes.options)

    def ragged(self, interpreted: bool) -> list[Sizes]:
        lengths = (1, 2, 5) if interpreted else (1, 2, 3, 63, 64, 65, 196, 197, 784)
        found = [Sizes(batch=2, tokens=tokens, channels=channels) for tokens in lengths for channels in (8, 48)]
        if not interpreted:
            found += [Sizes(batch=2, tokens=tokens, channels=48, **VMAMBA) for tokens in lengths]
        return found

    def variants(self) -> Iterator[tuple[str, Sizes]]:
        yield "two groups of tokens", Sizes(batch=1, tokens=66, channels=8)
        yield from (("states", Sizes(batch=1, tokens=17, channels=40, state_dim=N)) for N in triton_fwd.STATE_DIMS)
        yield from (("VMamba's routes", Sizes(batch=1, tokens=tokens, channels=40, **VMAMBA)) for tokens in (1, 8, 19))
        shared = Sizes(batch=1, tokens=9, channels=8, reverse=(False, True, True), sequences=1)
        yield "routes that share a sequence", shared
        yield "MambaVision's window", Sizes(batch=2, tokens=9, channels=40, **MAMBAVISION)
        yield from (("direction", Sizes(batch=1, tokens=17, channels=40, reverse=(flag,))) for flag in BOTH)

    def shapes(self) -> list[Sizes]:
        """Vim at all lengths; VMamba-B's stages 1 and 3 at 224 pixels; MambaVision-B's stage 3, windows of 14 x 14."""
        vim = [Sizes(tokens=tokens, channels=channels) for channels in CHANNELS for tokens in TOKENS]
        vmamba = [Sizes(tokens=tokens, channels=channels, **VMAMBA) for tokens, channels in ((3136, 256), (196, 1024))]
        return [*vim, *vmamba, Sizes(tokens=196, channels=256, **MAMBAVISION)]

    def layer_inputs(self, sizes: Sizes, device: torch.device) -> list[Tensor | None]:
        """delta, B and C: route first in memory, slices of batched products; z: a slice of a wider projection."""
        normal = normal_drawer(0, device)
        images, T, R, E, N = sizes.batch, sizes.tokens, len(sizes.reverse), sizes.channels, sizes.state_dim
        u = normal(*sizes.u_shape).bfloat16()
        delta = normal(R, images, T, E).bfloat16().permute(1, 2, 0, 3)
        # the first slice is delta's low rank, D / 16
        parts = normal(R, images, T, E // 32 + 2 * N).bfloat16().permute(1, 2, 0, 3)
        z = normal(images, T, 2 * E).bfloat16()[..., E:] if sizes.gate else None
        A = -torch.arange(1.0, N + 1, device=device).expand(R, E, N).contiguous()
        B, C = parts[..., -2 * N : -N], parts[..., -N:]
        return [u, delta, A, B, C, torch.ones(R, E, device=device), z, normal(R, E) - 4]

    def compile_time(
        self, dtype: torch.dtype, state_dim: int = 16, gate: bool = True, sequences: int = 0
    ) -> cases.CompileTime:
        """`sequences` is K where routes share sequences, as VMamba's do; else 0."""
        constants = triton_fwd.constants(state_dim, gate, sequences)
        constants |= {"SPAN": triton_bwd.span(state_dim), "AHEAD": triton_fwd.ahead(state_dim)}
        return {"state_dim": state_dim, "gate": gate, "sequences": sequences}, constants, (dtype,)

    def compilation(self, name: str, dtype: str, number: int = 0, **options: Any) -> Compilation:
        """VMamba's output, with its gradient, and the parts of du, which are then added up, are fp32."""
        one = super().compilation(name, dtype, number, **options)
        if one.constants.get("ENDS"):
            ahead = triton_fwd.ahead(one.constants["N"], True)
            one = dataclasses.replace(one, constants={**one.constants, "AHEAD": ahead})
        fp32 = {"out", "dout", "du"} if options.get("sequences") else set()
        return dataclasses.replace(one, operands=[operand for operand in one.operands if operand not in fp32])

    def implementations(self, sizes: Sizes) -> list[str]:
        return [name for name in super().implementations(sizes) if name != "mamba-ssm" or sizes.reverse == BOTH]

    def prepare(self, name: str, sizes: Sizes, device: torch.device) -> tuple[Callable[..., Tensor], list[Tensor]]:
        function, inputs = super().prepare(name, sizes, device)
        if name == "mamba-ssm":
            return mamba_ssm, [x.contiguous() for x in in_its_layout(inputs)]
        return function, inputs

    def peer_checks(self, device: Any) -> Iterator[Check]:
        name = "mamba-ssm's selective_scan_fn"
        yield name, compare_peer, (self, name, self.TYPICAL, functools.partial(self.run_peer, device)), {}

    def run_peer(self, device: Any, sizes: Sizes) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The results of mamba-ssm and of the kernels, in fp16 with parameters in fp32."""
        *leaves, dout = cast(self, self.draw(0, sizes, device), torch.float16)
        kept = self.kernels(self.arguments(leaves, sizes), dout)
        leaves = [x.requires_grad_() for x in leaves]
        out = mamba_ssm(*in_its_layout(leaves)).movedim(-1, 1)
        # it rounds its outputs before the gate's gradient
        return (out, *torch.autograd.grad(out, leaves, dout)), kept


def in_its_layout(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `selective_scan_bidir` as `mamba_ssm` takes them: tokens last, in scan order, z per direction."""
    u, delta, A, B, C, D, z, bias = inputs
    scanned = (u, delta, B, C, z.unsqueeze(2).expand_as(u))
    u, delta, B, C, z = (torch.stack((x[:, :, 0], x[:, :, 1].flip(1)), 1).mT for x in scanned)
    return [u, delta, A, B, C, D, z, bias]


def mamba_ssm(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor
) -> Tensor:
    """mamba-ssm's operator on `in_its_layout`: (B,2,E,T), with the tokens of both directions in the order of the input."""
    scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    forward, backward = (
        scan(u[:, r], delta[:, r], A[r], B[:, r], C[:, r], D[r], z[:, r], delta_bias[r], delta_softplus=True)
        for r in (0, 1)
    )
    return torch.stack((forward, backward.flip(-1)), 1)


CASES = SelectiveScanCases(
    NAME="selective_scan",
    op=op,
    triton_fwd=triton_fwd,
    triton_bwd=triton_bwd,
    CPU_BACKENDS=("numba", "torch"),
    INPUTS=("u", "delta", "A", "B", "C", "D", "z", "delta_bias"),
    ACTIVATIONS=("u", "delta", "B", "C", "z"),
    FLOOR=1.0,  # at one token the gradient of A is zero
    SMALL=Sizes(batch=2, tokens=4, channels=9, state_dim=8),
    TYPICAL=Sizes(batch=2, tokens=197, channels=48),
    LONG=tuple(Sizes(batch=1, tokens=tokens, channels=48) for tokens in (4200, 6400)),
    OPTIONS=("state_dim",),
    COMPARED=Sizes(tokens=6400, channels=384),
    GOALS={
        "forward_speedup_over_mamba_ssm": ("forward, against mamba-ssm", 1, " ×"),
        "forward_backward_speedup_over_mamba_ssm": ("forward and backward, against mamba-ssm", 1, " ×"),
        "forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 30, " %"),
    },
    AT="B 64, T 6400, 384 channels, 16 states, both directions, bf16",
    PEERS=("mamba-ssm",),
    PEER="mamba_ssm",
    PEER_MISSING="mamba-ssm is not installed",
    DISTRIBUTIONS={"mamba_ssm": "mamba-ssm"},
    KERNELS={
        "selective_scan_forward": (configs, forward_kernel, WHOLE | {"KEEP": False}),
        "selective_scan_forward_segments": (configs, forward_kernel, SEGMENTS | {"KEEP": False}),
        "selective_scan_forward_keeping_states": (configs, forward_kernel, WHOLE | {"KEEP": True}),
        "selective_scan_forward_ends": (configs, forward_kernel, SEGMENTS | {"KEEP": False, "ENDS": True}),
        "selective_scan_forward_starts": (configs, triton_fwd.starts_kernel, {"AT_ONCE": triton_fwd.AT_ONCE}),
        "selective_scan_backward": (configs, triton_bwd.backward_kernel, {}),
    },
    OPERANDS=("u", "delta", "B", "C", "z", "out", "dout", "du", "ddelta"),
    COMPILED=({}, {"state_dim": 8, "gate": False}, {"state_dim": 1, "gate": False, "sequences": 2}),
)
