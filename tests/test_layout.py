"""The layout in docs/architecture.md and the tree are the same; imports point one way; nothing speaks of one machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from repro.core.hashing import import_closure

ROOT = Path(__file__).parents[1]


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
            expected.add("/".join(parts[:2]) + "/")
    assert {path for path, _ in lines} == expected


# package -> what it may import of ours (itself aside)
ALLOWED = {
    "kernels": set(),
    "repro.core": set(),
    "repro.data": {"repro.core"},
    "repro.engine": {"repro.core"},
    "repro.models": {"kernels", "repro.core"},
    "repro.measure": {"kernels", "repro.models"},
    "repro.explain": {"kernels", "repro.core", "repro.models"},
    "repro.tasks": {"repro.core", "repro.data", "repro.models"},
    "repro.report": {"repro.core"},
    "stages": {
        "kernels",
        "repro.core",
        "repro.data",
        "repro.engine",
        "repro.models",
        "repro.measure",
        "repro.explain",
        "repro.tasks",
        "repro.report",
    },
}
# packages that must run on any GPU machine with torch, numpy and timm (and what these bring: triton, yaml, safetensors)
LIGHT = ("kernels", "repro.models", "repro.measure")
LIGHT_IMPORTS = {"torch", "triton", "numpy", "timm", "yaml", "safetensors"}


def imported(path: Path, package: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def sources(package: str) -> list[Path]:
    return [ROOT / name for name in tracked() if name.endswith(".py") and name.startswith(package.replace(".", "/") + "/")]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    for path in sources(package):
        own = ".".join(path.relative_to(ROOT).parent.parts)
        for name in imported(path, own):
            if name.split(".")[0] not in ("repro", "kernels", "stages") or name in ("repro", "stages"):
                continue
            target = "kernels" if name.split(".")[0] == "kernels" else ".".join(name.split(".")[:2])
            if target != package and not (package == "stages" and target.startswith("stages")):
                assert target in ALLOWED[package], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", LIGHT)
def test_model_code_needs_torch_numpy_and_timm_alone(package):
    import sys

    modules = {name[:-3].replace("/", ".") for name in map(str, (p.relative_to(ROOT) for p in sources(package)))}
    for name in import_closure(ROOT, modules):
        path = ROOT / name
        for module in imported(path, ".".join(path.relative_to(ROOT).parent.parts)):
            top = module.split(".")[0]
            assert top in LIGHT_IMPORTS | {"repro", "kernels"} or top in sys.stdlib_module_names, f"{name} imports {module}"


def test_triton_is_imported_by_triton_files_and_their_tools_alone():
    """Whoever uses the op without Triton never loads it."""
    users = {path.relative_to(ROOT).as_posix() for p in ("kernels", "repro", "stages") for path in sources(p)}
    by = {name: {m.split(".")[0] for m in imported(ROOT / name, ".".join(Path(name).parent.parts))} for name in users}
    assert all(Path(name).name.startswith("triton_") or "/tools/" in name for name in users if "triton" in by[name])


def test_mmsegmentation_is_imported_in_one_place():
    """It is slow to import, prints meanwhile, and must not be needed for anything else."""
    theirs = {"mmseg", "mmcv", "mmengine", "cv2"}
    modules = [path for package in ALLOWED for path in sources(package)]
    users = {path.relative_to(ROOT).as_posix() for path in modules if theirs & {name.split(".")[0] for name in imported(path, "")}}
    assert users == {"repro/tasks/segmentation/openmmlab.py"}


def test_only_the_mixers_reach_the_kernels_from_the_models():
    users = {p.name for p in sources("repro.models") if any(name.split(".")[0] == "kernels" for name in imported(p, "repro.models"))}
    assert users == {"adapter.py", "ttt_mixer.py", "vim.py", "vrwkv.py"}


def test_nothing_names_a_machine_or_a_package_index():
    # in pieces, so that this file passes its own test
    pattern = re.compile(r"/(home|root|work)/|/tmp/\w|py" + r"pi\.org|python" + "hosted")
    for name in tracked():
        if Path(name).suffix in {".py", ".md", ".yaml", ".toml", ".lock", ".json", ".csv", ""}:
            text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
            assert not pattern.search(text), f"{name}: {pattern.search(text)[0]}"
