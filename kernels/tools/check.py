"""Are the Triton kernels right? Outputs and all gradients against the fp64 reference on the same rounded inputs.

Runs where the kernels run: on a GPU, and in parts on a CPU under Triton's interpreter, which has no bf16 and compiles nothing.
The tests and `repro kernels check` share it; `bench` refuses to time kernels that do not pass. What belongs to an operator is in
its module of cases, see `operators`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

SEEDS = range(5)
BOTH = (False, True)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def relative_errors(got: dict[str, Tensor], want: dict[str, Tensor], floor: float = 0.0) -> dict[str, float]:
    """‖a−b‖/‖b‖ in fp64 by name, of a norm of at least `floor`; infinite where a value is not finite."""
    errors = {}
    for name, b in want.items():
        error = (got[name].double() - b).norm() / b.norm().clamp(min=floor)
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


@functools.lru_cache(maxsize=16)
def case(cases: ModuleType, sizes: Any, seed: int, device: Any = "cpu") -> tuple[list[Tensor], dict[str, Tensor]]:
    """(inputs and a gradient of the output, what the reference makes of them), fp64."""
    inputs = cases.draw(seed, sizes, device)
    return inputs, cases.reference(inputs, sizes)


def compare(
    cases: ModuleType,
    what: str,
    sizes: Any,
    dtype: str,
    *,
    seeds: Sequence[int] = SEEDS,
    device: Any = "cpu",
    poisoned: bool = True,
    config: triton.Config | None = None,
    backward_config: triton.Config | None = None,
) -> dict[str, Any]:
    """One row: the worst relative error over the seeds by name, the limits, and whether all hold."""
    worst: dict[str, float] = {}
    for seed in seeds:
        inputs, want = case(cases, sizes, seed, device)
        with poisoned_memory() if poisoned else contextlib.nullcontext():
            got = cases.kernels(inputs, DTYPES[dtype], sizes, config, backward_config)
        errors = relative_errors(got, want, cases.FLOOR)
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
    limits = {name: cases.limit(name, DTYPES[dtype], sizes) for name in worst}
    return row(cases.NAME, what, sizes, dtype, config or backward_config) | judged(worst, limits)


def repeated(cases: ModuleType, sizes: Any, dtype: str, device: Any, *configs: triton.Config | None) -> dict[str, Any]:
    """One row: whether two runs give the same bits."""
    inputs, _ = case(cases, sizes, 0, device)
    with poisoned_memory():
        first, second = (cases.kernels(inputs, DTYPES[dtype], sizes, *configs) for _ in range(2))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    return row(cases.NAME, "two runs give the same bits", sizes, dtype, next(filter(None, configs), None)) | {"passed": equal}


def compiled_op(cases: ModuleType, sizes: Any, device: Any) -> dict[str, Any]:
    """One row: the operator under torch.compile(fullgraph=True) and bf16 autocast gives the bits of the same call without."""
    *inputs, dout = cases.draw(0, sizes, device)
    leaves = [x.float().requires_grad_() for x in inputs]

    def step(*x: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return cases.OP(*x, backend="triton")

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return row(cases.NAME, "torch.compile(fullgraph=True)", sizes, "fp32") | {"passed": equal}


def options(config: triton.Config) -> dict[str, int]:
    """What a config says to the compiler; without maxnreg it is free."""
    chosen = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg}
    return {name: value for name, value in chosen.items() if value is not None}


def describe(config: triton.Config) -> dict[str, int]:
    """A config as it stands in a result: its constants and `options`."""
    return {**config.kwargs, **options(config)}


def row(operator: str, what: str, sizes: Any, dtype: str, config: triton.Config | None = None) -> dict[str, Any]:
    """What every row says: {operator, check, the sizes, dtype, and of a config that is not the default one, config}."""
    return {"operator": operator, "check": what, **vars(sizes), "dtype": dtype} | ({"config": describe(config)} if config else {})


def judged(errors: dict[str, float], limits: dict[str, float]) -> dict[str, Any]:
    """The verdict of a row: {errors, not_finite, limits, passed}."""
    return {
        "errors": {name: error for name, error in errors.items() if error < float("inf")},
        "not_finite": [name for name, error in errors.items() if error == float("inf")],
        "limits": limits,
        "passed": all(errors[name] < limits[name] for name in errors),
    }


def failure(error: Exception) -> dict[str, str]:
    """The reason of a row that broke off, in one line."""
    return {"reason": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def rows(cases: ModuleType, device: Any) -> Iterator[dict[str, Any]]:
    """Every check of an operator that this device can run, one row each, as they are done.

    A row that fails, or breaks off with an error, has `passed` False; one that could not be run has None, and a reason.
    """
    for what, check, arguments, asked in _plan(cases, device):
        try:
            yield check(*arguments, **asked)
        except Exception as error:  # one that breaks must neither hide the others nor lose the record
            yield {"operator": cases.NAME, "check": what, **failure(error), "passed": False}
    case.cache_clear()


def _plan(cases: ModuleType, device: Any) -> Iterator[tuple[str, Callable[..., dict[str, Any]], tuple, dict[str, Any]]]:
    """What to call: the name of a row that breaks off, the function, its arguments and options."""
    interpreted = cases.triton_fwd.INTERPRETED
    dtypes = [name for name in DTYPES if not (interpreted and name == "bf16")]

    def compared(what: str, sizes: Any, dtype: str, **asked: Any):
        return f"{what}, {sizes}, {dtype}", compare, (cases, what, sizes, dtype), {"device": device, **asked}

    def twice(dtype: str, *configs: triton.Config | None):
        return f"two runs, {dtype}", repeated, (cases, cases.TYPICAL, dtype, device, *configs), {}

    for sizes in cases.ragged(interpreted):
        for dtype in dtypes:
            yield compared("default config, memory filled with NaN", sizes, dtype)
    for what, sizes in cases.variants():
        for dtype in dtypes:
            if interpreted or cases.selected(sizes, DTYPES[dtype], device) == "triton":
                yield compared(what, sizes, dtype, seeds=[0])
    yield twice(dtypes[-1])
    if interpreted:
        return
    for dtype in dtypes:
        forward, backward = cases.configs(DTYPES[dtype])
        for config in forward:
            yield compared("a config of the forward kernel", cases.TYPICAL, dtype, seeds=[0], config=config)
            yield twice(dtype, config, None)
        for config in backward:
            yield compared("a config of the backward kernel", cases.TYPICAL, dtype, seeds=[0], backward_config=config)
            yield twice(dtype, None, config)
        yield compared("tuned", cases.TYPICAL, dtype, seeds=[0], poisoned=False)
    for sizes in cases.LONG:
        for dtype in ("fp32", "bf16"):
            yield compared("long, gradients finite", sizes, dtype, seeds=[0])
    yield "torch.compile(fullgraph=True)", compiled_op, (cases, cases.COMPILED, device), {}
    yield from cases.peer_checks(device)
