"""Seeds, determinism, device choice and the `runtime:` section, which changes a run's course, never its results."""

import dataclasses
import multiprocessing
import os
import platform
import random
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .children import ask
from .config import bounded, load_section
from .errors import UserError
from .paths import Paths

# of the environment: when `repro run` began, in seconds since 1970, and how many stages it runs at once
RUN_BEGAN = "REPRO_RUN_BEGAN"
SHM = "/dev/shm"
_VECTOR_FLAG = re.compile(r"sse4_2|avx2?|fma|avx512\w*|amx\w*|neon|asimd\w*|sve\w*")
# BLAS_INFO of PyTorch's build settings -> the library
_BLAS = {
    "mkl": "Intel MKL",
    "open": "OpenBLAS",
    "accelerate": "Apple Accelerate",
    "veclib": "Apple vecLib",
    "acl": "Arm Compute Library",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """The `runtime:` section of params.yaml. It is in no dependency and no hash.

    Args:
        device: `auto` takes CUDA where there is one.
        workers: processes that load data; 0 loads in the main process.
        threads: CPU threads of the main process, at most OMP_NUM_THREADS where that is set; null leaves PyTorch's
            choice.
        micro_batch: images of a process that go through the model at once; null for all of its share. A batch that is
            larger is cut into parts whose gradients are averaged, so that the total batch is the one of the section
            on any number of GPUs.
        compile: `torch.compile` for training. channels_last: memory format of the model's weights.
        peak_tflops: of one device in the precision of the training, for the share of it that is used; null leaves the
            share out.
        jsonl, tensorboard: a line per step in .runs/logs/<stage>/<cell>/seed_<n>/train.jsonl, and TensorBoard
            events in the same folder.
        save_every_steps: how often training state is saved.
        log_every_steps: how often the log line and the progress bar are updated.
        max_pixels: width times height of the largest picture that is read.
        data_roots: name of a cell of prepare_data, or a kind of data set -> folder.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = bounded(0, ge=0)
    threads: int | None = bounded(None, ge=1)
    micro_batch: int | None = bounded(None, ge=1)
    compile: bool = False
    channels_last: bool = False
    peak_tflops: float | None = bounded(None, gt=0)
    jsonl: bool = False
    tensorboard: bool = False
    save_every_steps: int = bounded(200, ge=1)
    log_every_steps: int = bounded(10, ge=1)
    max_pixels: int = bounded(80_000_000, ge=1)
    data_roots: dict[str, str]

    def data_root(self, paths: Paths, kind: str) -> Path:
        """The folder of a data set, relative ones taken from the project root, `~` from the user's home."""
        if kind not in self.data_roots:
            raise UserError(f"runtime.data_roots.{kind}: missing; say where the {kind} data set lies")
        return paths.find(self.data_roots[kind]).absolute()


# TFLOP/s of dense bf16 products that are summed in fp32; a part of a GPU's name -> its peak, and the first that fits
# counts. They are NVIDIA's: its papers on the Ampere (A100), Hopper (H100, SXM5 unless it says PCIe) and Ada (RTX 4090)
# architectures, and the data sheets of the others, where those with sparsity are twice as high.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H200": 989.4,
    "L40S": 362.05,
    "RTX 4090": 165.2,
    "B200": 2250.0,
}


def find_peak(gpu: str) -> float | None:
    """The TFLOP/s of a GPU in bf16 by its data sheet; None for one that is not in our table."""
    return next((tflops for part, tflops in PEAK_TFLOPS.items() if part.lower() in gpu.lower()), None)


