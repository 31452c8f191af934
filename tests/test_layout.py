"""The layout in docs/architecture.md and the tree are the same; imports point one way; nothing speaks of one machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from repro.core.hashing import import_closure
from stages import stage_names

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
            of_stage = parts[0] == "results" and parts[1] in stage_names()
            expected.add("results/STAGE/" if of_stage else "/".join(parts[:2]) + "/")
    assert {path for path, _ in lines} == expected


# room -> the rooms that it may import beside itself; a line may name rooms above it only
ALLOWED = {
    "kernels": (),
    "repro.core": (),
    "repro.data": ("repro.core",),
    "repro.models": ("kernels", "repro.core"),
    "repro.report": ("repro.core",),
    "repro.training": ("repro.core",),
    "repro.tasks": ("repro.core", "repro.data", "repro.models", "repro.training"),
    "repro.runs": ("repro.core", "repro.data", "repro.models", "repro.training", "repro.tasks"),
    "repro.bench": ("kernels", "repro.core", "repro.models", "repro.tasks", "repro.runs"),
    "repro.inference": ("kernels", "repro.core", "repro.data", "repro.models", "repro.tasks", "repro.bench"),
    "repro.graph": ("repro.core", "repro.runs"),
    "repro.pipeline": ("repro.core", "repro.runs"),
    "repro.doctor": ("kernels", "repro.core", "repro.data"),
    "repro.papers": (
        "kernels",
        "repro.core",
        "repro.data",
        "repro.models",
        "repro.report",
        "repro.bench",
        "repro.tasks",
        "repro.training",
        "repro.runs",
    ),
    "repro.planning": ("repro.core", "repro.data", "repro.bench", "repro.report", "repro.papers"),
}
ALLOWED["stages"] = tuple(ALLOWED)
ALLOWED["repro.cli"] = ("repro.core", "stages")
# what must run on any GPU machine with torch, numpy and timm (and what these bring: triton, yaml, safetensors,
# huggingface_hub)
LIGHT = ("kernels", "repro.models", "repro.bench.speed")
# `kernels.cpu_loops` is imported only where numba is installed
LIGHT_IMPORTS = {"numba", "llvmlite", "torch", "triton", "numpy", "timm", "yaml", "safetensors", "huggingface_hub"}


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
    return [
        ROOT / name for name in tracked() if name.endswith(".py") and name.startswith(package.replace(".", "/") + "/")
    ]


def room_of(module: str) -> str:
    """The room of a module or of a name in it."""
    parts = module.split(".")
    if parts[0] != "repro":
        return parts[0]
    return ".".join(parts[:2])


def modules() -> dict[str, Path]:
    """Every first-party module by its dotted name; a package by its own."""
    found = {}
    for name in tracked():
        if name.endswith(".py") and name.split("/")[0] in ("repro", "kernels", "stages"):
            found[name[:-3].replace("/", ".").removesuffix(".__init__")] = ROOT / name
    return found


def import_graph() -> dict[str, set[str]]:
    """Module -> the first-party modules that it imports, anywhere in its file; the packages that it lies in are left
    out.
    """
    known = modules()
    graph = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = {
            target for target in imported(path, package) if target in known and not f"{name}.".startswith(f"{target}.")
        }
    return graph


def test_imports_point_one_way():
    for name, targets in import_graph().items():
        if name in ("repro", "repro.__main__"):
            continue
        room = room_of(name)
        for target in targets - {"repro"}:
            assert room_of(target) in (room, *ALLOWED[room]), f"{name} imports {target}"


def test_there_are_no_import_cycles():
    """Also none through imports inside functions; a package stands for its __init__.py."""
    graph, state = import_graph(), {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        state[name] = "open"
        for target in sorted(graph[name]):
            assert state.get(target) != "open", (
                f"import cycle: {' -> '.join([*path[path.index(target) if target in path else 0 :], name, target])}"
            )
            if target not in state:
                visit(target, (*path, name))
        state[name] = "done"

    for name in sorted(graph):
        if name not in state:
            visit(name, ())


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
    import sys

    names = {name for name in modules() if f"{name}.".startswith(f"{package}.")}
    for name in import_closure(ROOT, names):
        path = ROOT / name
        for module in imported(path, ".".join(path.relative_to(ROOT).parent.parts)):
            top = module.split(".")[0]
            assert top in LIGHT_IMPORTS | {"repro", "kernels"} or top in sys.stdlib_module_names, (
                f"{name} imports {module}"
            )


def test_triton_is_imported_by_triton_files_and_their_tools_alone():
    """Whoever uses the op without Triton never loads it."""
    users = {path.relative_to(ROOT).as_posix() for p in ("kernels", "repro", "stages") for path in sources(p)}
    by = {name: {m.split(".")[0] for m in imported(ROOT / name, ".".join(Path(name).parent.parts))} for name in users}
    assert all(Path(name).name.startswith("triton_") or "/tools/" in name for name in users if "triton" in by[name])


def test_mmsegmentation_is_imported_in_one_place():
    """It is slow to import, prints meanwhile, and must not be needed for anything else."""
    theirs = {"mmseg", "mmcv", "mmengine", "cv2"}
    modules = [path for package in ALLOWED for path in sources(package)]
    users = {
        path.relative_to(ROOT).as_posix()
        for path in modules
        if theirs & {name.split(".")[0] for name in imported(path, "")}
    }
    assert len(users) == 1, users


def test_whoever_runs_an_operator_says_which_backend():
    """A record names it; see `OperatorModel.selected_backend`."""
    for path in sources("repro.models"):
        if any(name.split(".")[0] == "kernels" for name in imported(path, "repro.models")):
            assert "selected_backend" in path.read_text(), f"{path.name} runs an operator and names no backend"


def test_nothing_names_a_machine_or_a_package_index():
    # in pieces, so that this file passes its own test
    pattern = re.compile(r"/(home|root|work)/|/tmp/\w|py" + r"pi\.org|python" + "hosted")
    for name in tracked():
        if Path(name).suffix in {".py", ".md", ".yaml", ".toml", ".lock", ".json", ".csv", ""}:
            text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
            assert not pattern.search(text), f"{name}: {pattern.search(text)[0]}"
