"""Seeds, determinism, devices, and the `runtime:` section, which affects how a run proceeds and never its results."""

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import platform
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from .children import ask
from .config import bounded, load_section
from .errors import UserError
from .paths import Paths

# environment variable with the start of `repro run` in seconds since 1970, and its number of parallel stages
RUN_BEGAN = "REPRO_RUN_BEGAN"
SHM = "/dev/shm"  # the folder of shared memory on Linux
# parameters of glibc's mallopt (malloc.h), with values that keep all freed memory in the process
_KEEP_FREED = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 64 * 2**20)}
# flags of vector instructions in /proc/cpuinfo, of x86 and of Arm
_VECTOR_FLAG = re.compile(r"sse4_2|avx2?|fma|avx512\w*|amx\w*|neon|asimd\w*|sve\w*")
# dtype -> the flags of a processor with units for its products (x86, then Arm); others convert each number to fp32
_UNITS = {"bf16": ("amx_bf16", "avx512_bf16", "bf16"), "fp16": ("amx_fp16", "avx512_fp16", "asimdhp")}
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
        device: `auto` takes CUDA if it is available.
        workers: processes that load data; 0 loads in the main process.
        threads: CPU threads of the main process, at most OMP_NUM_THREADS if that is set; null leaves PyTorch's choice.
        micro_batch: images of a process in one forward pass; null for all of its share. A larger batch is cut into
            parts whose gradients are averaged, so that the total batch is that of the section on any number of GPUs.
        compile: whether to use `torch.compile` in training.
        channels_last: whether the model's weights have this memory format.
        peak_tflops: peak of one device in the precision of the training, for the share of it that is used; null omits
            the share.
        jsonl: whether to write a line per step into .runs/logs/<stage>/<cell>/seed_<n>-<hash>/train.jsonl.
        tensorboard: whether to write TensorBoard events into the same folder.
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
        """Return the absolute folder of a data set; a relative one starts at the project's root, `~` is the home.

        Raises:
            UserError: `data_roots` has no such entry.
        """
        if kind not in self.data_roots:
            raise UserError(f"runtime.data_roots.{kind}: missing; say where the {kind} data set lies")
        return paths.find(self.data_roots[kind]).absolute()