def torch_dtype(name: str) -> Any:
    """`fp32`, `bf16` or `fp16`, as results spell them -> torch.dtype."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def load_runtime(paths: Paths) -> Runtime:
    """The `runtime:` section of this checkout's params.yaml; where OMP_NUM_THREADS is set, it limits the number of
    threads there.
    """
    runtime, given = load_section(Runtime, paths.params, "runtime"), find_given_threads()
    if runtime.threads and given:
        return dataclasses.replace(runtime, threads=min(runtime.threads, given))
    return runtime


def find_given_threads() -> int | None:
    """The first number of OMP_NUM_THREADS, which may have one for each level of nesting; None without one, as OpenMP."""
    first = re.match(r"\s*\+?(\d+)\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""), re.ASCII)
    return (int(first[1]) or None) if first else None


def measure_shared_memory() -> int:
    """The bytes of shared memory that are free; 0 where processes cannot share even a lock."""
    try:
        multiprocessing.Lock()
    except (ImportError, OSError):
        return 0
    return shutil.disk_usage(SHM).free if os.path.isdir(SHM) else sys.maxsize  # other systems have no such folder


def choose_workers(wanted: int) -> int:
    """The number of processes to start: `wanted`, or 0 with a message where there is no shared memory."""
    if wanted and measure_shared_memory() < 2**20:  # a lock takes a page, and there are a dozen of them and more
        print(f"{SHM}: no shared memory; this process does the work of {wanted} workers", file=sys.stderr, flush=True)
        return 0
    return wanted


def choose_device(choice: str) -> Any:
    """`auto|cpu|cuda` -> torch.device; an explicit `cuda` that is not there is a `UserError`."""
    import torch

    if choice == "cuda" and not torch.cuda.is_available():
        raise UserError("runtime.device: cuda was asked for, but PyTorch sees no CUDA device; use auto or cpu")
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(choice)


def usable_cores() -> int:
    """The CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_machine(slot: int, jobs: int, runtime: Runtime) -> dict[str, str]:
    """The variables of the environment that give one of `jobs` processes its GPU, or its share of the threads."""
    if choose_device(runtime.device).type == "cuda":
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    threads = runtime.threads or find_given_threads() or usable_cores()
    return {"OMP_NUM_THREADS": str(max(1, threads // jobs))}


def device_label(device: Any, threads: int | None = None) -> str:
    """The name of a device in results: `cuda: NVIDIA L40S` or `cpu: AMD EPYC family 25 model 17, 2 threads`."""
    import torch

    if torch.device(device).type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    count = threads or torch.get_num_threads()
    return f"cpu: {cpu_name()}, {count} thread{'s' if count != 1 else ''}"


def device_slug(device: Any) -> str:
    """The folder name of a device under results/replications: `nvidia_l40s`, `cpu_amd_epyc_family_25_model_17`."""
    import torch

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else f"cpu {cpu_name()}"
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def cpu_name(cpuinfo: Mapping[str, str] | None = None) -> str:
    """The name of the processor's model: `AMD EPYC family 25 model 17`, without importing torch.

    A virtual machine may give processors of several generations one name, which family and model tell apart.

    Args:
        cpuinfo: the fields of /proc/cpuinfo; None reads those of this machine.
    """
    found = _read_cpuinfo() if cpuinfo is None else cpuinfo
    name = found.get("model name") or platform.processor() or platform.machine()
    name = " ".join(re.sub(r"\((R|TM)\)", "", name).split())
    numbers = found.get("cpu family"), found.get("model")
    return name if None in numbers else f"{name} family {numbers[0]} model {numbers[1]}"


def _read_cpuinfo() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    file = Path("/proc/cpuinfo")  # on Linux
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def describe_cpu(cpuinfo: Mapping[str, str]) -> dict[str, Any]:
    """{family_model_stepping, flags} of a processor by its fields of /proc/cpuinfo; unknown values are None, with
    <name>_reason.

    The flags are those of vector instructions, which decide rounding and speed, in alphabetical order.
    Processors of one name may differ in both.
    """
    numbers = [cpuinfo.get(field) for field in ("cpu family", "model", "stepping")]
    flags = cpuinfo.get("flags", cpuinfo.get("Features"))  # x86, ARM
    found: dict[str, Any] = {"family_model_stepping": None if None in numbers else " ".join(map(str, numbers))}
    found["flags"] = None if flags is None else sorted(filter(_VECTOR_FLAG.fullmatch, set(flags.split())))
    return found | {f"{name}_reason": "/proc/cpuinfo does not say it" for name, value in found.items() if value is None}


def gpu_names() -> list[str]:
    """The names of NVIDIA GPUs by the driver's own tool, without importing torch; empty where there is none."""
    said = ask(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]) or ""
    return [line.strip() for line in said.splitlines() if line.strip()]


def describe_machine() -> dict[str, Any]:
    """The hardware of benchmarks: {cpu, family_model_stepping, flags, cores, usable_cores, gpus, memory_gib}; no torch
    is imported.

    For the processor, see `describe_cpu`. `usable_cores` counts the CPUs that this process may run on. `gpus` has name
    and driver of each NVIDIA GPU. Memory is in whole GiB, so that a kernel update which reserves a little more changes
    nothing; None comes with memory_gib_reason.
    """
    found = {
        "cpu": cpu_name(),
        **describe_cpu(_read_cpuinfo()),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
    }
    found["gpus"] = gpu_names()
    try:
        return found | {"memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)}
    except (AttributeError, ValueError, OSError):
        return found | {"memory_gib": None, "memory_gib_reason": "this system does not report it through sysconf"}


def describe_place(device: str) -> dict[str, Any]:
    """The hardware and settings that determine this process's numbers on a device, besides versions.

    Args:
        device: the record's device, see `device_label`.

    Returns:
        {cpu, family_model_stepping, flags, vector, blas, threads}, see `describe_cpu`; `vector` names the instructions
        that PyTorch uses, `blas` its library of matrix products. For a GPU also `gpus`, see `describe_machine`, and
        `cuda`, the version that PyTorch was built with. Unknown values are None, with <name>_reason: torch is asked
        only where the process has imported it.
    """
    found = {"cpu": cpu_name(), **describe_cpu(_read_cpuinfo())}
    torch = sys.modules.get("torch")
    if torch is None:
        found |= {"vector": None, "blas": None, "threads": None}
        found |= {f"{name}_reason": "made without PyTorch" for name in ("vector", "blas", "threads")}
    else:
        found |= {"vector": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
        found["blas"] = parse_blas(torch.__config__.show())
        if found["blas"] is None:
            found["blas_reason"] = "torch.__config__ names none that is known"
    if device.startswith("cuda"):
        found |= {"gpus": gpu_names() or None, "cuda": torch.version.cuda if torch else None}
        reasons = {"gpus": "nvidia-smi does not answer", "cuda": "made without PyTorch's CUDA"}
        found |= {f"{name}_reason": reason for name, reason in reasons.items() if found[name] is None}
    return found


def parse_blas(built_with: str) -> str | None:
    """The library of matrix products in the text of `torch.__config__.show()`, e.g. `Intel oneAPI MKL 2024.2`; None
    without a known one.
    """
    if mkl := re.search(r"(oneAPI )?Math Kernel Library Version ([\d.]+)", built_with):
        return f"Intel {mkl[1] or ''}MKL {mkl[2]}"
    named = re.search(r"BLAS_INFO=(\w+)", built_with)
    return _BLAS.get(named[1].lower()) if named else None


def seed_everything(seed: int, *, deterministic: bool = True) -> None:
    """Seed Python, NumPy and PyTorch; with `deterministic`, ask PyTorch for repeatable algorithms (warns where it has
    none).
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # a debugging aid that the switch above brings along: every empty tensor would be filled first
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
