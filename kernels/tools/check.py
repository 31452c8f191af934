"""Are the Triton kernels of TTT-Linear right? Outputs and all gradients against the fp64 reference on the same rounded inputs.

Runs where the kernels run: on a GPU, and in parts on a CPU under Triton's interpreter, which has no bf16 and compiles nothing.
The tests and `repro kernels check` share it; `bench` refuses to time kernels that do not pass.

Shape letters: B samples, T tokens, R directions, H heads, D head width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .. import selected_backend, ttt_linear, ttt_linear_bidir
from ..ttt_linear import triton_bwd, triton_fwd
from ..ttt_linear.reference import ttt_linear_dual
from . import peers

INPUTS = ("q", "k", "v", "lr", "token_scale", "W0", "b0", "ln_weight", "ln_bias")
LENGTHS = (1, 2, 15, 16, 17, 63, 81, 196, 197)
LONG = (4200, 6400)  # 1120 × 960 and 1280 × 1280 pixels
HEADS = (1, 3)
SEEDS = range(5)
EPS = 1e-6
BOTH = (False, True)
PEER_LIMIT = 2e-2  # fp16: it keeps normalised keys, residuals, their means and the kept states in q's dtype
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def limit(name: str, dtype: torch.dtype, tokens: int) -> float:
    """The largest relative error ‖a−b‖/‖b‖ allowed for an output or gradient, by the name of the input it belongs to."""
    if dtype == torch.float32:
        return 1e-3 if name in ("lr", "token_scale") and tokens < 15 else 1e-5
    loose = {torch.float16: 2e-2, torch.bfloat16: 5e-2} if name in ("lr", "token_scale") else {torch.float16: 5e-3, torch.bfloat16: 2e-2}
    return loose[dtype]


def draw(
    seed: int, batch: int, tokens: int, directions: int, heads: int, *, width: int = 64, chunk_size: int = 16, device: Any = "cpu"
) -> list[Tensor]:
    """The nine inputs and a gradient of the output, fp64: q, k, v, dout hold values of bf16, the others values of fp32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    B, T, R, H, D = batch, tokens, directions, heads, width
    q, k, v, dout = (normal(B, T, R, H, D).bfloat16().double() for _ in range(4))
    lr = torch.sigmoid(normal(B, T, H)) / D
    token_scale = 1 / torch.arange(1, chunk_size + 1).double() + normal(R, chunk_size, scale=0.05)
    W0, b0, ln_bias = normal(R, H, D, D, scale=0.05), normal(R, H, D, scale=0.1), normal(R, H, D, scale=0.1)
    ln_weight = normal(R, H, D, scale=0.1, mean=1.0)
    rest = (x.float().double() for x in (lr, token_scale, W0, b0, ln_weight, ln_bias))
    return [x.to(device) for x in (q, k, v, *rest, dout)]


