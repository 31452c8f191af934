"""Throughput, latency and peak memory of a model: one row, one fresh process.

`measure(spec)` starts `python -m repro.measure.speed`, which reads the spec as JSON from stdin and answers with the row as
JSON in the last line of stdout; whatever libraries print goes to stderr. A fresh process is what keeps rows from changing
each other's memory and speed. Running out of memory or of time is a row of its own, never a smaller batch.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SLOW_STEP_S = 2.0
SLOW_STEPS = 3
MIN_STEPS = 10
WARM_UP_S = 1.0
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpec:
    """What to measure.

    Args:
        model: a name that timm knows after `import repro.models`.
        options: further keyword arguments of the model.
        attention: `fused` or `unfused` for models with softmax attention, None for those without.
        resolution: (H, W) in pixels.
        batch: images per step; never changed.
        dtype: weights and inputs are cast to it, without autocast; TF32 is off, so fp32 means fp32.
        device: `cpu` or `cuda`.
        backend: implementation of the family's operator, see `kernels`; models without one run plain PyTorch whatever it says.
        mode: `infer`, a forward pass under inference mode; `train`, forward, backward and a step of AdamW.
        compile: `torch.compile` with its defaults.
        steps: timed steps, at least 10; three, where the median step takes longer than 2 s.
        warmup: steps before the timed ones, prolonged until one second has passed, cut short by a step longer than 2 s.
        budget_s: wall-clock limit of the whole row, start of the process included.
        threads: CPU threads; None leaves PyTorch's choice.

    Raises:
        ValueError: a value out of range.
    """

    model: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    attention: Literal["fused", "unfused"] | None = None
    resolution: tuple[int, int]
    batch: int = 1
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    backend: str = "auto"
    mode: Literal["infer", "train"] = "infer"
    compile: bool = False
    steps: int = MIN_STEPS
    warmup: int = 2
    budget_s: float = 60.0
    threads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolution", tuple(self.resolution))
        if self.attention not in ("fused", "unfused", None):
            raise ValueError(f"attention {self.attention!r} is not fused, unfused or None")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is not cpu or cuda")
        if self.mode not in ("infer", "train"):
            raise ValueError(f"mode {self.mode!r} is not infer or train")
        if self.steps < MIN_STEPS or self.warmup < 1 or self.batch < 1 or not self.budget_s > 0:
            raise ValueError(f"needs steps >= {MIN_STEPS}, warmup >= 1, batch >= 1, budget_s > 0; got {self}")

    @property
    def row_id(self) -> str:
        """E.g. `deit_tiny_patch16_224[attention=unfused]@224`; see `row_id`."""
        shown = self.options if self.attention is None else {**self.options, "attention": self.attention}
        return row_id(self.model, shown, self.resolution)


def row_id(model: str, options: dict[str, Any], resolution: tuple[int, int]) -> str:
    """`model[name=value,...]@side` or `@HxW`: how rows are named in results."""
    listed = ",".join(f"{name}={value}" for name, value in options.items())
    height, width = resolution
    return f"{model}{f'[{listed}]' if listed else ''}@{height if height == width else f'{height}x{width}'}"


def measure(spec: RowSpec) -> dict[str, Any]:
    """Measure one row in a fresh process.

    Returns:
        {model, options, attention, attention_kernel, resolution, batch, dtype, device, backend, mode, compile, params, macs_g,
        throughput_img_per_s, latency_ms, latency_ms_ci95, peak_memory_mib, peak_memory_method, status, steps, samples_ms}: latency
        is the median step, `latency_ms_ci95` the interval of `median_interval`, throughput batch/latency. `attention_kernel` is
        the fused kernel that PyTorch chose, `none` where it chose none. `status` is `ok`, `oom` or `timeout`; what was then not
        measured is None with its reason under `reason`.

    Raises:
        RuntimeError: the process ended in any other way; one line that names the row.
    """
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        out, err = process.communicate(json.dumps(dataclasses.asdict(spec)), timeout=spec.budget_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return unmeasured(spec, "timeout", f"over the row's budget of {spec.budget_s:g} s")
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode == -signal.SIGKILL:
        return unmeasured(spec, "oom", "the process was killed, as the kernel does when memory runs out")
    row = _last_json(out)
    if process.returncode or row is None:
        how = f"exit code {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "no message")
        raise RuntimeError(f"{spec.row_id}: the measuring process ended with {how}: {last}")
    return row


def median_interval(samples: list[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Distribution-free confidence interval of the median: the k-th smallest and k-th largest sample.

    k is the largest with 2·P(Binomial(n, 1/2) < k) <= 1 - confidence, so n = 10 gives the 2nd and the 9th sample. With fewer
    than 6 samples no pair of samples reaches 95 %: None.
    """
    n = len(samples)
    tail, k = 0.0, 0
    while k < n // 2 and 2 * (tail + math.comb(n, k) / 2**n) <= 1 - confidence:
        tail += math.comb(n, k) / 2**n
        k += 1
    ordered = sorted(samples)
    return (ordered[k - 1], ordered[n - k]) if k else None


