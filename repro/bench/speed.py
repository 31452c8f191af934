"""Throughput, latency and peak memory of one model: one row, measured in a fresh process.

A fresh process keeps rows from affecting each other's memory and speed. On a CPU it is forked from a server process
that has imported the modules of all rows and computed nothing, because the imports take longer than most rows. On a GPU
it is spawned, because CUDA does not survive a fork. A row that runs out of memory or time is recorded as such; its
batch is never made smaller.
"""

import contextlib
import ctypes
import dataclasses
import gc
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal

import repro

from ..core.children import leave_with_parent
from .pooling import median_interval

SLOW_STEP_S = 2.0  # a model with a longer median step is timed over SLOW_STEPS steps only
SLOW_STEPS = 3
WARM_UP_S = 1.0
_SMALL_SIDE = 64  # pixels; side of the image that loads a CPU's libraries before the baseline of memory is read
_ALLOCATION_ERRORS = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
_OUT_OF_MEMORY = ("out of memory", "not enough memory", *_ALLOCATION_ERRORS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpec:
    """The specification of one row. Values are not checked here, but in params.yaml or on the command line.

    A new field that changes the time must be in `sweep.row_key` and `rows.COLUMNS`, too: equal keys replace each other.

    Args:
        model: a name that timm knows after `import repro.models`.
        options: keyword arguments of the model.
        attention: `fused` or `unfused` for models with softmax attention, None for the others.
        image_size: (H, W) in pixels.
        batch_size: images of a step.
        dtype: dtype of weights and inputs, without autocast. TF32 is off, so fp32 means fp32.
        device: `cpu` or `cuda`.
        backend: the implementation of the family's operator, see `kernels`; models without such an operator ignore it.
        mode: `infer` runs a forward pass under inference mode; `train` runs forward, backward and a step of AdamW.
        compile: whether to use `torch.compile` with its defaults; `graphs` uses its mode reduce-overhead with CUDA
            graphs, for inference.
        steps: timed steps, at least 10; cut to three if the median step takes longer than 2 s.
        warmup: the least number of untimed steps. They last at least one second, and end early at a step longer than
            2 s.
        budget_s: wall-clock limit of the whole row in seconds, including the start of the process.
        threads: CPU threads; None keeps PyTorch's choice.
    """

    model: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    attention: Literal["fused", "unfused"] | None = None
    image_size: tuple[int, int]
    batch_size: int = 1
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    backend: str = "auto"
    mode: Literal["infer", "train"] = "infer"
    compile: bool | Literal["graphs"] = False
    steps: int = 10
    warmup: int = 2
    budget_s: float = 60.0
    threads: int | None = None

    @property
    def row_id(self) -> str:
        """Return the row's name in results, e.g. `deit_tiny_patch16_224[attention=unfused]@224`."""
        shown = self.options if self.attention is None else {**self.options, "attention": self.attention}
        return row_id(self.model, shown, self.image_size)


def row_id(model: str, options: Mapping[str, Any], image_size: tuple[int, int]) -> str:
    """Return the name of a row in results: `model[name=value,...]@224`, or `@HxW` for an image that is not square."""
    listed = ",".join(f"{name}={value}" for name, value in options.items())
    height, width = image_size
    return f"{model}{f'[{listed}]' if listed else ''}@{height if height == width else f'{height}x{width}'}"


def measure(spec: RowSpec) -> dict[str, Any]:
    """Measure one row in a fresh process.

    Returns:
        {model, options, attention, attention_kernel, image_size, batch_size, dtype, device, backend, mode, compile,
        num_params, macs_g, throughput_img_per_s, latency_ms, latency_ms_ci95, peak_memory_mib, peak_memory_method,
        status, steps, samples_ms}. A measured row also has {threads, cores, load_average}, the last one being the
        machine's load over the minute before, if the system tells it. `latency_ms` is the median over the steps,
        `latency_ms_ci95` its `median_interval`, and the throughput is the batch size over the latency.
        `attention_kernel` names the fused kernel that PyTorch chose, or is `none`. `status` is `ok`, `oom` or
        `timeout`. For the latter two, unmeasured fields are None and `reason` explains the failure.

    Raises:
        RuntimeError: the process ended in any other way; the message is one line that names the row.
    """
    context = _open_context(spec.device)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("w+", errors="replace") as messages, receiver:
        process = context.Process(target=_answer, args=(spec, sender, messages.name), daemon=False)
        try:
            with sender, _hide_script():
                process.start()
            if not connection.wait([receiver, process.sentinel], spec.budget_s):
                return unmeasured_row(spec, "timeout", f"over the row's budget of {spec.budget_s:g} s")
            with contextlib.suppress(EOFError, OSError):  # the process ended before it had sent a whole row
                if receiver.poll():
                    row = receiver.recv()
                    process.join(5.0)  # time for the process to stop workers that libraries started
                    return row
            process.join()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{spec.row_id}: the measuring process did not start: {error!r}") from None
        finally:
            if process.pid:
                process.kill()
                process.join()
        last_line = (messages.read().strip().splitlines() or ["no message"])[-1].strip()
    code = process.exitcode
    if code == -signal.SIGKILL:
        return unmeasured_row(spec, "oom", "the process was killed, as the kernel does when memory runs out")
    end = f"exit code {code}" if code >= 0 else f"signal {-code}"
    raise RuntimeError(f"{spec.row_id}: the measuring process ended with {end}: {last_line}")


def _open_context(device: str) -> BaseContext:
    """Return the context that starts a row's process: a fork server on a Linux CPU, else spawn.

    The fork server keeps the environment variables that it had at the first row.
    """
    if device != "cpu" or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    forkserver.set_forkserver_preload(["repro.bench.speed", "repro.bench.flops", "repro.models"])
    with contextlib.chdir(Path(repro.__file__).resolve().parents[1]):  # the server imports `repro` from where it starts
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def _hide_script() -> Iterator[None]:
    """Keep processes that start within the context from importing this script, `__main__`, and doing its work again."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def read_load() -> dict[str, Any]:
    """Read {cores, load_average}: the machine's cores, and its load over the last minute if the system tells it."""
    load = {"load_average": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    return {"cores": os.cpu_count(), **load}


def describe_samples(samples: list[float]) -> dict[str, Any]:
    """Summarise milliseconds of single steps as {status, latency_ms, latency_ms_ci95, samples_ms}, see `measure`."""
    interval = median_interval(samples)
    row = {"status": "ok", "latency_ms": statistics.median(samples), "latency_ms_ci95": interval and list(interval)}
    row["samples_ms"] = [round(sample, 4) for sample in samples]
    if interval is None:
        few = f"{len(samples)} samples are too few for a 95 % interval"
        row["latency_ms_ci95_reason"] = f"{few}; they are cut where a step takes over {SLOW_STEP_S:g} s"
    return row


def time_in_turn(
    steps: Mapping[str, Callable[[], Any]], device: str, turns: int, *, turn_ms: float = 0.0, fewest: int | None = None
) -> dict[str, list[float]]:
    """Time all steps in turns, one after the other, so that a drifting clock or a busy machine affects all equally.

    Args:
        steps: name -> step; each runs twice before the first turn.
        device: `cpu` or `cuda`.
        turns: number of turns.
        turn_ms: a step that is shorter is repeated within a turn to last about so many milliseconds.
        fewest: number of turns if one turn takes longer than `SLOW_STEP_S`; None: `turns`.

    Returns:
        Name -> milliseconds per run of the step, for each turn.
    """
    timer = STEP_TIMERS[device]
    first_ms = {name: min(timer(step) for _ in range(2)) for name, step in steps.items()}
    counts = {name: max(1, math.ceil(turn_ms / time_ms)) for name, time_ms in first_ms.items()}
    if fewest is not None and sum(first_ms.values()) > SLOW_STEP_S * 1e3:
        turns = fewest

    def repeat(name: str) -> None:
        for _ in range(counts[name]):
            steps[name]()

    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, taken in samples.items():
            taken.append(timer(lambda name=name: repeat(name)) / counts[name])
    return samples


def unmeasured_row(spec: RowSpec, status: str, reason: str) -> dict[str, Any]:
    """Return the row of a spec that was not measured, with its counts, the `status` and the reason for it."""
    return {**_blank_row(spec), "status": status, "reason": reason}


def _blank_row(spec: RowSpec) -> dict[str, Any]:
    """Return a row without its measurement: the spec and the counts.

    Call it after the measurement: counting builds the model, which would raise the baseline of the peak of memory.
    """
    from . import flops

    copied = ("model", "options", "attention", "batch_size", "dtype", "device", "backend", "mode", "compile")
    unknown = ("throughput_img_per_s", "latency_ms", "latency_ms_ci95", "peak_memory_mib", "peak_memory_method")
    row = {name: getattr(spec, name) for name in copied} | dict.fromkeys(unknown)
    row |= {"image_size": list(spec.image_size), "attention_kernel": "none", "steps": 0, "samples_ms": []}
    if spec.attention is None:
        row["attention_reason"] = "no kind of attention was chosen"
    counted = flops.cost(spec.model, spec.options, spec.image_size)
    return row | {"num_params": counted.num_params, "macs_g": counted.macs_g}


def _answer(spec: RowSpec, sender: connection.Connection, messages: str) -> None:
    """Run the measuring process: measure and send the row, with all output, also of C code, in the file of messages."""
    leave_with_parent()
    multiprocessing.set_start_method(None, force=True)  # libraries shall start processes as in any other program
    file = os.open(messages, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    # when memory runs out, the kernel should kill this process rather than the one that started it
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        measured = _run(spec)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
        measured = {"status": "oom", "reason": next(iter(str(error).strip().splitlines()), "MemoryError")}
    sender.send({**_blank_row(spec), **measured})


def _run(spec: RowSpec) -> dict[str, Any]:
    """Measure a row in this process; return the fields of `measure` that `_blank_row` lacks or leaves blank."""
    import torch

    from ..core.runtime import torch_dtype
    from ..models.registry import kernel_backend
    from . import build

    load = read_load()  # before the row's own work adds to it
    if spec.threads:  # not by `prepare_process`, which keeps freed memory: the peak is read with malloc's defaults
        torch.set_num_threads(spec.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True  # for all models: cuDNN's heuristics pick a slow kernel for patch embeddings
    device, dtype = torch.device(spec.device), torch_dtype(spec.dtype)

    def prepare(batch_size: int, image_size: tuple[int, int]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = build.build_eval_model(spec.model, spec.options, image_size, fused=spec.attention != "unfused")
        model = model.to(device, dtype)
        if hasattr(model, "set_backend"):
            model.set_backend(spec.backend)
        # on a CPU, a compiled model does not support frozen weights
        if hasattr(model, "freeze") and spec.mode == "infer" and (device.type == "cuda" or not spec.compile):
            model.freeze(graphs=0)  # no CUDA graphs of its own: rows with `compile: graphs` measure those
        return model, torch.randn(batch_size, 3, *image_size).to(device, dtype)

    if spec.device == "cpu":
        small = tuple(min(side, _SMALL_SIDE) for side in spec.image_size)
        _load_libraries(lambda: prepare(1, small), spec.mode)
    baseline_kib = _status_kib("VmRSS")
    model, images = prepare(spec.batch_size, spec.image_size)
    backend = kernel_backend(model, dtype)
    kernel = _attention_kernel(model, images) if spec.attention == "fused" else "none"
    mode = "reduce-overhead" if spec.compile == "graphs" else None
    network = torch.compile(model, mode=mode) if spec.compile else model
    with torch.inference_mode(spec.mode == "infer"):
        samples, peak_mib, method = _sample(_make_step(spec.mode, model, network, images), device, spec, baseline_kib)
    row = describe_samples(samples) | {
        "backend": backend,
        "attention_kernel": kernel,
        "peak_memory_mib": peak_mib,
        "peak_memory_method": method,
        "steps": len(samples),
        "threads": torch.get_num_threads(),
        **load,
    }
    row["throughput_img_per_s"] = spec.batch_size * 1e3 / row["latency_ms"]
    if peak_mib is None:
        row["peak_memory_mib_reason"] = method if spec.device == "cuda" else "this system has no /proc/self/status"
    return row


def _load_libraries(prepare: Callable[[], tuple[Any, Any]], mode: str) -> None:
    """Run two steps of a model, so that libraries that load at the first call are part of the baseline of memory.

    These are numba, the loops that it compiles, and the libraries of matrix products: over 100 MiB that a longer-lived
    process would share among all its models. The memory of the steps is returned to the system.
    """
    import torch

    model, images = prepare()
    step = _make_step(mode, model, model, images)
    with torch.inference_mode(mode == "infer"):
        for _ in range(2):
            step()
    del model, images, step
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def _make_step(mode: str, model: Any, network: Any, images: Any) -> Callable[[], Any]:
    """Make the step of a mode of `RowSpec`, for `infer` to run under inference mode.

    `network` is `model`, maybe compiled. Training ends with AdamW, whose moments take memory and hardly any time.
    """
    import torch

    if mode == "infer":
        return lambda: network(images)
    model.train()
    labels = torch.arange(len(images), device=images.device) % model.num_classes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)

    def step() -> None:
        torch.nn.functional.cross_entropy(network(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _attention_kernel(model: Any, images: Any) -> str:
    """Return the fused kernel that `scaled_dot_product_attention` chooses for such an image, or `none`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    chosen: list[str] = []

    class RecordAttention(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name.startswith("_scaled_dot_product"):
                chosen.append(name)
            return func(*args, **(kwargs or {}))

    # inference_mode would show the public function to the dispatch mode instead of the chosen kernel
    with torch.no_grad(), RecordAttention():
        model(images[:1])
    return next((name for name in chosen if not name.endswith("_math")), "none")


def _sample(
    step: Callable[[], Any], device: Any, spec: RowSpec, baseline_kib: int | None
) -> tuple[list[float], float | None, str]:
    """Return the milliseconds of each timed step, the peak memory in MiB, and how the peak was read.

    `baseline_kib` is the resident memory before the model was built, which does not count; None: it is not known.
    On a CPU the peak is that of one step. Of CUDA graphs it is None: they take their memory at the capture, before it.
    """
    import torch

    from ..core.runtime import keep_freed_memory

    timer = STEP_TIMERS[device.type]
    _warm_up(lambda: timer(step), spec.warmup, first_step_compiles=device.type == "cuda" or bool(spec.compile))
    # the warm-up does not count towards the peak: autotuning of Triton kernels and compilers take memory
    if device.type == "cpu":
        method = _reset_peak_rss()
        step()
        peak_kib = _status_kib("VmHWM")
        # memory with malloc's defaults, time without: returning the matrices of unfused attention to the system, and
        # clearing their pages again, is a third of its time, and keeping them doubles its memory
        keep_freed_memory()
        step()
    else:
        method = "none: CUDA graphs hide activations" if spec.compile == "graphs" else "cuda_allocator"
        torch.cuda.reset_peak_memory_stats(device)
    samples = [timer(step) for _ in range(SLOW_STEPS)]
    if statistics.median(samples) <= SLOW_STEP_S * 1e3:
        samples += [timer(step) for _ in range(spec.steps - SLOW_STEPS)]
    if device.type == "cuda":
        peak_mib = None if spec.compile == "graphs" else torch.cuda.max_memory_allocated(device) / 2**20
        return samples, peak_mib, method
    # without the baseline of the interpreter, this is the memory of the model and its activations
    return samples, None if baseline_kib is None or peak_kib is None else (peak_kib - baseline_kib) / 2**10, method


def _warm_up(timed_step: Callable[[], float], steps: int, *, first_step_compiles: bool) -> None:
    """Run at least `steps` steps, for at least WARM_UP_S, until clocks, caches and allocators have settled.

    `timed_step` returns its milliseconds. A step slower than SLOW_STEP_S ends the warm-up, except a first step that may
    be slow because it compiles.
    """
    done, spent_ms = 0, 0.0
    while done < steps or spent_ms < WARM_UP_S * 1e3:
        elapsed_ms = timed_step()
        done, spent_ms = done + 1, spent_ms + elapsed_ms
        if elapsed_ms > SLOW_STEP_S * 1e3 and not (first_step_compiles and done == 1):
            return


def _cpu_step_ms(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    return (time.perf_counter() - started) * 1e3


def _cuda_step_ms(step: Callable[[], Any]) -> float:
    """Return the milliseconds of a step on a GPU, between events, after all earlier work is done."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


STEP_TIMERS = {"cpu": _cpu_step_ms, "cuda": _cuda_step_ms}  # device -> function that returns a step's milliseconds


def _status_kib(field: str) -> int | None:
    """Read a memory field of /proc/self/status in KiB, e.g. VmRSS or VmHWM; None if there is no such file."""
    file = Path("/proc/self/status")
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def _reset_peak_rss() -> str:
    """Reset the peak of resident memory; return the method by which the peak will be read."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # "5" resets VmHWM, see proc(5)
    except OSError:
        return "rss_peak_since_start"  # includes building the model
    return "rss_peak"
