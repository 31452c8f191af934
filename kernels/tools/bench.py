"""Speed of the kernels on this GPU, compared with the torch backend, other people's kernels, and a device copy.

Inputs are as a layer gives them: activations in bf16, parameters in fp32, both directions. The parts of one operator,
such as other people's kernels and the form in which they get the same work, are in its `cases.Cases`.

Times are CUDA events around each call, with the second-level cache cleared before it. Work that is shorter than the
tens of microseconds that Python needs for a launch shows that time instead: at T = 196 all implementations do. Results
are checked by `check`, not here.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from .cases import Cases, Sizes
from .check import failure

FORWARD, BOTH_PASSES = "forward", "forward+backward"

OURS = ("copy", "triton", "torch")
# in place of the passes, in rows that are not timed; `repro.bench.kernels.find_memory_ratio` has this text written out
MEMORY = "memory of both passes"
MEASURED_OF_MEMORY = ("reference", "triton")
# a step of `planned`: the sizes, the passes, and the name of the implementation
_Step = tuple[Sizes, str, str]
WARMUP_MS, REPEAT_MS, MIN_SAMPLES = 100, 400, 10


def planned(cases: Cases, compared: bool = False) -> dict[str, _Step]:
    """Return the steps that are timed of an operator, in order, by their `step_key`.

    At each shape the copy comes first: `measure` compares the other steps with its row. With `compared` these are only
    the steps of the shape at which there are goals.
    """
    shapes = [cases.COMPARED] if compared else cases.SHAPES
    return {
        step_key(cases, sizes, passes, name): (sizes, passes, name)
        for sizes in shapes
        for passes in (FORWARD, BOTH_PASSES)
        for name in ("copy", *cases.implementations(sizes))
    }


def step_key(cases: Cases, sizes: Sizes, passes: str, name: str) -> str:
    """Return the key of a step among those of its operator."""
    return row_key(cases, {"implementation": name, "passes": passes, **vars(sizes)})


def row_key(cases: Cases, row: Mapping[str, Any]) -> str:
    """Return the `step_key` of the step that made a row, also of a row that was read from a file."""
    return json.dumps([row[name] for name in ("implementation", "passes", *vars(cases.COMPARED))])


def measure(
    cases: Cases, device: torch.device, step: _Step, find: Callable[[str], Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Time a step of `planned` and return its row.

    `find` returns the row of a `step_key`, for the copy with which the step is compared.

    A row is {operator, implementation, passes, the sizes, dtype, status, median_ms, p20_ms, p80_ms, samples, bytes,
    gflop, gb_per_s, tflop_per_s, share_of_copy_percent, peak_memory_mib}. bytes and gflop follow from the sizes,
    whatever the implementation moves and computes. The share is the time of a device copy of these bytes over the
    row's. The peak is that above the inputs. `status` is `ok`; or `oom`, `failed` or, for a package that is not
    installed, `unavailable`, with null numbers and the reason.
    """
    sizes, passes, name = step
    row = _blank(cases, name, sizes, passes)
    if name not in OURS and (reason := cases.missing()):
        return row | {"status": "unavailable", "reason": reason}
    try:
        is_copy = name == "copy"
        call = copy_step(row["bytes"], device) if is_copy else op_step(cases, sizes, name, passes, device)
        call()  # compiles and tunes, which takes memory that the peak must not include
        peak = peak_mib(call, device)
        copied = find(step_key(cases, sizes, passes, "copy")) or {}
        return _filled(row, times(call), copied.get("median_ms"), peak)
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return row | {"status": "oom"} | failure(error)
    # an exception of an implementation, ours or a peer's, costs its own row and not an hour of measuring
    except Exception as error:
        return row | {"status": "failed"} | failure(error)


@functools.cache
def count_work(cases: Cases, sizes: Sizes, passes: str) -> tuple[int, int]:
    """Return the least bytes read and written, in bf16, and the FLOPs, 2 per multiply-add, by the operator's formulas.

    The bytes of a forward pass are those of the inputs and the output; with the backward pass, also those of the
    inputs, the output's gradient and the inputs' gradients. Tensors that all images share are left out. A backward pass
    counts without its repetition of the forward pass.
    """
    with FakeTensorMode():
        small, inputs = (cases.layer_inputs(dataclasses.replace(sizes, batch=n), "cpu") for n in (1, sizes.batch + 1))
        # the difference between batches of B + 1 and 1 leaves out the tensors that images share
        read = sum(b.nbytes - a.nbytes for a, b in zip(small, inputs, strict=True) if b is not None)
        inputs = [x if x is None else x.requires_grad_() for x in cases.layer_inputs(sizes, "cpu")]
        with FlopCounterMode(display=False) as counter:
            out = cases.bind(sizes)(*inputs, backend="torch")
            if passes == BOTH_PASSES:
                torch.autograd.grad(out, [x for x in inputs if x is not None], torch.ones_like(out))
    return read * (3 if passes == BOTH_PASSES else 1) + out.nbytes * (
        2 if passes == BOTH_PASSES else 1
    ), counter.get_total_flops()