def reference(inputs: Sequence[Tensor], chunk_size: int, reverse: Sequence[bool]) -> dict[str, Tensor]:
    """`out` and the gradient of each input, by autograd through the reference, in the dtype of `inputs` (nine and dout)."""
    *leaves, dout = inputs
    leaves = [x.clone().requires_grad_() for x in leaves]
    q, k, v, lr, *shared = leaves
    outs = [
        ttt_linear_dual(*(x[:, :, r] for x in (q, k, v)), lr, *(x[r] for x in shared), chunk_size=chunk_size, reverse=flag, eps=EPS)
        for r, flag in enumerate(reverse)
    ]
    out = torch.stack(outs, 2)
    return dict(zip(("out", *INPUTS), (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


def kernels(
    inputs: Sequence[Tensor], dtype: torch.dtype, chunk_size: int, reverse: Sequence[bool],
    config: triton.Config | None = None, backward_config: triton.Config | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """As `reference`, by the Triton kernels: q, k, v and dout in `dtype`, the rest in fp32."""
    q, k, v, *rest, dout = inputs
    arguments = [x.to(dtype) for x in (q, k, v)] + [x.float() for x in rest]
    options = chunk_size, reverse, EPS
    out, states = triton_fwd.forward(*arguments, *options, True, config)
    gradients = triton_bwd.backward(dout.to(dtype), states, *arguments, *options, backward_config)
    return dict(zip(("out", *INPUTS), (out, *gradients), strict=True))


def relative_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """‖a−b‖/‖b‖ in fp64 by name; infinite where a value is not finite."""
    errors = {}
    for name, b in want.items():
        error = (got[name].double() - b).norm() / b.norm()
        errors[name] = error.item() if error.isfinite() else float("inf")
    return errors


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch fills what `torch.empty` returns with NaN, so that an element that nobody writes shows; configs are the default ones."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def samples(tokens: int) -> int:
    """At one token the gradient of lr is one number per sample and head, which can cancel between the directions: take more."""
    return max(1, 4 // tokens)


@functools.lru_cache(maxsize=16)
def case(tokens: int, heads: int, seed: int, width: int = 64, chunk_size: int = 16, device: Any = "cpu", reverse: tuple = BOTH):
    """(inputs, what the reference makes of them), fp64."""
    inputs = draw(seed, samples(tokens), tokens, len(reverse), heads, width=width, chunk_size=chunk_size, device=device)
    return inputs, reference(inputs, chunk_size, reverse)


def compare(
    what: str, tokens: int, heads: int, dtype: str, *, seeds: Sequence[int] = SEEDS, width: int = 64, chunk_size: int = 16,
    device: Any = "cpu", reverse: tuple[bool, ...] = BOTH, poisoned: bool = True,
    config: triton.Config | None = None, backward_config: triton.Config | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One row: the worst relative error over the seeds by name, the limits, and whether all hold."""
    worst: dict[str, float] = {}
    for seed in seeds:
        inputs, want = case(tokens, heads, seed, width, chunk_size, device, reverse)
        with poisoned_memory() if poisoned else contextlib.nullcontext():
            got = kernels(inputs, DTYPES[dtype], chunk_size, reverse, config, backward_config)
        errors = relative_errors(got, want)
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
    limits = {name: limit(name, DTYPES[dtype], tokens) for name in worst}
    return _row(what, tokens, heads, dtype, width, chunk_size, config or backward_config) | _judged(worst, limits)


def repeated(tokens: int, heads: int, dtype: str, device: Any, *configs: triton.Config | None) -> dict[str, Any]:
    """One row: whether two runs give the same bits."""
    inputs, _ = case(tokens, heads, 0, device=device)
    with poisoned_memory():
        first, second = (kernels(inputs, DTYPES[dtype], 16, BOTH, *configs) for _ in range(2))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    return {**_row("two runs give the same bits", tokens, heads, dtype, 64, 16, next(filter(None, configs), None)), "passed": equal}


def compiled_op(device: Any) -> dict[str, Any]:
    """One row: the operator under torch.compile(fullgraph=True) and bf16 autocast gives the bits of the same call without."""
    *inputs, dout = draw(0, 2, 197, 2, 3, device=device)
    leaves = [x.float().requires_grad_() for x in inputs]

    def step(*x: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return ttt_linear_bidir(*x, backend="triton")

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return {**_row("torch.compile(fullgraph=True)", 197, 3, "fp32", 64, 16, None), "passed": equal}


def peer(kind: str, device: Any, tokens: int = 250, heads: int = 3) -> dict[str, Any]:
    """One row: flash-linear-attention against the kernels where both compute the same, lr constant within a chunk; fp16."""
    dtype = "fp16"
    row = _row(f"flash-linear-attention's {kind}_ttt_linear gives the same", tokens, heads, dtype, 64, 16, None)
    if not peers.installed():
        return row | {"passed": None, "reason": "flash-linear-attention is not installed (the extra `bench`)"}
    q, k, v, lr, *shared, dout = draw(0, 2, tokens, 1, heads, device=device)
    q, k, v, dout = (x[:, :, 0].to(DTYPES[dtype]) for x in (q, k, v, dout))
    leaves = [x.requires_grad_() for x in (q, k, v, lr[:, ::16].float(), *(x[0].float() for x in shared))]
    results = []
    for function in (functools.partial(ttt_linear, backend="triton"), functools.partial(peers.out, kind, chunk_size=16)):
        per_token = leaves[3].repeat_interleave(16, 1)[:, :tokens]
        out = function(*leaves[:3], per_token, *leaves[4:])
        results.append(dict(zip(("out", *INPUTS), (out, *torch.autograd.grad(out, leaves, dout)), strict=True)))
    ours, theirs = results
    return row | _judged(relative_errors(theirs, ours), dict.fromkeys(ours, PEER_LIMIT))


def describe(config: triton.Config) -> dict[str, int]:
    """A config as it stands in a result; without maxnreg the compiler is free."""
    chosen = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg}
    return {name: value for name, value in chosen.items() if value is not None}


def _row(what, tokens, heads, dtype, width, chunk_size, config) -> dict[str, Any]:
    row = {"check": what, "tokens": tokens, "heads": heads, "dtype": dtype, "head_dim": width, "chunk_size": chunk_size}
    return row | ({"config": describe(config)} if config else {})


def rows(device: Any) -> Iterator[dict[str, Any]]:
    """Every check that this device can run, one row each, as they are done.

    A row that fails, or breaks off with an error, has `passed` False; one that could not be run has None, and a reason.
    """
    for what, check, arguments, options in _plan(device):
        try:
            yield check(*arguments, **options)
        except Exception as error:  # one that breaks must neither hide the others nor lose the record
            yield {"check": what, **failure(error), "passed": False}
    case.cache_clear()


def _plan(device: Any) -> Iterator[tuple[str, Callable[..., dict[str, Any]], tuple, dict[str, Any]]]:
    """What to call: the name of a row that breaks off, the function, its arguments and options."""
    interpreted = triton_fwd.INTERPRETED
    dtypes = [name for name in DTYPES if not (interpreted and name == "bf16")]

    def compared(what: str, tokens: int, heads: int, dtype: str, **options: Any):
        return f"{what}, T {tokens}, heads {heads}, {dtype}", compare, (what, tokens, heads, dtype), {"device": device, **options}

    def twice(dtype: str, *configs: triton.Config | None):
        return f"two runs, {dtype}", repeated, (197, 3, dtype, device, *configs), {}

    for tokens in LENGTHS:
        for heads in HEADS:
            for dtype in dtypes:
                yield compared("default config, memory filled with NaN", tokens, heads, dtype)
    for chunk_size in triton_fwd.CHUNK_SIZES:
        for dtype in dtypes:
            if selected_backend("auto", device, chunk_size=chunk_size, dtype=DTYPES[dtype]) == "triton" or interpreted:
                yield compared("chunk size", 81, 1, dtype, chunk_size=chunk_size, seeds=[0])
    for width in triton_fwd.WIDTHS:
        for dtype in dtypes:
            if selected_backend("auto", device, head_dim=width, dtype=DTYPES[dtype]) == "triton" or interpreted:
                yield compared("head width", 81, 1, dtype, width=width, seeds=[0])
    yield twice(dtypes[-1])
    if interpreted:
        return
    for dtype in dtypes:
        for config in triton_fwd.configs(DTYPES[dtype], 16):
            yield compared("a config of the forward kernel", 197, 3, dtype, seeds=[0], config=config)
            yield twice(dtype, config, None)
        for config in triton_bwd.configs(DTYPES[dtype], 16):
            yield compared("a config of the backward kernel", 197, 3, dtype, seeds=[0], backward_config=config)
            yield twice(dtype, None, config)
        yield compared("tuned", 197, 3, dtype, seeds=[0], poisoned=False)
    for tokens in LONG:
        for dtype in ("fp32", "bf16"):
            yield compared("long, gradients finite", tokens, 3, dtype, seeds=[0])
    yield "torch.compile(fullgraph=True)", compiled_op, (device,), {}
    for kind in peers.KINDS:
        yield f"flash-linear-attention's {kind}_ttt_linear", peer, (kind, device), {}


def _judged(errors: dict[str, float], limits: dict[str, float]) -> dict[str, Any]:
    return {
        "errors": {name: error for name, error in errors.items() if error < float("inf")},
        "not_finite": [name for name, error in errors.items() if error == float("inf")],
        "limits": limits,
        "passed": all(errors[name] < limits[name] for name in errors),
    }


def failure(error: Exception) -> dict[str, str]:
    """The reason of a row that broke off, in one line."""
    return {"reason": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
