"""What a machine and a checkout have and lack: packages, compiler, GPU, kernels, parameters, data and disk, a line for
each.

torch, torchvision and the kernels are imported while they are checked and nowhere else, so that this works where they
are broken; other packages are looked up by their metadata.
"""

import contextlib
import importlib.util
import os
import platform
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .core.config import active_profile, load_section, section_keys
from .core.errors import INSTALL, UserError
from .core.paths import Paths
from .core.record import installed_version
from .core.runtime import SHM, Runtime, choose_device, cpu_name, gpu_names, load_runtime
from .data.kinds import KINDS, PrepareData

WORK_GB = 5  # with less, a run's checkpoints, snapshots and DVC cache do not fit; `repro plan` has the exact number
REINSTALL = "python -m pip install --no-deps -e ."
# (ok, note, warning or error; the subject; what was found, with the fix if something is wrong)
Line = tuple[str, str, str]
# what `repro segment` needs: the maintained continuation of OpenMMLab's packages, with the same import names
MMSEG = {"onedl-mmsegmentation": "1.4.2", "onedl-mmcv": "2.3.6", "onedl-mmengine": "0.10.12"}
# distributions whose import names these have, too, and which therefore collide with them
MMSEG_CLASHES = ("mmsegmentation", "mmcv", "mmcv-full", "mmcv-lite", "mmengine", "mmengine-lite")


def examine(paths: Paths) -> dict[str, list[Line]]:
    """The title of each section -> its lines. Wrong parameters are a line too; what depends on them then takes the
    defaults.
    """
    runtime = Runtime(data_roots={})
    with contextlib.suppress(UserError):  # `check_parameters` says what is wrong
        runtime = load_runtime(paths)
    gpus = gpu_names()
    return {
        "machine": list(check_machine(gpus)),
        "packages": [*check_floors(paths.root / "pyproject.toml"), *check_lock(paths.root / "requirements.lock")],
        "name clashes": list(check_names(paths)),
        "PyTorch and TTT-Linear": list(check_torch(runtime, gpus)),
        "segmentation": list(check_mmseg()),
        "parameters and data": list(check_parameters(paths)),
        "disk and shared memory": list(check_space(paths, runtime)),
    }


def check_machine(gpus: list[str]) -> Iterator[Line]:
    """Python, the system, and the GPUs that nvidia-smi names."""
    yield "ok", "Python", platform.python_version()
    yield "ok", "OS", f"{platform.platform()}; {cpu_name()}, {os.cpu_count()} cores"
    for gpu in gpus:
        yield "ok", "GPU, driver", gpu
    if not gpus:
        yield "note", "GPU, driver", "nvidia-smi names no NVIDIA GPU; everything runs on the CPU"


def check_floors(project: Path) -> Iterator[Line]:
    """A line for Python if it is too old, and for each dependency of a pyproject.toml, of extras only if they are
    installed.
    """
    from packaging.requirements import Requirement

    if not project.is_file():
        yield "note", project.name, "not in this folder; lowest versions are not checked"
        return
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    python, found = Requirement(f"python{about['requires-python']}"), platform.python_version()
    if not python.specifier.contains(found, prereleases=True):
        fix = "make a virtual environment with a newer Python"
        yield "error", "Python", f"{found}, {python.specifier} is needed: {fix}"
    extras = [text for texts in about.get("optional-dependencies", {}).values() for text in texts]
    for text in dict.fromkeys([*about["dependencies"], *extras]):
        wanted, optional = Requirement(text), text not in about["dependencies"]
        found = installed_version(wanted.name)
        if (wanted.marker and not wanted.marker.evaluate()) or (optional and found is None):
            continue
        if found is not None and wanted.specifier.contains(found, prereleases=True):
            yield "ok", wanted.name, found + (f" ({wanted.specifier})" if wanted.specifier else "")
            continue
        fix = f"python -m pip install '{wanted.name}{wanted.specifier}'" if optional else INSTALL
        yield "error", wanted.name, f"{found or 'not installed'}, {wanted.specifier or 'any version'} is needed: {fix}"