def copy_step(size: int, device: torch.device) -> Callable[[], Any]:
    """Return a call that reads half of `size` bytes and writes the other half."""
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def op_step(cases: Cases, sizes: Sizes, name: str, passes: str, device: torch.device) -> Callable[[], Any]:
    """Return a call of an implementation: forward under inference mode, or forward and backward with all gradients."""
    function, inputs = cases.prepare(name, sizes, device)
    inputs = [x if x is None else x.requires_grad_(passes == BOTH_PASSES) for x in inputs]
    with torch.no_grad():
        dout = torch.ones_like(function(*inputs))

    def forward() -> Tensor:
        with torch.inference_mode():
            return function(*inputs)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*inputs), [x for x in inputs if x is not None], dout)

    return forward if passes == FORWARD else forward_backward


def peak_mib(step: Callable[[], Any], device: torch.device) -> float:
    """Return the peak of the memory allocated in a call, in MiB above that allocated before it."""
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - held) / 2**20


def times(step: Callable[[], Any]) -> list[float]:
    """Return the milliseconds of each of at least `MIN_SAMPLES` calls."""
    taken: list[float] = []
    while len(taken) < MIN_SAMPLES:
        taken += triton.testing.do_bench(step, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="all")
    return taken


def _blank(cases: Cases, name: str, sizes: Sizes, passes: str) -> dict[str, Any]:
    row = {"operator": cases.NAME, "implementation": name, "passes": passes, **vars(sizes), "dtype": "bf16"}
    size, flop = count_work(cases, sizes, FORWARD if passes == FORWARD else BOTH_PASSES)
    row |= {"status": "ok", "samples": 0, "bytes": size, "gflop": flop / 1e9}
    numbers = "median_ms", "p20_ms", "p80_ms", "gb_per_s", "tflop_per_s", "share_of_copy_percent", "peak_memory_mib"
    return row | dict.fromkeys(numbers)


def _filled(row: dict[str, Any], taken: list[float], copy_ms: float | None, peak_mib: float) -> dict[str, Any]:
    low, median, high = (torch.tensor(taken).quantile(p).item() for p in (0.2, 0.5, 0.8))
    row = row | {"median_ms": median, "p20_ms": low, "p80_ms": high, "samples": len(taken), "peak_memory_mib": peak_mib}
    row["gb_per_s"] = row["bytes"] / median / 1e6
    if row["implementation"] == "copy":
        reason = "the row is the copy itself: it computes nothing, and the shares refer to it"
        return row | {"gflop": None, "reason": reason}
    row["tflop_per_s"] = row["gflop"] / median
    if copy_ms is None:
        return row | {"reason": "the copy could not be measured"}
    return row | {"share_of_copy_percent": 100 * copy_ms / median}


def _memory_sizes(cases: Cases) -> Sizes:
    return dataclasses.replace(cases.COMPARED, batch=8)


def list_memory_keys(cases: Cases) -> list[str]:
    """Return the `row_key` of each row of `measure_memory`."""
    return [step_key(cases, _memory_sizes(cases), MEMORY, name) for name in MEASURED_OF_MEMORY]


def measure_memory(cases: Cases, device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of the peak memory of both passes above the inputs, for Appendix B.

    There are two, of the reference under autograd and of the kernels, with 8 samples of the shape of the goals. One
    that does not fit has the status `oom`, and one that breaks `failed`.
    """
    sizes = _memory_sizes(cases)
    rows = []
    for name in MEASURED_OF_MEMORY:
        row = _blank(cases, name, sizes, MEMORY)
        inputs = [x.requires_grad_() for x in cases.layer_inputs(sizes, device)]

        def differentiate(name: str = name, inputs: list[Tensor] = inputs) -> None:
            out = cases.bind(sizes)(*inputs, backend=name)
            torch.autograd.grad(out, inputs, torch.ones_like(out))

        try:
            differentiate()  # a tuner that runs now takes memory of its own
            rows.append(row | {"peak_memory_mib": peak_mib(differentiate, device)})
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            rows.append(row | {"status": "oom"} | failure(error))
        except Exception as error:  # as in `measure`
            rows.append(row | {"status": "failed"} | failure(error))
    return rows