# part of a GPU's name -> peak TFLOP/s of dense bf16 products with fp32 accumulation; the first match counts. Sources:
# NVIDIA's papers on the Ampere (A100), Hopper (H100, SXM5 unless it says PCIe) and Ada (RTX 4090) architectures, and
# the data sheets of the others, halved where these count sparsity.
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
    """Return the peak TFLOP/s of a GPU in bf16; None if it is not in `PEAK_TFLOPS`, or a part or a kin of one that is."""
    if re.search(r"\b(MIG|NVL|Laptop|GB200)\b", gpu):
        return None
    return next((tflops for part, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", gpu)), None)


def torch_dtype(name: str) -> Any:
    """Return the torch.dtype of `fp32`, `bf16` or `fp16`."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def load_runtime(paths: Paths) -> Runtime:
    """Load the `runtime:` section of params.yaml; OMP_NUM_THREADS, if set, limits its `threads`."""
    runtime, given = load_section(Runtime, paths.params, "runtime"), find_given_threads()
    if runtime.threads and given:
        return dataclasses.replace(runtime, threads=min(runtime.threads, given))
    return runtime


def find_given_threads() -> int | None:
    """Return the first number of OMP_NUM_THREADS, which may list one per level of nesting; None without a valid one."""
    first = re.match(r"\s*\+?(\d+)\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""), re.ASCII)
    return (int(first[1]) or None) if first else None


def measure_shared_memory() -> int:
    """Return the free bytes of shared memory; 0 if processes cannot share even a lock, as in some sandboxes."""
    try:
        multiprocessing.Lock()
    except (ImportError, OSError):
        return 0
    return shutil.disk_usage(SHM).free if os.path.isdir(SHM) else sys.maxsize  # other systems have no such folder


def choose_workers(wanted: int) -> int:
    """Return the number of processes to start: `wanted`, or 0 with a message if there is no shared memory.

    Processes that load data share locks in it, even where their batches go through pipes.
    """
    if wanted and measure_shared_memory() < 2**20:  # each of a dozen or more locks takes a page
        print(f"{SHM}: no shared memory; this process does the work of {wanted} workers", file=sys.stderr, flush=True)
        return 0
    return wanted


def choose_device(choice: str) -> Any:
    """Return the torch.device for `auto`, `cpu` or `cuda`; raise a `UserError` for `cuda` without a CUDA device."""
    import torch

    if choice == "cuda" and not torch.cuda.is_available():
        raise UserError("runtime.device: cuda was asked for, but PyTorch sees no CUDA device; use auto or cpu")
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(choice)


def prepare_process(runtime: Runtime) -> None:
    """Set PyTorch's number of threads to the runtime's, and keep freed memory in this process."""
    import torch

    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc's malloc reuse freed memory, large blocks included, instead of returning it to the system.

    By default a tensor of many MiB is mapped when it is made and unmapped when it is freed, and the kernel clears each
    of its pages at the first write. Numbers stay the same. The process keeps its peak memory, and up to seven blocks of
    a size may lie side by side before one is used again. Without glibc nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _KEEP_FREED.values():
            mallopt(parameter, value)


def usable_cores() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_machine(slot: int, jobs: int, runtime: Runtime) -> dict[str, str]:
    """Return the environment variables that give one of `jobs` processes its GPU, or its share of the threads.

    `slot` is the number of the process, from 0; with more processes than GPUs, several share one.
    """
    if choose_device(runtime.device).type == "cuda":
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    threads = runtime.threads or find_given_threads() or usable_cores()
    return {"OMP_NUM_THREADS": str(max(1, threads // jobs))}


def device_label(device: Any, threads: int | None = None) -> str:
    """Return a device's name in results: `cuda: NVIDIA L40S`, or `cpu: AMD EPYC family 25 model 17, 2 threads`.

    Its readers need this form: records belong to one machine if the text before `, ` is equal (`record.name_machine`),
    and `cuda` or `cpu` before the colon says the type.
    """
    import torch

    if torch.device(device).type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    count = threads or torch.get_num_threads()
    return f"cpu: {cpu_name()}, {count} thread{'s' if count != 1 else ''}"


def device_slug(device: Any) -> str:
    """Return a device's name in paths of results: `nvidia_l40s`, `cpu_amd_epyc_family_25_model_17`."""
    import torch

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else f"cpu {cpu_name()}"
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def cpu_name() -> str:
    """Return the name of the processor's model, e.g. `AMD EPYC family 25 model 17`, without importing torch.

    Virtual machines may report one name for processors of several generations; family and model distinguish them.
    """
    found = _read_cpuinfo()
    name = found.get("model name") or platform.processor() or platform.machine()
    name = " ".join(re.sub(r"\((R|TM)\)", "", name).split())
    numbers = found.get("cpu family"), found.get("model")
    return name if None in numbers else f"{name} family {numbers[0]} model {numbers[1]}"


def _read_cpuinfo() -> dict[str, str]:
    """Read the fields of the first processor in /proc/cpuinfo; empty if there is no such file, as outside of Linux."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _describe_cpu() -> dict[str, Any]:
    """Return {cpu, family_model_stepping, flags} of this processor; for `cpu` see `cpu_name`.

    The flags are those of vector instructions, which affect rounding and speed, in alphabetical order. Processors with
    one name may differ in them. Unknown values are None, with `<name>_reason`.
    """
    cpuinfo, flags = _read_cpuinfo(), _read_flags()
    numbers = [cpuinfo.get(field) for field in ("cpu family", "model", "stepping")]
    found = {
        "cpu": cpu_name(),
        "family_model_stepping": None if None in numbers else " ".join(map(str, numbers)),
        "flags": None if flags is None else sorted(filter(_VECTOR_FLAG.fullmatch, flags)),
    }
    return found | {f"{name}_reason": "/proc/cpuinfo does not say it" for name, value in found.items() if value is None}


def _read_flags() -> set[str] | None:
    """Return this processor's flags in /proc/cpuinfo, which x86 and Arm list under different names; None if unknown."""
    cpuinfo = _read_cpuinfo()
    flags = cpuinfo.get("flags", cpuinfo.get("Features"))
    return None if flags is None else set(flags.split())


def explain_emulation(dtype: str) -> str | None:
    """Return why products in `bf16` or `fp16` are emulated on this processor; None if they are not, or it is unknown.

    Args:
        dtype: a name of `torch_dtype`.
    """
    units, flags = _UNITS.get(dtype), _read_flags()
    if units is None or flags is None or not flags.isdisjoint(units):
        return None
    return f"the processor has no units for {dtype} ({', '.join(units[:2])} or Arm's {units[2]})"


def gpu_names() -> list[str]:
    """Return name and driver of each NVIDIA GPU by nvidia-smi, without importing torch; empty without a GPU."""
    said = ask(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]) or ""
    return [line.strip() for line in said.splitlines() if line.strip()]


def describe_machine() -> dict[str, Any]:
    """Return the hardware that benchmarks depend on, without importing torch.

    Returns:
        {cpu, family_model_stepping, flags, cores, usable_cores, gpus, memory_gib}. For the processor see
        `_describe_cpu`. `usable_cores` counts the CPUs that this process may run on, `gpus` is from `gpu_names`. Memory
        is in whole GiB, so that a kernel that reserves a little more changes nothing; None comes with
        `memory_gib_reason`.
    """
    found = {**_describe_cpu(), "cores": os.cpu_count(), "usable_cores": usable_cores(), "gpus": gpu_names()}
    try:
        return found | {"memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)}
    except (AttributeError, ValueError, OSError):
        return found | {"memory_gib": None, "memory_gib_reason": "this system does not report it through sysconf"}


def describe_place(device: str) -> dict[str, Any]:
    """Return the hardware and settings that, besides versions, determine this process's numbers on a device.

    Args:
        device: the record's device, see `device_label`.

    Returns:
        {cpu, family_model_stepping, flags, vector, blas, threads}, see `_describe_cpu`. `vector` names the instructions
        that PyTorch uses, `blas` its library of matrix products. A GPU adds `gpus`, see `describe_machine`, and `cuda`,
        the version that PyTorch was built with. Unknown values are None, with `<name>_reason`; those of torch are
        unknown if this process has not imported it.
    """
    found = _describe_cpu()
    torch = sys.modules.get("torch")
    if torch is None:
        for name in ("vector", "blas", "threads"):
            found |= {name: None, f"{name}_reason": "made without PyTorch"}
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
    """Find the BLAS library in the text of `torch.__config__.show()`, e.g. `Intel oneAPI MKL 2024.2`; else None."""
    if mkl := re.search(r"(oneAPI )?Math Kernel Library Version ([\d.]+)", built_with):
        return f"Intel {mkl[1] or ''}MKL {mkl[2]}"
    named = re.search(r"BLAS_INFO=(\w+)", built_with)
    return _BLAS.get(named[1].lower()) if named else None


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch, and ask PyTorch for deterministic algorithms; it warns of an operator without."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # it refuses larger ones
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS has no deterministic products
    torch.use_deterministic_algorithms(True, warn_only=True)
    # the switch above turns on this debugging aid, which would fill every empty tensor first and cost time
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
