"""`repro doctor`: machine, packages, kernels, parameters, data and disk as plain text, to read and to paste into an issue.

Every line begins with its mark: `ok`; `note`, nothing to do; `warning`, works but not as intended; `error`, a command will fail.
A warning or an error ends with its fix. Only torch, torchvision and our own code are imported; the rest is looked up.
"""

import importlib
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import repro
from repro.core.config import load_section, section_keys
from repro.core.errors import RunError, UserError
from repro.core.packages import INSTALL, REINSTALL, Line, check_floors, check_kernels, check_lock, check_mmseg, version
from repro.core.paths import Paths, find_root
from repro.core.runtime import Runtime, choose_device, cpu_name, gpu_names, load_runtime
from repro.data.kinds import KINDS

from . import Stage
from .prepare_data import PrepareData
from .profile import active

WORK_GB = 5  # below this a run's checkpoints, snapshots and DVC cache do not fit; `repro plan` has the exact number
SHM = "/dev/shm"

STAGE = Stage(purpose="check")


def command() -> None:
    """Report what this machine has and lacks, each mismatch with its fix; exit code 1 where a command would fail."""
    report = run(find_root())
    for title, lines in report.items():
        print(title)
        for mark, subject, text in lines:
            print(f"  {mark:<8} {subject}: {text}")
    marks = [mark for lines in report.values() for mark, _, _ in lines]
    errors, warnings = (f"{marks.count(mark)} {mark}{'s' * (marks.count(mark) != 1)}" for mark in ("error", "warning"))
    print(f"{errors}, {warnings}")
    if "error" in marks:
        raise RunError(f"doctor: {errors}; each is named above with its fix")


def run(paths: Paths) -> dict[str, list[Line]]:
    """Title of a section -> its lines. Broken parameters are a line too; what depends on them then takes the defaults."""
    try:
        runtime, problem = load_runtime(paths), None
    except UserError as error:
        runtime, problem = Runtime(data_roots={}), str(error)
    gpus = gpu_names()
    sections: dict[str, Callable[[], Iterable[Line]]] = {
        "machine": lambda: _machine(gpus),
        "packages": lambda: [*check_floors(paths.root / "pyproject.toml"), *check_lock(paths.root / "requirements.lock")],
        "name clashes": lambda: _clashes(paths),
        "PyTorch and TTT-Linear": lambda: _pytorch(runtime, gpus),
        "segmentation": check_mmseg,
        "parameters and data": lambda: _parameters(paths, runtime, problem),
        "disk and shared memory": lambda: _space(paths, runtime),
    }
    return {title: list(lines()) for title, lines in sections.items()}


def _machine(gpus: list[str]) -> Iterator[Line]:
    yield "ok", "Python", platform.python_version()
    yield "ok", "OS", f"{platform.platform()}; {cpu_name()}, {os.cpu_count()} cores"
    for gpu in gpus:
        yield "ok", "GPU, driver", gpu
    if not gpus:
        yield "note", "GPU, driver", "nvidia-smi names no NVIDIA GPU; everything runs on the CPU"
    chosen = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # the order in which Triton looks
    missing = "error" if gpus else "note"
    if chosen is None or shutil.which(chosen) is None:
        named = f"$CC is {chosen}, which is not there" if chosen else "none: neither $CC nor gcc nor clang"
        yield missing, "C compiler", f"{named}; Triton on CUDA and torch.compile need one: install gcc, or set CC"
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        yield missing, "C compiler", f"{chosen}, but no Python.h, which Triton needs: install python3-dev or python3-devel"
    else:
        yield "ok", "C compiler", chosen


def _clashes(paths: Paths) -> Iterator[Line]:
    yield from check_kernels()
    code = Path(repro.__file__).resolve().parent
    if code == (paths.root / "repro").resolve():
        yield "ok", "repro", "the code that runs is this folder's"
    else:
        yield "warning", "repro", f"the code that runs is {code}, not this folder's: {REINSTALL}"


