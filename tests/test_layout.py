"""The layout in docs/architecture.md and the tree are the same; no import goes in a circle; nothing speaks of one machine."""

import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stages import load_stages
from tests.conftest import ROOT
from tests.imports import find_imports, import_closure


def tracked() -> list[str]:
    """Files in Git, and new ones that Git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in listed if name and (ROOT / name).exists()]


def test_the_layout_is_the_tree():
    block = re.search(r"## Layout\n.*?```\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.S)[1]
    lines = [line.split(maxsplit=1) for line in block.splitlines() if line.strip()]
    assert all(len(line) == 2 for line in lines), "every entry has a caption"
    deep = ("repro", "kernels", "results")  # shown one level further
    expected = set()
    for name in tracked():
        parts = name.split("/")
        expected.add(parts[0] + ("/" if len(parts) > 1 else ""))
        if parts[0] in deep and len(parts) > 2:
            of_stage = parts[0] == "results" and parts[1] in load_stages()
            expected.add("results/STAGE/" if of_stage else "/".join(parts[:2]) + "/")
    assert {path for path, _ in lines} == expected


# what must run on any GPU machine with torch, numpy and timm (and what these bring: triton, yaml, safetensors,
# huggingface_hub)
LIGHT = ("kernels", "repro.models", "repro.bench.speed")
# `kernels.cpu_loops` is imported only where numba is installed, and pydantic only by what reads a section of params.yaml
LIGHT_IMPORTS = {"torch", "triton", "numpy", "timm", "yaml", "safetensors", "huggingface_hub", "numba", "pydantic"}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, and the names that it takes from modules."""
    name = path.relative_to(ROOT)
    return set(find_imports(path.read_text(encoding="utf-8"), ".".join(name.parent.parts), str(name)))


def import_roots(path: Path) -> set[str]:
    """The packages that a file imports from."""
    return {name.split(".")[0] for name in imported(path)}


def modules(package: str = "") -> dict[str, Path]:
    """Every first-party module, or those of one package, by its dotted name; a package by its own."""
    found = {}
    for name in tracked():
        if name.endswith(".py") and name.split("/")[0] in ("repro", "kernels", "stages"):
            found[name[:-3].replace("/", ".").removesuffix(".__init__")] = ROOT / name
    return {name: path for name, path in found.items() if not package or f"{name}.".startswith(f"{package}.")}


def import_graph() -> dict[str, set[str]]:
    """Module -> the first-party modules that it imports, anywhere in its file, but for the packages that it lies in."""
    known = modules()
    near = {name: imported(path) & known.keys() for name, path in known.items()}
    return {name: {each for each in found if not f"{name}.".startswith(f"{each}.")} for name, found in near.items()}


def test_there_are_no_import_cycles():
    """Also none through imports inside functions; a package stands for its __init__.py."""
    graphlib.TopologicalSorter(import_graph()).prepare()  # its error names the cycle


def test_no_room_opens_files_of_another_by_path():
    """`__file__` leads to files in the module's own folder or below; the checkout's root is `repro.core.paths`."""
    own = re.compile(r"Path\(__file__\)\.(with_name\(|parent\b(?!s|\.parent))")
    for path in modules().values():
        name = path.relative_to(ROOT).as_posix()
        for line in path.read_text().splitlines():
            if "__file__" in line:
                assert own.search(line) or "repro.__file__" in line or "kernels" in name, f"{name}: {line.strip()}"


def test_modules_are_short():
    for path in modules().values():
        name, lines = path.relative_to(ROOT).as_posix(), len(path.read_text().splitlines())
        assert lines <= (150 if name.startswith("stages/") else 450), f"{name} has {lines} lines"


@pytest.mark.parametrize("package", LIGHT)
def test_model_code_needs_torch_numpy_and_timm_alone(package):
    for name in import_closure(ROOT, modules(package)):
        others = import_roots(ROOT / name) - LIGHT_IMPORTS - {"repro", "kernels"} - sys.stdlib_module_names
        assert not others, f"{name} imports {others}"


def test_triton_is_imported_by_triton_files_and_their_tools_alone():
    """Whoever uses the op without Triton never loads it."""
    users = {path for path in modules().values() if "triton" in import_roots(path)}
    assert all(path.name.startswith("triton_") or "tools" in path.parts for path in users)


def test_mmsegmentation_is_imported_in_one_place():
    """It is slow to import, prints meanwhile, and must not be needed for anything else."""
    theirs = {"mmseg", "mmcv", "mmengine", "cv2"}
    users = {name for name, path in modules().items() if theirs & import_roots(path)}
    assert len(users) == 1, users


def test_whoever_runs_an_operator_says_which_backend():
    """A record names it; see `OperatorModel.selected_backend`. Of a fused block, `fused_block` says it."""
    parts = {"block_operator.py", "fused_launches.py", "fused_loops.py", "fused_training.py"}
    for path in modules("repro.models").values():
        # `kernels.dispatch` has also rules that run no operator: the dtype of a computation, a context without autocast
        runs = any(re.match(r"kernels\b(?!\.dispatch)", name) for name in imported(path))
        if runs and path.name not in parts:
            assert "selected_backend" in path.read_text(), f"{path.name} runs an operator and names no backend"


def test_nothing_names_a_machine_or_a_package_index():
    # in pieces, so that this file passes its own test
    pattern = re.compile(r"/(home|root|work)/|/tmp/\w|py" + r"pi\.org|python" + "hosted")
    for name in tracked():
        if Path(name).suffix in {".py", ".md", ".yaml", ".toml", ".lock", ".json", ".csv", ""}:
            text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
            assert not pattern.search(text), f"{name}: {pattern.search(text)[0]}"
