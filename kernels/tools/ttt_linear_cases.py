"""TTT-Linear for `check`, `bench`, `resources` and the tests; `operators` says what each name means.

flash-linear-attention (the extra `bench`) has one direction and no LayerNorm residual on q. For timing it gets its cheapest
equivalent: one call with the two directions as further heads, without the flips that it would need, and tuned again for each shape
(see `peers`).

Shape letters: B samples, T tokens, R directions, H heads, D head width.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..ttt_linear import op, selected_backend, triton_bwd, triton_fwd, ttt_linear, ttt_linear_bidir
from . import peers
from .bench import BATCH, FORWARD, TOKENS, Maker, ours
from .check import BOTH, DTYPES, failure, judge, make_row, relative_errors
from .resources import Compilation

NAME = "ttt_linear"
INPUTS = ("q", "k", "v", "lr", "token_scale", "W0", "b0", "ln_weight", "ln_bias")
ACTIVATIONS = ("q", "k", "v")
LENGTHS = (1, 2, 15, 16, 17, 63, 81, 196, 197)
HEADS = (1, 3)
EPS = 1e-6
FLOOR = 0.0
PEER_LIMIT = 2e-2  # fp16: the peer keeps normalised keys, residuals, their means and the states in q's dtype
WIDTHS = (3, 6, 12)  # heads of Vittt-T, S, B

GOALS = {
    "forward_speedup_over_fla": ("forward, against the faster of flash-linear-attention's two", 2, " ×"),
    "forward_backward_speedup_over_fla": ("forward and backward, against the faster of the two", 2, " ×"),
    "forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 40, " %"),
}
AT = "B 64, T 6400, 3 heads, both directions, bf16"
PEER = "fla"
DISTRIBUTIONS = {"fla_core": "fla-core"}  # the package that holds its kernels

KERNELS = {
    "ttt_linear_forward": (triton_fwd, triton_fwd.forward_kernel, {"KEEP": False}),
    "ttt_linear_forward_keeping_states": (triton_fwd, triton_fwd.forward_kernel, {"KEEP": True}),
    "ttt_linear_backward": (triton_bwd, triton_bwd.backward_kernel, {}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One shape: B samples, T tokens, H heads of width D, a direction for each flag of `reverse`."""

    batch: int = BATCH
    tokens: int
    heads: int
    head_dim: int = 64
    chunk_size: int = 16
    reverse: tuple[bool, ...] = BOTH

    @property
    def rows_bytes(self) -> int:
        """One of q, k, v, out (B,T,R,H,D) in bf16."""
        return self.batch * self.tokens * len(self.reverse) * self.heads * self.head_dim * 2

    def bytes(self, passes: str) -> int:
        """The least that must be read and written: q, k, v, lr and out; then these again, dout, dq, dk, dv and dlr.

        States, parameters and their gradients are left out: under 3 % of it at T >= 784.
        """
        lr = 2 * self.batch * self.tokens * self.heads
        forward = 4 * self.rows_bytes + lr
        return forward if passes == FORWARD else forward + 3 * self.rows_bytes + lr + 4 * self.rows_bytes + lr

    def flop(self, passes: str) -> int:
        """2 per multiply-add by the operator's own formulas; the backward pass without its repetition of the forward pass."""
        shape = (self.batch, self.tokens, len(self.reverse), self.heads, self.head_dim)
        forward = op.forward_flops(shape, self.chunk_size)
        return forward if passes == FORWARD else forward + op.backward_flops(shape, self.chunk_size)


COMPARED = Sizes(tokens=6400, heads=3)


