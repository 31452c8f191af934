"""Correctness of the Triton kernels: outputs and all gradients against the fp64 reference on the same rounded inputs.

The checks run where the kernels run: on a GPU, and in part on a CPU under Triton's interpreter, which has no bf16 and
compiles nothing. The tests and `repro kernels check` share them, and `bench` refuses to time kernels that do not pass.
The parts of one operator are in its `cases.Cases`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import triton_launch
from .cases import DEFAULT, DTYPES, Cases, Configs, Sizes, describe_config

# a check: its name if it breaks off, and the call that makes its row
Check = tuple[str, Callable[[], dict[str, Any]]]
PEER_LIMIT = 2e-2  # relative error of other people's kernels in fp16


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Return ‖got − want‖ / ‖want‖ in fp64, infinite where a value is not finite.

    The norm in the denominator is at least `floor`.
    """
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=floor)
    return error.item() if error.isfinite() else float("inf")


def relative_errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor], floor: float = 0.0) -> dict[str, float]:
    """Return the `relative_error` of each tensor by name."""
    return {name: relative_error(got[name], tensor, floor) for name, tensor in want.items()}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill with NaN all memory that `torch.empty` returns, to reveal an element that is never written.

    A context manager. It sets torch's deterministic mode, in which kernels run in their default configs.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def differentiate(cases: Cases, inputs: Sequence[Tensor | None], sizes: Sizes, backend: str) -> dict[str, Tensor]:
    """Return `out` and the gradient of each input by name, from the public operator.

    `inputs` are its inputs and dout.
    """
    *leaves, dout = inputs
    leaves = [x if x is None else x.detach().requires_grad_() for x in leaves]
    given = {name: x for name, x in zip(cases.INPUTS, leaves, strict=True) if x is not None}
    out = cases.bind(sizes)(*leaves, backend=backend)
    gradients = torch.autograd.grad(out, list(given.values()), dout.to(out.dtype))
    return dict(zip(("out", *given), (out.detach(), *gradients), strict=True))


def run_kernels(
    cases: Cases, inputs: Sequence[Tensor], dtype: torch.dtype, sizes: Sizes, configs: Configs = DEFAULT
) -> dict[str, Tensor]:
    """As `differentiate`, by the Triton kernels themselves, of inputs that are cast to `dtype`."""
    *arguments, dout = cases.cast(inputs, dtype)
    results = cases.kernels(cases.arguments(arguments, sizes), dout, configs)
    return {name: x for name, x in zip(("out", *cases.INPUTS), results, strict=True) if x is not None}


@functools.lru_cache(maxsize=16)
def draw_case(cases: Cases, sizes: Sizes, seed: int, device: Any = "cpu") -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the inputs and dout, and the reference's output and gradients, all in fp64.

    Later calls return the same tensors, so callers must neither write to them nor set `requires_grad`.
    """
    inputs = cases.draw(seed, sizes, device)
    return inputs, differentiate(cases, inputs, sizes, "reference")


def compare(
    cases: Cases,
    what: str,
    sizes: Sizes,
    dtype: str,
    *,
    seeds: Sequence[int] = (0,),
    device: Any = "cpu",
    poisoned: bool = True,
    configs: Configs = DEFAULT,
) -> dict[str, Any]:
    """Return a row: the worst relative error over the seeds by name, the limits, and whether all hold.

    `poisoned`: run in `poisoned_memory`, which also keeps kernels from being tuned.
    """
    worst: dict[str, float] = {}
    for seed in seeds:
        inputs, want = draw_case(cases, sizes, seed, device)
        with poisoned_memory() if poisoned else contextlib.nullcontext():
            got = run_kernels(cases, inputs, DTYPES[dtype], sizes, configs)
        errors = relative_errors(got, want, cases.FLOOR)
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
    limits = {name: cases.limit(name, DTYPES[dtype], sizes) for name in worst}
    return make_row(cases, what, sizes, dtype, configs) | judge_errors(worst, limits)


def repeat(cases: Cases, sizes: Sizes, dtype: str, device: Any, configs: Configs = DEFAULT) -> dict[str, Any]:
    """Return a row: whether two runs give the same bits."""
    inputs, _ = draw_case(cases, sizes, 0, device)
    with poisoned_memory():
        first, second = (run_kernels(cases, inputs, DTYPES[dtype], sizes, configs) for _ in range(2))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    return make_row(cases, "two runs give the same bits", sizes, dtype, configs) | {"passed": equal}


def compile_op(cases: Cases, sizes: Sizes, device: Any) -> dict[str, Any]:
    """Return a row: whether torch.compile(fullgraph=True) gives the bits of the same call without it.

    Both run under bf16 autocast.
    """
    *inputs, dout = cases.draw(0, sizes, device)
    leaves = [x.float().requires_grad_() for x in inputs]
    operator = cases.bind(sizes)

    def step(*x: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return operator(*x, backend="triton")

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return make_row(cases, "torch.compile(fullgraph=True)", sizes, "fp32") | {"passed": equal}


def make_row(cases: Cases, what: str, sizes: Sizes, dtype: str, configs: Configs = DEFAULT) -> dict[str, Any]:
    """Return the fields of every row: {operator, check, the sizes, dtype}, and `config` where one is given."""
    row = {"operator": cases.NAME, "check": what, **vars(sizes), "dtype": dtype}
    chosen = [describe_config(config) for config in configs if config]
    return row | ({"config": chosen[0]} if chosen else {})


def judge_errors(errors: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the verdict of a row: {errors, not_finite, limits, passed}."""
    return {
        "errors": {name: error for name, error in errors.items() if error < float("inf")},
        "not_finite": [name for name, error in errors.items() if error == float("inf")],
        "limits": dict(limits),
        "passed": all(errors[name] < limits[name] for name in errors),
    }


