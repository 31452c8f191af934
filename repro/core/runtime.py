"""Seeds, determinism, device choice and the `runtime:` section: what changes how a run goes, never what comes out."""

import dataclasses
import os
import platform
import random
import subprocess
from pathlib import Path
from typing import Any, Literal

from .config import bounded, load_section
from .errors import UserError
from .paths import Paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """The `runtime:` section of params.yaml. It is in no dependency and no hash.

    Args:
        device: `auto` takes CUDA where there is one.
        workers: processes that load data; 0 loads in the main process.
        threads: CPU threads of the main process; null leaves PyTorch's choice.
        micro_batch: images of a process that go through the model at once; null for all of its share. A batch that is larger is cut
            into parts whose gradients are averaged, so that the total batch is the one of the section whatever the GPUs are.
        compile: `torch.compile` for training. channels_last: memory format of the model's weights.
        peak_tflops: of one device in the precision of the training, for the share of it that is used; null leaves the share out.
        jsonl, tensorboard: a line per step in .runs/logs/<stage>/<cell>/seed_<n>/train.jsonl; TensorBoard events beside it.
        save_every_steps: how often training state is saved.
        log_every_steps: how often the log line and the progress bar are updated.
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
    data_roots: dict[str, str]

    def data_root(self, paths: Paths, kind: str) -> Path:
        """The folder of a data set, relative ones taken from the project root."""
        if kind not in self.data_roots:
            raise UserError(f"runtime.data_roots.{kind}: missing; say where the {kind} data set lies")
        return (paths.root / self.data_roots[kind]).absolute()


def torch_dtype(name: str) -> Any:
    """`fp32`, `bf16` or `fp16`, as results spell them -> torch.dtype."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def load_runtime(paths: Paths) -> Runtime:
    """The `runtime:` section of this checkout's params.yaml."""
    return load_section(Runtime, paths.params, "runtime")


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


def device_label(device: Any, threads: int | None = None) -> str:
    """What a result says of its device: `cuda: NVIDIA L40S` or `cpu: AMD EPYC, 2 threads`."""
    import torch

    if torch.device(device).type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {cpu_name()}, {threads or torch.get_num_threads()} threads"


def device_slug(device: Any) -> str:
    """The folder name of a device under results/measured: `nvidia_l40s`, `cpu_amd_epyc`."""
    import torch

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else f"cpu {cpu_name()}"
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def cpu_name() -> str:
    """The processor's model name, without importing torch."""
    file = Path("/proc/cpuinfo")  # on Linux
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """The names of NVIDIA GPUs by the driver's own tool, without importing torch; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def describe_machine() -> dict[str, Any]:
    """What benchmark numbers depend on: {cpu, cores, usable_cores, gpus, memory_gib}, without importing torch.

    `usable_cores` counts the CPUs that this process may run on. `gpus` has name and driver of each NVIDIA GPU. Memory is in whole
    GiB, so that a kernel update which reserves a little more changes nothing; None comes with memory_gib_reason.
    """
    found = {"cpu": cpu_name(), "cores": os.cpu_count(), "usable_cores": usable_cores(), "gpus": gpu_names()}
    try:
        return found | {"memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)}
    except (AttributeError, ValueError, OSError):
        return found | {"memory_gib": None, "memory_gib_reason": "this system does not report it through sysconf"}


def seed_everything(seed: int, *, deterministic: bool = True) -> None:
    """Seed Python, NumPy and PyTorch; with `deterministic`, ask PyTorch for repeatable algorithms (warns where it has none)."""
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
