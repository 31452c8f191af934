"""Checks of a machine and a work tree, with a line for each finding.

torch and the kernels are imported only within their own check, so that the other checks work where they are broken.
Other packages are looked up by their metadata.
"""

import importlib.util
import os
import platform
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from .core.children import ask
from .core.config import active_profile, load_section, section_keys
from .core.errors import INSTALL, UserError
from .core.paths import Paths, describe_missing_results
from .core.record import installed_version
from .core.runtime import SHM, Runtime, cpu_name, gpu_names, load_runtime
from .data.cells import find_data_root, find_source
from .data.kinds import KINDS, PrepareData

_WORK_GB = 5  # with less, a run's checkpoints, snapshots and DVC cache do not fit
# distributions that write into the import name of another one, which the project needs
_CLASHES = {"kernels": "-e ."}
_CLASHES |= {f"mm{end}": f"onedl-mm{end.partition('-')[0]}" for end in ("segmentation", "cv", "cv-full", "cv-lite")}
_CLASHES |= {f"mmengine{end}": "onedl-mmengine" for end in ("", "-lite")}
# (ok, note, warning or error; the subject; what was found, with the fix if something is wrong)
_Line = tuple[str, str, str]


def examine(paths: Paths) -> Iterator[_Line]:
    """Yield all lines. Wrong parameters give a line too; the checks that depend on them then take the defaults."""
    yield "ok", "machine", f"{platform.platform()}; {cpu_name()}, {os.cpu_count()} cores"
    yield from check_packages(paths.root)
    yield from check_checkout(paths.root)
    runtime = Runtime(data_roots={})
    try:
        runtime, profile = load_runtime(paths), active_profile(paths)
        shown = ("ok", f"profile {profile}") if profile else ("note", "edited, equals no profile")
        yield shown[0], "params.yaml", shown[1]
        yield from _check_data(paths, runtime)
    except UserError as error:
        yield "error", "params.yaml", f"{error}: correct it, or `repro profile use mini --force`"
    yield from _check_torch(runtime)
    free_gb = shutil.disk_usage(paths.root).free / 1e9
    short = f"{free_gb:.0f} GB free, {_WORK_GB} GB needed: make room, or move the project to another disk"
    yield ("warning", "disk", short) if free_gb < _WORK_GB else ("ok", "disk", f"{free_gb:.0f} GB free")
    if runtime.workers and os.path.isdir(SHM) and (gib := shutil.disk_usage(SHM).total / 2**30) < 1:
        fix = "batches go through slower pipes: give the container more (--shm-size=8g)"
        yield "warning", SHM, f"{gib:.2g} GiB are too small for {runtime.workers} workers, and {fix}"


