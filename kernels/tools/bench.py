"""How fast are the kernels of TTT-Linear on this GPU? Beside them the torch backend, flash-linear-attention, and a copy.

Both directions always run, v as the layer has it: a part of a projection's output. flash-linear-attention (the extra `bench`)
has one direction and no LayerNorm residual on q, so it gets its cheapest equivalent: one call with the two directions as further
heads, without the flips that it would need, tuned anew for each shape (see `peers`).

Times are CUDA events around each call, the second-level cache cleared before it. Where the work is shorter than Python's way to
the launch, some tens of microseconds, they show that way: at T = 196 of every implementation. Nothing here checks results:
`check` does.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from .. import ttt_linear_bidir
from ..ttt_linear import op, triton_bwd, triton_fwd
from . import peers
from .check import describe, failure

HEADS = (3, 6, 12)  # Vittt-T, S, B
TOKENS = (196, 784, 1600, 4096, 6400)  # 224, 448, 640, 1024 and 1280 pixels a side
OURS = ("copy", "triton", "torch")
COMPARED = {"heads": 3, "tokens": 6400}  # what `summary` and the goals are about
WARMUP_MS, REPEAT_MS, MIN_SAMPLES = 100, 400, 10
FORWARD, BOTH_PASSES = "forward", "forward+backward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One shape: B samples, T tokens, H heads of width D, both directions, bf16."""

    batch: int = 64
    tokens: int
    heads: int
    head_dim: int = 64
    chunk_size: int = 16

    @property
    def rows_bytes(self) -> int:
        """One of q, k, v, out (B,T,2,H,D) in bf16."""
        return self.batch * self.tokens * 2 * self.heads * self.head_dim * 2

    def bytes(self, passes: str) -> int:
        """What must be read and written at least: q, k, v, lr and out; then these again, dout, dq, dk, dv and dlr.

        States, parameters and their gradients are left out: under 3 % of it at T >= 784.
        """
        lr = 2 * self.batch * self.tokens * self.heads
        forward = 4 * self.rows_bytes + lr
        return forward if passes == FORWARD else forward + 3 * self.rows_bytes + lr + 4 * self.rows_bytes + lr

    def flop(self, passes: str) -> int:
        """2 per multiply-add by the operator's own formulas; the backward pass without its repetition of the forward pass."""
        shape = (self.batch, self.tokens, 2, self.heads, self.head_dim)
        forward = op.forward_flops(shape, self.chunk_size)
        return forward if passes == FORWARD else forward + op.backward_flops(shape, self.chunk_size)


def shapes() -> list[Sizes]:
    """B 64, D 64, both directions: every number of heads at every length."""
    return [Sizes(tokens=tokens, heads=heads) for heads in HEADS for tokens in TOKENS]