def check_lock(lock: Path) -> Iterator[Line]:
    """A warning that lists the versions which differ from the pins of a lock file, and one for packages that are
    missing.
    """
    from packaging.requirements import Requirement

    if not lock.is_file():
        yield "note", lock.name, "not in this folder; versions are not compared"
        return
    lines = lock.read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    differ, absent = [], []
    for pin in pins:
        wanted, found = str(pin.specifier).removeprefix("=="), installed_version(pin.name)
        if found is None:
            absent.append(pin.name)
        elif found.partition("+")[0] != wanted:  # the build's tag does not count: 2.14.1+cu130 is 2.14.1
            differ.append(f"{pin.name} {found} (pinned: {wanted})")
    for what, names in (("differ", differ), ("are not installed", absent)):
        if names:
            yield "warning", lock.name, f"{len(names)} of {len(pins)} packages {what}: {', '.join(names)}: {INSTALL}"
    if not differ and not absent:
        yield "ok", lock.name, f"all {len(pins)} versions are those with which the tests ran"


def check_mmseg() -> Iterator[Line]:
    """The three packages of `repro segment`, and other distributions that write into the same import names."""
    for name, pin in MMSEG.items():
        found = installed_version(name)
        problem = f"{found or 'not installed'}, repro segment is tested with {pin}: {INSTALL}"
        yield ("ok" if found == pin else "warning"), name, (pin if found == pin else problem)
    for name in MMSEG_CLASHES:
        ours = f"onedl-{name.partition('-')[0]}"
        if other := installed_version(name):  # removing it also removes files of ours in the same folder
            fix = f"python -m pip uninstall {name}, then python -m pip install --force-reinstall --no-deps {ours}=={MMSEG[ours]}"
            yield "error", name, f"{other} has the import name of {ours}, and one overwrites the other: {fix}"


def check_names(paths: Paths) -> Iterator[Line]:
    """Whether `import kernels` gives this project's package, not Hugging Face's of that name, and `repro` the one of
    this checkout.
    """
    spec = importlib.util.find_spec("kernels")
    found, installed = Path(spec.origin).parent if spec and spec.origin else None, installed_version("kernels")
    if found is None or not (found / "ttt_linear").is_dir():
        fix = "python -m pip uninstall kernels" if installed else REINSTALL
        yield "error", "kernels", f"`import kernels` gives {found}, not this project's package: {fix}"
    elif installed:
        clash = f"Hugging Face's package kernels {installed} has our package's name, and transformers would import ours"
        yield "warning", "kernels", f"{clash}: python -m pip uninstall kernels, or give it an environment of its own"
    else:
        alone = "Hugging Face's package of that name is not installed"
        yield "ok", "kernels", f"`import kernels` gives this project's; {alone}"
    code = Path(__file__).parent.resolve()
    if code == (paths.root / "repro").resolve():
        yield "ok", "repro", "the code that runs is this folder's"
    else:
        yield "warning", "repro", f"the code that runs is {code}, not this folder's: {REINSTALL}"


def check_torch(runtime: Runtime, gpus: list[str]) -> Iterator[Line]:
    """torch, the compiler that Triton and torch.compile need, torchvision, the device of the stages, and which backend
    of TTT-Linear runs on each device.
    """
    try:
        import torch

        from kernels import selected_backend
        from kernels.dispatch import compiler_obstacle, find_compiler, loops_obstacle
    except Exception as error:  # a broken installation fails in many ways
        yield "error", "torch and kernels", f"cannot be imported ({_first_line(error)}): {INSTALL}"
        return
    cuda = torch.cuda.is_available()
    yield "ok", "torch", f"{torch.__version__}, CUDA runtime {torch.version.cuda or 'none (a CPU build)'}"
    if not cuda and (gpus or runtime.device == "cuda"):
        of_cuda, of_cpu = "update the driver, and look at CUDA_VISIBLE_DEVICES", f"install a CUDA build: {INSTALL}"
        fix = of_cuda if torch.version.cuda else of_cpu
        mark = "error" if runtime.device == "cuda" else "warning"
        yield mark, "torch", f"sees no CUDA device (runtime.device: {runtime.device}): {fix}"
    if obstacle := compiler_obstacle():
        yield "error" if gpus else "note", "C compiler", f"Triton on CUDA and torch.compile need one: {obstacle}"
    else:
        yield "ok", "C compiler", str(find_compiler())
    try:
        if installed_version("torchvision"):
            importlib.import_module("torchvision")
    except Exception as error:  # a build for another torch fails in many ways
        yield "error", "torchvision", f"does not fit this torch ({_first_line(error)}): {INSTALL}"
    if cuda or runtime.device != "cuda":
        yield "ok", "stages run on", f"{choose_device(runtime.device)} (runtime.device: {runtime.device})"
    for device in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        backend, reason = selected_backend("auto", device, dtype=torch.bfloat16), ""
        if backend != "triton":
            reason = f", not triton: {_find_obstacle(lambda: selected_backend('triton', device, dtype=torch.bfloat16))}"
        if device == "cpu" or backend == "triton":
            yield "ok", "TTT-Linear", f"{backend} on {device}{reason}"
            if device == "cpu" and (obstacle := loops_obstacle(torch.device(device), "", True)):
                yield "note", "scans", f"torch on cpu, several times slower than numba: {obstacle}: {INSTALL}"
        else:
            slow = "slower than it could be; use an NVIDIA GPU from sm_80 on"
            fix = slow if installed_version("triton") else INSTALL
            yield "warning", "TTT-Linear", f"{backend} on {device}{reason}: {fix}"