def compare_peer(cases: Cases, name: str, device: Any) -> dict[str, Any]:
    """Return a row: whether other people's kernels give in fp16 the same as ours, one of their `checks`."""
    sizes, run = cases.PEERS.checks[name]
    row = make_row(cases, f"{name} gives the same", sizes, "fp16")
    if reason := cases.missing():
        return row | {"passed": None, "reason": reason}
    theirs, ours = (dict(zip(("out", *cases.INPUTS), results, strict=True)) for results in run(cases, sizes, device))
    return row | judge_errors(relative_errors(theirs, ours), dict.fromkeys(ours, PEER_LIMIT))


def failure(error: Exception) -> dict[str, str]:
    """Return the reason of a row that broke off, in one line."""
    return {"reason": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def check_one(cases: Cases, what: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a `Check` and return its row.

    A row that fails, or breaks off with an error, has `passed` False; one that could not be run has None, and a reason.
    """
    try:
        return run()
    except Exception as error:  # a check that breaks off must not hide the others, and its row is recorded
        return {"operator": cases.NAME, "check": what, **failure(error), "passed": False}


def planned(cases: Cases, device: Any) -> Iterator[Check]:
    """Yield every check of an operator that this device can run, see `Check`.

    Their order is the same in every process and call: `repro.bench.kernels` passes a check to a worker by its number,
    and continues an interrupted call with the numbers that it lacks. Of most operators `repro.bench.campaign` makes only
    the first four before it measures: what models run stands in front.
    """
    interpreted = triton_launch.INTERPRETED
    dtypes = [name for name in DTYPES if not (interpreted and name == "bf16")]

    def comparison(what: str, sizes: Sizes, dtype: str, **options: Any) -> Check:
        return f"{what}, {sizes}, {dtype}", partial(compare, cases, what, sizes, dtype, device=device, **options)

    def repetition(dtype: str, configs: Configs = DEFAULT) -> Check:
        return f"two runs, {dtype}", partial(repeat, cases, cases.TYPICAL, dtype, device, configs)

    if not interpreted:  # first the kernels as models run them, tuned in bf16
        yield comparison("tuned", cases.TYPICAL, "bf16", poisoned=False)
    for case in cases.CASES:
        for dtype in case.dtypes if not (interpreted and case.on_gpu_alone) else ():
            # in some dtypes not every size fits every GPU, and is then left out
            if dtype in dtypes and (interpreted or cases.select("auto", case.sizes, DTYPES[dtype], device) == "triton"):
                yield comparison(case.what, case.sizes, dtype, seeds=case.seeds)
    yield repetition(dtypes[-1])
    if interpreted:
        return
    for dtype in dtypes:
        forward, backward = cases.configs(DTYPES[dtype])
        candidates = [("forward", (config, None)) for config in forward]
        candidates += [("backward", (None, config)) for config in backward]
        for which, configs in candidates:
            yield comparison(f"a config of the {which} kernel", cases.TYPICAL, dtype, configs=configs)
            yield repetition(dtype, configs)
        if dtype != "bf16":
            yield comparison("tuned", cases.TYPICAL, dtype, poisoned=False)
    yield "torch.compile(fullgraph=True)", partial(compile_op, cases, cases.TYPICAL, device)
    for name in cases.PEERS.checks if cases.PEERS else ():
        yield name, partial(compare_peer, cases, name, device)