def unmeasured(spec: RowSpec, status: str, reason: str) -> dict[str, Any]:
    """The row of what could not be measured: `status` `oom`, `timeout` or `failed`, and why."""
    return {**_blank_row(spec), **_count(spec), "status": status, "reason": reason}


def _count(spec: RowSpec) -> dict[str, Any]:
    from . import flops

    counted = flops.cost(spec.model, spec.options, spec.resolution)
    return {"params": counted.num_params, "macs_g": counted.macs_g}


def _last_json(out: str) -> dict[str, Any] | None:
    """The row in the last line of stdout, if it is one."""
    lines = out.splitlines()
    with contextlib.suppress(json.JSONDecodeError):
        if lines and isinstance(row := json.loads(lines[-1]), dict):
            return row
    return None


def _blank_row(spec: RowSpec) -> dict[str, Any]:
    shared = ("model", "options", "attention", "batch", "dtype", "device", "backend", "mode", "compile")
    return {
        **{name: getattr(spec, name) for name in shared},
        "resolution": list(spec.resolution),
        "attention_kernel": "none",
        "throughput_img_per_s": None,
        "latency_ms": None,
        "latency_ms_ci95": None,
        "peak_memory_mib": None,
        "peak_memory_method": None,
        "steps": 0,
        "samples_ms": [],
        **({} if spec.attention else {"attention_reason": "no kind of attention was chosen"}),
    }


def _main() -> None:
    """The measuring process: a RowSpec as JSON on stdin -> the row as JSON in stdout's last line."""
    with _private_stdout() as results:
        # when memory runs out, the kernel should take this process and not the one that started it
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        spec = RowSpec(**json.load(sys.stdin))
        try:
            measured = _run(spec)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not isinstance(error, MemoryError) and not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            measured = {"status": "oom", "reason": next(iter(str(error).strip().splitlines()), "MemoryError")}
        # counted last: building a model to count it would raise the memory that the peak is measured from
        print(json.dumps({**_blank_row(spec), **measured, **_count(spec)}), file=results, flush=True)