def _pytorch(runtime: Runtime, gpus: list[str]) -> Iterator[Line]:
    try:
        import torch

        from kernels import selected_backend
    except (ImportError, OSError) as error:
        yield "error", "torch and kernels", f"cannot be imported ({_first_line(error)}): {INSTALL}"
        return
    cuda = torch.cuda.is_available()
    yield "ok", "torch", f"{torch.__version__}, CUDA runtime {torch.version.cuda or 'none (a CPU build)'}"
    if not cuda and (gpus or runtime.device == "cuda"):
        why = "update the driver, and look at CUDA_VISIBLE_DEVICES" if torch.version.cuda else f"install a CUDA build: {INSTALL}"
        mark = "error" if runtime.device == "cuda" else "warning"
        yield mark, "torch", f"sees no CUDA device (runtime.device: {runtime.device}): {why}"
    try:
        if version("torchvision"):
            importlib.import_module("torchvision")
    except Exception as error:  # a build for another torch fails in many ways
        yield "error", "torchvision", f"does not fit this torch ({_first_line(error)}): {INSTALL}"
    if cuda or runtime.device != "cuda":
        yield "ok", "stages run on", f"{choose_device(runtime.device)} (runtime.device: {runtime.device})"
    for device in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        backend, reason = selected_backend("auto", device, dtype=torch.bfloat16), ""
        if backend != "triton":
            reason = f", not triton: {_obstacle(lambda: selected_backend('triton', device, dtype=torch.bfloat16))}"
        if device == "cpu" or backend == "triton":
            yield "ok", "TTT-Linear", f"{backend} on {device}{reason}"
        else:
            fix = INSTALL if version("triton") is None else "slower than it could be; use an NVIDIA GPU from sm_80 on"
            yield "warning", "TTT-Linear", f"{backend} on {device}{reason}: {fix}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _obstacle(choose_triton: Callable[[], str]) -> str:
    try:
        choose_triton()
    except ValueError as error:
        return str(error).removeprefix("backend 'triton': ").removesuffix("; use auto, torch or reference")
    return "`auto` takes it on a GPU only"


def _parameters(paths: Paths, runtime: Runtime, problem: str | None) -> Iterator[Line]:
    try:
        if problem:
            raise UserError(problem)
        profile = active(paths)
        names = section_keys(paths.params, "prepare_data")
        cells = {cell: load_section(PrepareData, paths.params, "prepare_data", cell) for cell in names}
    except UserError as error:
        yield "error", "params.yaml", f"{error}: correct it, or `repro profile use mini --force`"
        return
    yield ("ok" if profile else "note"), "params.yaml", f"equals the {profile} profile" if profile else "edited, equals no profile"
    for kind in dict.fromkeys([*runtime.data_roots, *(cell.kind for cell in cells.values())]):
        users = [cell for cell, params in cells.items() if params.kind == kind]
        used, key = ", ".join(f"prepare_data.{cell}" for cell in users), f"runtime.data_roots.{kind}"
        there = kind in runtime.data_roots and os.path.exists(runtime.data_root(paths, kind))
        state = f"{runtime.data_roots.get(kind, 'no folder named')}{'' if there else ', does not exist'}"
        if not users:
            yield "note", key, f"{state}; no prepare_data cell uses it"
        elif there:
            yield "ok", key, f"{state}, used by {used}"
        elif kind in runtime.data_roots and any(cells[cell].embedded for cell in users):
            yield "note", key, f"{state} yet; `repro prepare-data` writes it for {used}"
        else:
            yield "error", key, f"{state}, and {used} needs it: lay the data out as docs/data.md says, and set {key}"


def _space(paths: Paths, runtime: Runtime) -> Iterator[Line]:
    wanted = {"project folder": (paths.root, WORK_GB), ".runs": (paths.root / ".runs", WORK_GB)}
    for kind in runtime.data_roots:
        root = runtime.data_root(paths, kind)
        wanted[f"data root {kind}"] = root, 0 if os.path.exists(root) else KINDS[kind].size_gb or 0
    for name, (folder, need_gb) in wanted.items():
        while not os.path.isdir(folder):
            folder = folder.parent
        free_gb = shutil.disk_usage(folder).free / 1e9
        short = f", {need_gb} GB needed: make room, or move it to another disk" if free_gb < need_gb else ""
        yield ("warning" if short else "ok"), f"disk of {name}", f"{free_gb:.0f} GB free{short}"
    if not os.path.isdir(SHM):
        yield "note", SHM, "this system has none"
        return
    gib = shutil.disk_usage(SHM).total / 2**30
    small = runtime.workers > 0 and gib < 1
    fix = ", too small for loading processes: give the container more (--shm-size=8g), or set runtime.workers: 0"
    yield ("warning" if small else "ok"), SHM, f"{gib:.2g} GiB, runtime.workers is {runtime.workers}{fix if small else ''}"