def check_packages(root: Path) -> Iterator[_Line]:
    """Compare Python and the packages with pyproject.toml and requirements.lock; missing extras are not reported."""
    from packaging.requirements import Requirement

    project, lock, python = root / "pyproject.toml", root / "requirements.lock", platform.python_version()
    if not project.is_file() or not lock.is_file():
        yield "note", "packages", f"{project.name} or {lock.name} is not in this folder; versions are not compared"
        return
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    problem = f"{python}, {about['requires-python']} is needed: make a virtual environment with a newer Python"
    is_new = Requirement(f"python{about['requires-python']}").specifier.contains(python, prereleases=True)
    yield ("ok", "Python", python) if is_new else ("error", "Python", problem)
    # an extra that is not installed is no problem; one that is installed must fit
    extras = [text for texts in about.get("optional-dependencies", {}).values() for text in texts]
    for text in dict.fromkeys([*about["dependencies"], *extras]):
        wanted, found = Requirement(text), installed_version(Requirement(text).name)
        if (wanted.marker and not wanted.marker.evaluate()) or (found is None and text not in about["dependencies"]):
            continue
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            problem = f"{found or 'not installed'}, {wanted.specifier or 'any version'} is needed: {INSTALL}"
            yield "error", wanted.name, problem
    pins = [Requirement(line) for line in lock.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    differ = []
    for pin in pins:
        found, wanted = installed_version(pin.name) or "not installed", str(pin.specifier).removeprefix("==")
        if found.partition("+")[0] != wanted:  # the local tag of a build does not count: 2.14.1+cu130 is 2.14.1
            differ.append(f"{pin.name} {found} (pinned: {wanted})")
    problem = f"{len(differ)} of {len(pins)} packages differ: {', '.join(differ)}: {INSTALL}"
    yield ("warning", lock.name, problem) if differ else ("ok", lock.name, f"all {len(pins)} packages are as pinned")
    for name, ours in _CLASHES.items():
        if found := installed_version(name):  # uninstalling it removes our files in the same folder: reinstall ours
            fix = f"python -m pip uninstall {name}, then python -m pip install --force-reinstall --no-deps {ours}"
            yield "error", name, f"{found} takes an import name of this project: {fix}"


def check_checkout(root: Path) -> Iterator[_Line]:
    """Check that the running code is this folder's, and look for Git, DVC, missing results and weights."""
    spec = importlib.util.find_spec("kernels")
    places = {"repro": Path(__file__).parent, "kernels": Path(spec.origin).parent if spec and spec.origin else None}
    for name, found in places.items():
        if found is None or found.resolve() != (root / name).resolve():
            fix = "python -m pip install --no-deps -e ."
            yield "warning", name, f"the code that runs is {found}, not this folder's: {fix}"
    commit = ask(["git", "describe", "--always", "--dirty"], root)
    yield ("ok", "Git", commit.strip()) if commit else ("note", "Git", "no repository; records will name no commit")
    if not (root / ".dvc").is_dir():
        yield "error", "DVC", "no folder .dvc: dvc init, with --no-scm where there is no Git"
    if missing := describe_missing_results(root):
        yield "warning", "results", missing
    weights = len([*root.glob("artifacts/*/*/weights.safetensors")])
    yield ("ok", "weights", f"of {weights} cells") if weights else ("note", "weights", "none; `repro run` trains them")


def _check_data(paths: Paths, runtime: Runtime) -> Iterator[_Line]:
    """Check for each cell of prepare_data that its data set is in place or can be written."""
    for cell in section_keys(paths.params, "prepare_data"):
        params, subject = load_section(PrepareData, paths.params, "prepare_data", cell), f"prepare_data.{cell}"
        kind = KINDS[params.kind]
        try:
            root, source = find_data_root(paths, runtime, cell, params.kind), find_source(paths, runtime, kind)
        except UserError as error:
            yield "error", subject, str(error)
            continue
        if root.exists():
            yield "ok", subject, str(root)
        elif kind.embedded and (source is None or source.exists()):
            yield "note", subject, f"{root} is not there yet; `repro prepare-data` writes it"
        else:
            fix = f"lay the data out as docs/data.md says{f', {kind.size_gb} GB' if kind.size_gb else ''}"
            yield "error", subject, f"{source if kind.embedded else root} does not exist: {fix}"


def _check_torch(runtime: Runtime) -> Iterator[_Line]:
    """Check torch, the GPUs, the C compiler for Triton, and the backend of TTT-Linear on each device."""
    gpus = gpu_names()
    yield "ok" if gpus else "note", "GPU, driver", ", ".join(gpus) or "nvidia-smi names none; the CPU runs everything"
    try:
        import torch
        import torchvision  # noqa: F401  a build for another torch fails

        from kernels import selected_backend
        from kernels.dispatch import compiler_obstacle, numba_obstacle
    except Exception as error:  # a broken installation fails in many ways
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        yield "error", "torch and kernels", f"cannot be imported ({said}): {INSTALL}"
        return
    cuda = torch.version.cuda or "none (a CPU build)"
    yield "ok", "torch", f"{torch.__version__}, CUDA {cuda}; runtime.device: {runtime.device}"
    if not torch.cuda.is_available() and (gpus or runtime.device == "cuda"):
        fix = "update the driver, and look at CUDA_VISIBLE_DEVICES" if torch.version.cuda else INSTALL
        mark = "error" if runtime.device == "cuda" else "warning"
        yield mark, "torch", f"sees no CUDA device (runtime.device: {runtime.device}): {fix}"
    if obstacle := compiler_obstacle():
        yield "error" if gpus else "note", "C compiler", f"Triton on CUDA and torch.compile need one: {obstacle}"
    for device in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        backend = selected_backend("auto", device, dtype=torch.bfloat16)
        slow = f", slower than triton: use an NVIDIA GPU from sm_80 on, or {INSTALL}"
        is_slow = device != "cpu" and backend != "triton"
        yield "warning" if is_slow else "ok", "TTT-Linear", f"{backend} on {device}{slow if is_slow else ''}"
    if obstacle := numba_obstacle():
        yield "note", "scans", f"torch on cpu, several times slower than numba: {obstacle}: {INSTALL}"
