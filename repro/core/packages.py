"""What is installed and what the project needs: lowest versions, the lock file, and packages that hide each other.

Packages are looked up by their metadata and never imported. Each finding is a `Line`.
"""

import importlib.util
import platform
import tomllib
from collections.abc import Iterator
from pathlib import Path

from .record import installed_version

# (ok, note, warning or error; the subject; what was found, with the fix if something is wrong)
Line = tuple[str, str, str]
INSTALL = "python -m pip install --no-deps -r requirements.lock"
REINSTALL = "python -m pip install --no-deps -e ."
# what `repro segment` needs: the maintained continuation of OpenMMLab's packages, with the same import names
MMSEG = {"onedl-mmsegmentation": "1.4.2", "onedl-mmcv": "2.3.6", "onedl-mmengine": "0.10.12"}
# distributions whose import names these have, too, and which therefore collide with them
MMSEG_CLASHES = ("mmsegmentation", "mmcv", "mmcv-full", "mmcv-lite", "mmengine", "mmengine-lite")


def check_floors(project: Path) -> Iterator[Line]:
    """A line for Python if it is too old, and one for each dependency of a pyproject.toml: an error if it is missing or too old.

    Extras are reported only if they are installed.
    """
    from packaging.requirements import Requirement

    if not project.is_file():
        yield "note", project.name, "not in this folder; lowest versions are not checked"
        return
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    python, found = Requirement(f"python{about['requires-python']}"), platform.python_version()
    if not python.specifier.contains(found, prereleases=True):
        yield "error", "Python", f"{found}, {python.specifier} is needed: make a virtual environment with a newer Python"
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
    """A warning that lists the versions which differ from the pins of a lock file, and one for packages that are missing."""
    from packaging.requirements import Requirement

    if not lock.is_file():
        yield "note", lock.name, "not in this folder; versions are not compared"
        return
    pins = [Requirement(line) for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    pairs = [(pin.name, str(pin.specifier).removeprefix("=="), installed_version(pin.name)) for pin in pins]
    # the build's tag does not count: 2.14.1+cu130 is 2.14.1
    differ = [f"{name} {found} (pinned: {pin})" for name, pin, found in pairs if found and found.partition("+")[0] != pin]
    absent = [name for name, _, found in pairs if found is None]
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


def check_kernels() -> Iterator[Line]:
    """Whether `import kernels` gives this project's package, and not Hugging Face's of the same name."""
    spec = importlib.util.find_spec("kernels")
    found, installed = Path(spec.origin).parent if spec and spec.origin else None, installed_version("kernels")
    if found is None or not (found / "ttt_linear").is_dir():
        fix = "python -m pip uninstall kernels" if installed else REINSTALL
        yield "error", "kernels", f"`import kernels` gives {found}, not this project's package: {fix}"
    elif installed:
        clash = f"Hugging Face's package kernels {installed} has our package's name, and transformers would import ours"
        yield "warning", "kernels", f"{clash}: python -m pip uninstall kernels, or give it an environment of its own"
    else:
        yield "ok", "kernels", "`import kernels` gives this project's; Hugging Face's package of that name is not installed"
