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
# in place of the passes, in rows that are not timed; `repro.bench.kernels.find_memory_ratio` has this text written out
MEMORY = "memory of both passes"

# `repro kernels bench` fails where a row of one of these failed
OURS = ("copy", "triton", "torch")
# a step of `planned`: the sizes, the passes, and the name of the implementation
_Step = tuple[Sizes, str, str]
# of `do_bench`: milliseconds of calls before the timed ones, and of timed calls; and the fewest timed calls of a row
_WARMUP_MS, _REPEAT_MS, _MIN_SAMPLES = 100, 400, 10


def planned(cases: Cases, compared: bool = False) -> dict[str, _Step]:
    """Return the steps that are measured of an operator, in order, by their `step_key`.

    At each shape the copy comes first: `measure` compares the other steps with its row. With `compared` these are only
    the steps of the shape at which there are goals. The steps of memory, of TTT-Linear alone, are for the paper's
    Appendix B: the reference under autograd and the kernels, with 8 samples of the shape of the goals.
    """
    steps = [
        (sizes, passes, name)
        for sizes in ([cases.COMPARED] if compared else cases.SHAPES)
        for passes in (FORWARD, BOTH_PASSES)
        for name in ("copy", *cases.implementations(sizes))
    ]
    if cases.NAME == "ttt_linear":
        steps += [(dataclasses.replace(cases.COMPARED, batch=8), MEMORY, name) for name in ("reference", "triton")]
    return {step_key(cases, *step): step for step in steps}


def step_key(cases: Cases, sizes: Sizes, passes: str, name: str) -> str:
    """Return the key of a step among those of its operator."""
    return row_key(cases, {"implementation": name, "passes": passes, **vars(sizes)})


def row_key(cases: Cases, row: Mapping[str, Any]) -> str:
    """Return the `step_key` of the step that made a row, also of a row that was read from a file."""
    return json.dumps([row[name] for name in ("implementation", "passes", *vars(cases.COMPARED))])


def measure(
    cases: Cases, device: torch.device, step: _Step, find: Callable[[str], Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Measure a step of `planned` and return its row.

    `find` returns the row of a `step_key`, for the copy with which the step is compared.

    A row is {operator, implementation, passes, the sizes, dtype, status, median_ms, p20_ms, p80_ms, samples, bytes,
    gflop, gb_per_s, tflop_per_s, share_of_copy_percent, peak_memory_mib}. bytes and gflop follow from the sizes,
    whatever the implementation moves and computes. The share is the time of a device copy of these bytes over the
    row's. The peak is that above the inputs; in a row of `MEMORY` there are no times. `status` is `ok`; or `oom`,
    `failed` or, for a package that is not installed, `unavailable`, with null numbers and the reason.
    """
    sizes, passes, name = step
    row = _blank(cases, name, sizes, passes)
    if cases.PEERS and name in cases.PEERS.names and (reason := cases.missing()):
        return row | {"status": "unavailable", "reason": reason}
    try:
        is_copy = name == "copy"
        call = copy_step(row["bytes"], device) if is_copy else op_step(cases, sizes, name, passes, device)
        call()  # compiles and tunes, which takes memory that the peak must not include
        peak = peak_mib(call, device)
        if passes == MEMORY:
            return row | {"peak_memory_mib": peak}
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
            if passes != FORWARD:
                torch.autograd.grad(out, [x for x in inputs if x is not None], torch.ones_like(out))
    size = read + out.nbytes if passes == FORWARD else 3 * read + 2 * out.nbytes
    return size, counter.get_total_flops()


def copy_step(size: int, device: torch.device) -> Callable[[], Any]:
    """Return a call that reads half of `size` bytes and writes the other half."""
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def op_step(cases: Cases, sizes: Sizes, name: str, passes: str, device: torch.device) -> Callable[[], Any]:
    """Return a call of an implementation: forward under inference mode, or forward and backward with all gradients.

    The output's gradient is made beforehand, except for `MEMORY`, whose peak includes it.
    """
    function, inputs = cases.prepare(name, sizes, device)
    inputs = [x if x is None else x.requires_grad_(passes != FORWARD) for x in inputs]
    dout = None
    if passes == BOTH_PASSES:
        with torch.no_grad():
            dout = torch.ones_like(function(*inputs))

    def forward() -> Tensor:
        with torch.inference_mode():
            return function(*inputs)

    def forward_backward() -> tuple[Tensor, ...]:
        out = function(*inputs)
        leaves = [x for x in inputs if x is not None]
        return torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)

    return forward if passes == FORWARD else forward_backward


def peak_mib(step: Callable[[], Any], device: torch.device) -> float:
    """Return the peak of the memory allocated in a call, in MiB above that allocated before it."""
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - held) / 2**20


def times(step: Callable[[], Any]) -> list[float]:
    """Return the milliseconds of each of at least `_MIN_SAMPLES` calls."""
    taken: list[float] = []
    while len(taken) < _MIN_SAMPLES:
        taken += triton.testing.do_bench(step, warmup=_WARMUP_MS, rep=_REPEAT_MS, return_mode="all")
    return taken


def _blank(cases: Cases, name: str, sizes: Sizes, passes: str) -> dict[str, Any]:
    """Return the row of a step, see `measure`, before anything is measured: its numbers are None, and `status` is ok."""
    row = {"operator": cases.NAME, "implementation": name, "passes": passes, **vars(sizes), "dtype": "bf16"}
    size, flop = count_work(cases, sizes, passes)
    row |= {"status": "ok", "samples": 0, "bytes": size, "gflop": flop / 1e9}
    numbers = "median_ms", "p20_ms", "p80_ms", "gb_per_s", "tflop_per_s", "share_of_copy_percent", "peak_memory_mib"
    return row | dict.fromkeys(numbers)


def _filled(row: dict[str, Any], taken: list[float], copy_ms: float | None, peak_mib: float) -> dict[str, Any]:
    """Return a row of `_blank` with its numbers: from the milliseconds of each call, and of the copy if it has any.

    A number that stays None has its `reason` in the row.
    """
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