def check_parameters(paths: Paths) -> Iterator[Line]:
    """Whether params.yaml can be loaded, and the data sets of its cells are in place."""
    try:
        runtime, profile = load_runtime(paths), active_profile(paths)
        names = section_keys(paths.params, "prepare_data")
        cells = {cell: load_section(PrepareData, paths.params, "prepare_data", cell) for cell in names}
    except UserError as error:
        yield "error", "params.yaml", f"{error}: correct it, or `repro profile use mini --force`"
        return
    if profile:
        yield "ok", "params.yaml", f"equals the {profile} profile"
    else:
        yield "note", "params.yaml", "edited, equals no profile"
    users: dict[str, list[str]] = {key: [] for key in runtime.data_roots}
    sources = set()  # of published files from which a set is still to be written
    for cell, params in cells.items():
        key, kind = cell if cell in runtime.data_roots else params.kind, KINDS[params.kind]
        users.setdefault(key, []).append(cell)
        if kind.source and not (key in runtime.data_roots and runtime.data_root(paths, key).exists()):
            sources.add(kind.source)
            users.setdefault(kind.source, []).append(cell)
    for key, needed_by in users.items():
        subject, folder = f"runtime.data_roots.{key}", runtime.data_roots.get(key)
        used = ", ".join(f"prepare_data.{cell}" for cell in needed_by)
        exists = folder is not None and os.path.exists(runtime.data_root(paths, key))
        state = f"{folder or 'no folder named'}{'' if exists else ', does not exist'}"
        if not needed_by:
            yield "note", subject, f"{state}; no prepare_data cell uses it"
        elif exists:
            yield "ok", subject, f"{state}, used by {used}"
        elif folder is not None and key not in sources and any(cells[cell].settings for cell in needed_by):
            yield "note", subject, f"{state} yet; `repro prepare-data` writes it for {used}"
        else:
            fix = f"lay the data out as docs/data.md says, and set {subject}"
            yield "error", subject, f"{state}, and {used} needs it: {fix}"


def check_space(paths: Paths, runtime: Runtime) -> Iterator[Line]:
    """Free disk space for runs and for data sets that are not there yet, and shared memory for the processes that load
    data.
    """
    wanted = {"project folder": (paths.root, WORK_GB), ".runs": (paths.root / ".runs", WORK_GB)}
    for key in runtime.data_roots:
        root, known = runtime.data_root(paths, key), KINDS.get(key)
        wanted[f"data root {key}"] = root, 0 if known is None or os.path.exists(root) else known.size_gb or 0
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
    state = f"{gib:.2g} GiB, runtime.workers is {runtime.workers}"
    fix = ", too small for batches, which then go through slower pipes: give the container more (--shm-size=8g)"
    yield ("warning", SHM, state + fix) if small else ("ok", SHM, state)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _find_obstacle(choose_triton: Callable[[], Any]) -> str:
    try:
        choose_triton()
    except ValueError as error:
        return str(error).removeprefix("backend 'triton': ").removesuffix("; use auto, torch or reference")
    return "`auto` takes it on a GPU only"