@contextlib.contextmanager
def _private_stdout() -> Iterator[IO[str]]:
    """The real stdout for results alone; whatever else prints to it, C code too, goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        yield results


def _run(spec: RowSpec) -> dict[str, Any]:
    import torch

    from ..models.registry import kernel_backend
    from . import build

    if spec.threads:
        torch.set_num_threads(spec.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device, dtype = torch.device(spec.device), getattr(torch, DTYPES[spec.dtype])
    baseline_kib = _status_kib("VmRSS")
    torch.manual_seed(0)
    model = build.create(spec.model, spec.options, spec.resolution, fused=spec.attention != "unfused").to(device, dtype)
    if hasattr(model, "set_backend"):
        model.set_backend(spec.backend)
    backend = kernel_backend(model, dtype)
    images = torch.randn(spec.batch, 3, *spec.resolution).to(device, dtype)
    kernel = _attention_kernel(model, images) if spec.attention == "fused" else "none"
    network = torch.compile(model) if spec.compile else model
    if spec.mode == "train":
        samples, peak_mib, method = _sample(_training_step(model, network, images), device, spec, baseline_kib)
    else:
        with torch.inference_mode():
            samples, peak_mib, method = _sample(lambda: network(images), device, spec, baseline_kib)
    latency = statistics.median(samples)
    interval = median_interval(samples)
    row = {
        "backend": backend,
        "attention_kernel": kernel,
        "throughput_img_per_s": spec.batch * 1e3 / latency,
        "latency_ms": latency,
        "latency_ms_ci95": list(interval) if interval else None,
        "peak_memory_mib": peak_mib,
        "peak_memory_method": method,
        "status": "ok",
        "steps": len(samples),
        "samples_ms": [round(s, 3) for s in samples],
    }
    if interval is None:
        row["latency_ms_ci95_reason"] = f"steps of over {SLOW_STEP_S:g} s: {len(samples)} of them give no 95 % interval of the median"
    if peak_mib is None:
        row["peak_memory_mib_reason"] = "this system has no /proc/self/status"
    return row


def _training_step(model: Any, network: Any, images: Any) -> Callable[[], None]:
    """Forward, backward and a step of AdamW, whose two moments count into the memory; the rate is too small to lead anywhere."""
    import torch

    model.train()
    labels = torch.arange(len(images), device=images.device) % model.num_classes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)

    def step() -> None:
        torch.nn.functional.cross_entropy(network(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _attention_kernel(model: Any, images: Any) -> str:
    """Which fused kernel `scaled_dot_product_attention` dispatches to for one of these images, `none` if it is the plain product."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    chosen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name.startswith("_scaled_dot_product"):
                chosen.append(name)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():  # under inference_mode the public function would be seen, and not what it chose
        model(images[:1])
    return next((name for name in chosen if not name.endswith("_math")), "none")


def _sample(step: Callable[[], Any], device: Any, spec: RowSpec, baseline_kib: int | None) -> tuple[list[float], float | None, str]:
    """(milliseconds of each timed step, peak memory in MiB, how the peak was read)."""
    import torch

    timer = STEP_TIMERS[device.type]
    _warm_up(lambda: timer(step), spec.warmup, first_step_compiles=device.type == "cuda" or spec.compile)
    # the peak is that of the timed steps: a Triton kernel's autotuning in the warm-up takes memory of its own
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        method = "cuda_allocator"
    else:
        method = _reset_peak_rss()
    samples = [timer(step) for _ in range(SLOW_STEPS)]
    if statistics.median(samples) <= SLOW_STEP_S * 1e3:
        samples += [timer(step) for _ in range(spec.steps - SLOW_STEPS)]
    if device.type == "cuda":
        return samples, torch.cuda.max_memory_allocated(device) / 2**20, method
    return samples, _peak_rss_mib(baseline_kib), method


def _warm_up(timed_step: Callable[[], float], steps: int, *, first_step_compiles: bool) -> None:
    """Run steps until clocks, caches and allocators have settled; a slow step settles them all by itself."""
    started, done = time.perf_counter(), 0
    while done < steps or time.perf_counter() - started < WARM_UP_S:
        slow = timed_step() > SLOW_STEP_S * 1e3
        done += 1
        if slow and not (first_step_compiles and done == 1):
            return


def _cpu_step_ms(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    return (time.perf_counter() - started) * 1e3


def _cuda_step_ms(step: Callable[[], Any]) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


STEP_TIMERS = {"cpu": _cpu_step_ms, "cuda": _cuda_step_ms}


def _status_kib(field: str) -> int | None:
    """A memory field of /proc/self/status in KiB, e.g. VmRSS or VmHWM; None where there is no such file."""
    try:
        with open("/proc/self/status", encoding="ascii") as stream:
            for line in stream:
                if line.startswith(field + ":"):
                    return int(line.split()[1])
    except OSError:
        pass  # not Linux
    return None


def _reset_peak_rss() -> str:
    """Start the peak of resident memory anew; returns how the peak will be read."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return "rss_peak_since_start"  # building the model counts too
    return "rss_peak"


def _peak_rss_mib(baseline_kib: int | None) -> float | None:
    """Peak resident memory above the baseline: what the model and its activations take beyond the interpreter."""
    peak_kib = _status_kib("VmHWM")
    return None if peak_kib is None or baseline_kib is None else (peak_kib - baseline_kib) / 2**10


if __name__ == "__main__":
    _main()