def small(tokens: int, heads: int, **sizes: Any) -> Sizes:
    """Sizes of a check, with more samples where there are few tokens.

    At one token the gradient of lr is one number per sample and head, which can cancel between the directions.
    """
    return Sizes(batch=max(1, 4 // tokens), tokens=tokens, heads=heads, **sizes)


SMALL = Sizes(batch=2, tokens=6, heads=1, head_dim=16, chunk_size=4)
TYPICAL = small(197, 3)
LONG = tuple(small(tokens, 3) for tokens in (4200, 6400))  # 1120 × 960 and 1280 × 1280 pixels


def limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """The kernels round the operands of products to `dtype`; the gradients of lr and token_scale are sums over whole rows."""
    if dtype == torch.float32:
        return 1e-3 if name in ("lr", "token_scale") and sizes.tokens < 15 else 1e-5
    loose = {torch.float16: 2e-2, torch.bfloat16: 5e-2} if name in ("lr", "token_scale") else {torch.float16: 5e-3, torch.bfloat16: 2e-2}
    return loose[dtype]


def draw(seed: int, sizes: Sizes, device: Any = "cpu") -> list[Tensor]:
    """The nine inputs and dout, fp64: q, k, v and dout have values of bf16, the others values of fp32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    B, T, R, H, D = sizes.batch, sizes.tokens, len(sizes.reverse), sizes.heads, sizes.head_dim
    q, k, v, dout = (normal(B, T, R, H, D).bfloat16().double() for _ in range(4))
    lr = torch.sigmoid(normal(B, T, H)) / D
    token_scale = 1 / torch.arange(1, sizes.chunk_size + 1).double() + normal(R, sizes.chunk_size, scale=0.05)
    W0, b0, ln_bias = normal(R, H, D, D, scale=0.05), normal(R, H, D, scale=0.1), normal(R, H, D, scale=0.1)
    ln_weight = normal(R, H, D, scale=0.1, mean=1.0)
    rest = (x.float().double() for x in (lr, token_scale, W0, b0, ln_weight, ln_bias))
    return [x.to(device) for x in (q, k, v, *rest, dout)]


def bind(sizes: Sizes) -> Callable[..., Tensor]:
    """`ttt_linear_bidir`; for other directions than `BOTH`, a call of `ttt_linear` for each."""
    if sizes.reverse == BOTH:
        return functools.partial(ttt_linear_bidir, chunk_size=sizes.chunk_size, eps=EPS)

    def run(*inputs: Tensor, backend: str) -> Tensor:
        options = {"chunk_size": sizes.chunk_size, "eps": EPS, "backend": backend}
        outs = [ttt_linear(*one_direction(inputs, r), reverse=flag, **options) for r, flag in enumerate(sizes.reverse)]
        return torch.stack(outs, 2)

    return run


def one_direction(inputs: Sequence[Tensor], r: int = 0) -> list[Tensor]:
    """The arguments of `ttt_linear` for index r of the direction axis."""
    q, k, v, lr, *parameters = inputs
    return [q[:, :, r], k[:, :, r], v[:, :, r], lr, *(x[r] for x in parameters)]


def arguments(inputs: Sequence[Tensor], sizes: Sizes) -> list[Any]:
    """The arguments of the custom op."""
    return [*inputs, sizes.chunk_size, list(sizes.reverse), EPS]


def kernels(
    arguments: Sequence[Any], dout: Tensor, config: triton.Config | None = None, backward_config: triton.Config | None = None
) -> tuple[Tensor, ...]:
    """The output and the gradient of each input."""
    out, states = triton_fwd.forward(*arguments, True, config)
    return out, *triton_bwd.backward(dout, states, *arguments, backward_config)


def ragged(interpreted: bool) -> list[Sizes]:
    """Full, short and missing chunks."""
    return [small(tokens, heads) for tokens in LENGTHS for heads in HEADS]


def variants() -> Iterator[tuple[str, Sizes]]:
    """Other chunk sizes and head widths."""
    yield from (("chunk size", small(81, 1, chunk_size=chunk_size)) for chunk_size in triton_fwd.CHUNK_SIZES)
    yield from (("head width", small(81, 1, head_dim=width)) for width in triton_fwd.WIDTHS)


def select(backend: str, sizes: Sizes, dtype: torch.dtype, device: Any) -> str:
    """The backend that runs for a request."""
    return selected_backend(backend, device, head_dim=sizes.head_dim, chunk_size=sizes.chunk_size, dtype=dtype)


def configs(dtype: torch.dtype) -> tuple[list[triton.Config], list[triton.Config]]:
    """The candidates for chunks of 16, forward and backward."""
    return triton_fwd.configs(dtype, 16), triton_bwd.configs(dtype, 16)


def peer_checks(device: Any) -> Iterator[tuple[str, Callable[..., dict[str, Any]], tuple, dict[str, Any]]]:
    """flash-linear-attention's two."""
    for kind in peers.KINDS:
        yield f"flash-linear-attention's {kind}_ttt_linear", peer, (kind, device), {}


def peer(kind: str, device: Any) -> dict[str, Any]:
    """One row: flash-linear-attention against the kernels where both compute the same, lr constant within a chunk; fp16."""
    dtype, sizes = "fp16", Sizes(batch=2, tokens=250, heads=3, reverse=(False,))
    result = make_row(NAME, f"flash-linear-attention's {kind}_ttt_linear gives the same", sizes, dtype)
    if reason := missing(kind):
        return result | {"passed": None, "reason": reason}
    q, k, v, lr, *shared, dout = draw(0, sizes, device)
    q, k, v, dout = (x[:, :, 0].to(DTYPES[dtype]) for x in (q, k, v, dout))
    leaves = [x.requires_grad_() for x in (q, k, v, lr[:, ::16].float(), *(x[0].float() for x in shared))]
    results = []
    for function in (functools.partial(ttt_linear, backend="triton"), functools.partial(peers.out, kind, chunk_size=16)):
        per_token = leaves[3].repeat_interleave(16, 1)[:, : sizes.tokens]
        out = function(*leaves[:3], per_token, *leaves[4:])
        results.append(dict(zip(("out", *INPUTS), (out, *torch.autograd.grad(out, leaves, dout)), strict=True)))
    kept, theirs = results
    return result | judge(relative_errors(theirs, kept), dict.fromkeys(kept, PEER_LIMIT))


def shapes() -> list[Sizes]:
    """B 64, D 64, both directions: every number of heads at every length."""
    return [Sizes(tokens=tokens, heads=heads) for heads in WIDTHS for tokens in TOKENS]


def layer_inputs(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Arguments of `ttt_linear_bidir` as a layer gives them: q, k, v and lr in bf16, v a slice of wider rows; parameters in fp32."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    B, T, H, D, C = sizes.batch, sizes.tokens, sizes.heads, sizes.head_dim, sizes.chunk_size
    q, k = (normal(B, T, 2, H, D).bfloat16() for _ in range(2))
    v = normal(B, T, 5, H, D).bfloat16()[:, :, 3:]  # the layer's gate, kq and v are one projection
    lr = (torch.sigmoid(normal(B, T, H)) / D).bfloat16()
    scale = (1 / torch.arange(1, C + 1, device=device)).repeat(2, 1)
    W0, b0 = normal(2, H, D, D, scale=0.02), torch.zeros(2, H, D, device=device)
    return [q, k, v, lr, scale, W0, b0, torch.ones_like(b0), torch.zeros_like(b0)]


def implementations(sizes: Sizes) -> dict[str, Maker]:
    """Ours, and flash-linear-attention's two."""
    inputs = functools.partial(layer_inputs, sizes)
    theirs = {
        f"fla {kind}": lambda device, kind=kind: (
            functools.partial(peers.both_directions(kind), chunk_size=sizes.chunk_size),
            inputs(device),
        )
        for kind in peers.KINDS
    }
    return ours(bind(sizes), inputs) | theirs


def missing(name: str) -> str | None:
    """Why flash-linear-attention cannot run."""
    return None if peers.installed() else "flash-linear-attention is not installed (the extra `bench`)"


def memory_reference_over_kernel(device: torch.device) -> dict[str, Any]:
    """Appendix B: peak memory of a forward and backward pass above the inputs, of the reference under autograd over that of the kernels.

    At 8 samples of T = 6400, 3 heads, both directions, bf16 inputs: {memory_reference_over_kernel, reference_peak_mib,
    kernel_peak_mib, sizes}, or nulls with the reason where the reference does not fit.
    """
    sizes = dataclasses.replace(COMPARED, batch=8)
    peaks: dict[str, float] = {}
    for name in ("triton", "reference"):
        inputs = [x.requires_grad_() for x in layer_inputs(sizes, device)]
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            out = bind(sizes)(*inputs, backend=name)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
        except torch.cuda.OutOfMemoryError as error:
            return {"memory_reference_over_kernel": None, **failure(error)}
        del out
        peaks[name] = (torch.cuda.max_memory_allocated(device) - held) / 2**20
    return {
        "memory_reference_over_kernel": peaks["reference"] / peaks["triton"],
        "reference_peak_mib": peaks["reference"],
        "kernel_peak_mib": peaks["triton"],
        "sizes": dataclasses.asdict(sizes),
    }


def tuners() -> list[tuple[Any, Any]]:
    """Both kernels, for chunks of 16 and heads of 64."""
    return [
        (kernel, triton_fwd.tuned(kernel, module.configs, torch.bfloat16, 16, 64))
        for module, kernel in ((triton_fwd, triton_fwd.forward_kernel), (triton_bwd, triton_bwd.backward_kernel))
    ]


def compilations() -> Iterator[Compilation]:
    """Every kernel, chunk size, dtype and config, with heads of 64."""
    for name, (module, _, _) in KERNELS.items():
        for chunk_size in triton_fwd.CHUNK_SIZES:
            for dtype in DTYPES:
                for i in range(len(module.configs(DTYPES[dtype], chunk_size))):
                    yield compilation(name, dtype, chunk_size, number=i)


def compilation(name: str, dtype: str, chunk_size: int = 16, width: int = 64, number: int = 0) -> Compilation:
    """One of `KERNELS` in one of its configs; number 0 is the default one."""
    module, kernel, own = KERNELS[name]
    return Compilation(
        name=name,
        kernel=kernel,
        operands=("q", "k", "v", "out", "dout", "dq", "dk", "dv", "S", "tiles", "squares"),
        types={"eps": "fp32"},
        constants=triton_fwd.constants(width, chunk_size) | own,
        config=module.configs(DTYPES[dtype], chunk_size, width)[number],
        dtype=dtype,
        sizes={"chunk_size": chunk_size},
        default=number == 0,
    )