def draw(sizes: Sizes, device: torch.device, *, requires_grad: bool) -> list[Tensor]:
    """Arguments of `ttt_linear_bidir` as a layer gives them: q, k, v and lr in bf16, v a part of wider rows; parameters in fp32."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    B, T, H, D, C = sizes.batch, sizes.tokens, sizes.heads, sizes.head_dim, sizes.chunk_size
    q, k = (normal(B, T, 2, H, D).bfloat16() for _ in range(2))
    v = normal(B, T, 5, H, D).bfloat16()[:, :, 3:]  # the layer's gate, kq and v are one projection
    lr = (torch.sigmoid(normal(B, T, H)) / D).bfloat16()
    scale = (1 / torch.arange(1, C + 1, device=device)).repeat(2, 1)
    W0, b0 = normal(2, H, D, D, scale=0.02), torch.zeros(2, H, D, device=device)
    inputs = [q, k, v, lr, scale, W0, b0, torch.ones_like(b0), torch.zeros_like(b0)]
    return [x.requires_grad_(requires_grad) for x in inputs]


def implementations() -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Name -> what makes a function of `draw`'s tensors and the chunk size that returns the outputs of both directions."""

    ours = {name: functools.partial(functools.partial, ttt_linear_bidir, backend=name) for name in ("triton", "torch")}
    return ours | {f"fla {kind}": functools.partial(peers.both_directions, kind) for kind in peers.KINDS}


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each shape, implementation and pass, as it is measured.

    A row is {implementation, passes, batch, tokens, heads, head_dim, dtype, status, median_ms, p20_ms, p80_ms, samples, bytes,
    gflop, gb_per_s, tflop_per_s, share_of_copy_percent, peak_memory_mib}: bytes and gflop by `Sizes`, whatever the implementation
    moves and does; the share is the time of a device copy of these bytes over the row's; the peak is above the inputs.
    `status` is `ok`; or `oom`, `failed` or, for a peer that is not there, `unavailable`, with null numbers and the reason.
    """
    for sizes in shapes():
        for passes in (FORWARD, BOTH_PASSES):
            copied = _measured("copy", sizes, passes, device, None, lambda: copy_step(sizes, passes, device))
            yield copied
            for name, function in implementations().items():
                yield _measured(
                    name, sizes, passes, device, copied["median_ms"], lambda: op_step(function(), sizes, passes, device)
                )


def copy_step(sizes: Sizes, passes: str, device: torch.device) -> Callable[[], Any]:
    """A call that reads and writes half of the bytes each."""
    source = torch.zeros(sizes.bytes(passes) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def op_step(function: Callable[..., Tensor], sizes: Sizes, passes: str, device: torch.device) -> Callable[[], Any]:
    """A call of one forward pass under inference mode, or of one forward and backward pass, all nine gradients wanted."""
    inputs = draw(sizes, device, requires_grad=passes == BOTH_PASSES)

    def forward() -> Tensor:
        with torch.inference_mode():
            return function(*inputs, chunk_size=sizes.chunk_size)

    dout = torch.ones_like(inputs[0])

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*inputs, chunk_size=sizes.chunk_size), inputs, dout)

    return forward if passes == FORWARD else forward_backward


def _measured(
    name: str, sizes: Sizes, passes: str, device: torch.device, copy_ms: float | None, make: Callable[[], Callable[[], Any]]
) -> dict[str, Any]:
    if name not in OURS and not peers.installed():
        return _blank(name, sizes, passes, "unavailable") | {"reason": "flash-linear-attention is not installed (the extra `bench`)"}
    try:
        step = make()
        step()  # compiles and tunes
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        peak = torch.cuda.max_memory_allocated(device) - held
        return _filled(name, sizes, passes, times(step), copy_ms, peak / 2**20)
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return _blank(name, sizes, passes, "oom") | failure(error)
    except Exception as error:  # whatever a peer may raise: one row less, and not the end of an hour's measuring
        return _blank(name, sizes, passes, "failed") | failure(error)


def times(step: Callable[[], Any]) -> list[float]:
    """Milliseconds of each of at least `MIN_SAMPLES` calls."""
    taken: list[float] = []
    while len(taken) < MIN_SAMPLES:
        taken += triton.testing.do_bench(step, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="all")
    return taken


def _blank(name: str, sizes: Sizes, passes: str, status: str) -> dict[str, Any]:
    row = {"implementation": name, "passes": passes, **dataclasses.asdict(sizes), "dtype": "bf16", "status": status}
    numbers = "median_ms", "p20_ms", "p80_ms", "gb_per_s", "tflop_per_s", "share_of_copy_percent", "peak_memory_mib"
    return row | dict.fromkeys(numbers) | {"samples": 0, "bytes": sizes.bytes(passes), "gflop": sizes.flop(passes) / 1e9}


def _filled(name: str, sizes: Sizes, passes: str, taken: list[float], copy_ms: float | None, peak_mib: float) -> dict[str, Any]:
    row = _blank(name, sizes, passes, "ok")
    low, median, high = (torch.tensor(taken).quantile(p).item() for p in (0.2, 0.5, 0.8))
    row |= {"median_ms": median, "p20_ms": low, "p80_ms": high, "samples": len(taken), "peak_memory_mib": peak_mib}
    row["gb_per_s"] = row["bytes"] / median / 1e6
    if name == "copy":
        return row | {"gflop": None, "reason": "a copy computes nothing, and is what the share is of"}
    row["tflop_per_s"] = row["gflop"] / median
    if copy_ms is None:
        return row | {"reason": "the copy could not be measured"}
    return row | {"share_of_copy_percent": 100 * copy_ms / median}


def summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The goals at B 64, T 6400, 3 heads: times the faster of flash-linear-attention's two; share of the copy's bandwidth."""
    here = {
        (row["implementation"], row["passes"]): row["median_ms"]
        for row in measured
        if all(row[key] == value for key, value in COMPARED.items())
    }
    found: dict[str, Any] = {}
    for passes, key in ((FORWARD, "forward"), (BOTH_PASSES, "forward_backward")):
        ours = here.get(("triton", passes))
        theirs = [ms for kind in peers.KINDS if (ms := here.get((f"fla {kind}", passes)))]
        found[f"{key}_speedup_over_fla"] = min(theirs) / ours if ours and theirs else None
        copied = here.get(("copy", passes))
        found[f"{key}_share_of_copy_percent"] = 100 * copied / ours if ours and copied else None
    if None in found.values():
        found["reason"] = "a row that it compares is missing or did not run; see the rows"
    return found


def memory_reference_over_kernel(device: torch.device) -> dict[str, Any]:
    """Appendix B: peak memory above the inputs of a forward and backward pass, reference under autograd over kernels.

    At 8 samples of T = 6400, 3 heads, both directions, bf16 inputs: {memory_reference_over_kernel, reference_peak_mib,
    kernel_peak_mib, sizes}, or nulls with the reason where the reference does not fit.
    """
    sizes = Sizes(batch=8, **COMPARED)
    peaks: dict[str, float] = {}
    for name in ("triton", "reference"):
        inputs = draw(sizes, device, requires_grad=True)
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            out = ttt_linear_bidir(*inputs, chunk_size=sizes.chunk_size, backend=name)
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


def tuned_configs() -> list[dict[str, Any]]:
    """What the tuning chose in this process for bf16 and chunks of 16: {kernel, key, config} for each."""
    found = []
    for kernel, candidates in ((triton_fwd.forward_kernel, triton_fwd.configs), (triton_bwd.backward_kernel, triton_bwd.configs)):
        for key, config in triton_fwd.tuned(kernel, candidates, torch.bfloat16, 16, 64).cache.items():
            found.append({"kernel": kernel.__name__, "key": [str(part) for part in key], "config": describe(config)})
    return found
