"""The first-party files that a module imports, for the tests of the layout and of the graph."""

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from repro.core.hashing import FIRST_PARTY


def import_closure(root: Path, modules: Iterable[str]) -> list[str]:
    """Return the first-party files that modules import, directly or not, as sorted paths relative to `root`.

    The search is static: it reads `import` statements anywhere in a file, also inside functions, resolves relative
    imports, and includes the `__init__.py` of each package on the way, because Python runs it.
    """
    # dotted name -> its file; None for a name that is no module, or no first-party one
    found: dict[str, str | None] = {}
    todo = list(modules)
    while todo:
        parts = todo.pop().split(".")
        names = (".".join(parts[: i + 1]) for i in range(len(parts))) if parts[0] in FIRST_PARTY else ()
        for name in names:
            if name in found:
                continue
            base = name.replace(".", "/")
            files = (f"{base}/__init__.py", f"{base}.py")
            path = found[name] = next((file for file in files if (root / file).is_file()), None)
            if path is not None:
                package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
                todo.extend(find_imports((root / path).read_text(encoding="utf-8"), package, path))
    return sorted(filter(None, found.values()))


@functools.cache
def find_imports(source: str, package: str, path: str) -> tuple[str, ...]:
    """Return the absolute names of the modules that a source imports anywhere, and of the names imported from them.

    `package` is the dotted name of the package of its file; `path` is for messages.
    """
    found = []
    for node in ast.walk(ast.parse(source, filename=path)):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found.append(base)
            found.extend(f"{base}.{alias.name}" for alias in node.names)  # `from package import module`
    return tuple(found)
