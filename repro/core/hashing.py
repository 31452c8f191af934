"""Short hashes of contents, and the hash of the code that a result depends on."""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

FIRST_PARTY = ("repro", "kernels", "stages")
DIGITS = 16


def short_hash(content: bytes | memoryview | str) -> str:
    """The first 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8: how every record names a content."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:DIGITS]


def hash_file(path: Path, digits: int = DIGITS) -> str:
    """The short hash of a file's content, or more of its 64 digits; raises OSError as reading does."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:digits]


def hash_files(root: Path, files: Iterable[str]) -> str:
    """The short hash of the names and contents of files, whose names are relative to `root`."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()[:DIGITS]


def hash_code(root: Path, modules: Iterable[str]) -> str:
    """The short hash of the import closure of some modules."""
    return hash_files(root, import_closure(root, modules))


def import_closure(root: Path, modules: Iterable[str]) -> list[str]:
    """First-party source files that the given modules import, directly or not, as sorted paths relative to `root`.

    Static: reads `import` statements anywhere in a file (also inside functions), resolves relative imports, and includes
    each package's `__init__.py` on the way, since Python runs it.
    """
    seen: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        parts = module.split(".")
        for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
            path = _find_source(root, name)
            if path is None or path in seen:
                continue
            seen.add(path)
            package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
            todo.extend(_find_imports((root / path).read_text(encoding="utf-8"), package, path))
    return sorted(seen)


def _find_source(root: Path, module: str) -> str | None:
    if module.split(".")[0] not in FIRST_PARTY:
        return None
    base = module.replace(".", "/")
    return next((candidate for candidate in (f"{base}/__init__.py", f"{base}.py") if (root / candidate).is_file()), None)


@functools.cache
def _find_imports(source: str, package: str, path: str) -> tuple[str, ...]:
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
