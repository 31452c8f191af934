"""Short hashes of contents, and the hash of the code that a result depends on."""

import ast
import functools
import hashlib
import io
import tokenize
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from .errors import UserError

FIRST_PARTY = ("repro", "kernels", "stages")
DIGITS = 16
Place = tuple[int, int]  # line, from 1 on, and character in it, from 0 on
# how a token is written that is nothing but layout; no other token begins with white space
_LAYOUT = {tokenize.NEWLINE: "\n", tokenize.INDENT: " in", tokenize.DEDENT: " out"}
_MEANINGLESS = {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}


def short_hash(content: bytes | memoryview | str) -> str:
    """The first 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8: how every record names a content."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:DIGITS]


def hash_file(path: Path, digits: int = DIGITS) -> str:
    """The short hash of a file's content, or more of its 64 digits; raises OSError as reading does."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:digits]


def require_hash(
    path: Path | None,
    sha256: str | None,
    advice: str = "; get the right file",
    *,
    named: str = "",
    stated: str = "--sha256",
) -> None:
    """Refuse a file whose SHA-256 does not begin with the stated digits, 8 or more; None states nothing.

    Errors name the file as `named`, by default by its path, and the digits by the option or the key of a params file
    that `stated` them; `advice` ends them.

    Raises:
        UserError: another hash, too few digits or others than hexadecimal ones, or no file.
    """
    if sha256 is None:
        return
    if len(sha256) < 8 or set(sha256.lower()) - set("0123456789abcdef"):
        raise UserError(f"{stated} {sha256}: expected 8 hex digits or more")
    if path is None or not path.is_file():
        raise UserError(f"{named or path or stated}: no such file, so its hash cannot be verified; name the right one")
    found = hash_file(path, digits=64)
    if not found.startswith(sha256.lower()):
        raise UserError(f"{named or path}: has SHA-256 {found[:16]}..., expected {sha256}{advice}")


def require_intact_zip(path: Path) -> None:
    """Raise a ValueError about a part of a zip, such as a file of `torch.save`, that has another sum than it states.

    PyTorch does not look at the sums. Files that are no zips pass; the errors of `zipfile` about damage elsewhere are
    its own.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"damaged: the content of {damaged} is not what its checksum says")


def hash_files(root: Path, files: Iterable[str]) -> str:
    """The short hash of the names and contents of files, whose names are relative to `root`."""
    return _hash_named({name: (root / name).read_bytes() for name in files})


def hash_sources(root: Path, sources: Iterable[str], whole: Iterable[str] = ()) -> str:
    """The short hash of sources, whose names are relative to `root`, that only an edit with a meaning changes.

    A Python file counts by its tokens, without comments, docstrings and layout, and alike under every version of
    Python. Other files count as they are, and so do the `whole` ones.
    """
    as_they_are = set(whole)
    meant = {name for name in sources if name.endswith(".py")} - as_they_are
    contents = {name: (root / name).read_bytes() for name in as_they_are.union(sources) - meant}
    return _hash_named(contents | {name: _find_meaning((root / name).read_text(encoding="utf-8")) for name in meant})


def hash_code(root: Path, modules: Iterable[str]) -> str:
    """The short hash of the import closure of some modules; see `hash_sources`."""
    return hash_sources(root, import_closure(root, modules))


def require_own_code(root: Path) -> None:
    """Raise UserError where the code that runs is not that of the checkout at `root`, which its records name.

    A folder without dvc.yaml is no checkout, and one without this code, in which a wheel runs, has none that could be
    taken for it.
    """
    for name in FIRST_PARTY if (root / "dvc.yaml").is_file() else ():
        own, runs = root / name / "__init__.py", getattr(find_spec(name), "origin", None)
        if runs and own.is_file() and own.resolve() != Path(runs).resolve():
            raise UserError(
                f"{Path(runs).parent}: this code runs, and results would go to {root}, whose records name its own; use "
                "that checkout's .venv, or `python -m repro` there"
            )


def _hash_named(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(name.encode() + b"\0" + hashlib.sha256(contents[name]).digest())
    return digest.hexdigest()[:DIGITS]


@functools.cache
def _find_meaning(source: str) -> bytes:
    """The tokens of a Python source without its comments and docstrings, apart from each other by zero bytes."""
    docstrings = dict(_find_docstrings(source))
    found: list[str] = []
    end: Place = (0, 0)  # of the docstring that was met last
    follows_docstring = False
    for kind, text, place in _list_tokens(source):
        if place in docstrings:
            end, follows_docstring = docstrings[place], True
        if place < end:
            continue
        # the line break or the semicolon after it goes with the docstring, but not one that alone ends `def f(): "..."`
        if not (follows_docstring and (text == ";" or (kind == tokenize.NEWLINE and found[-1:] != [":"]))):
            found.append(_LAYOUT.get(kind, text))
        follows_docstring = False
    return "\0".join(found).encode()


def _find_docstrings(source: str) -> Iterator[tuple[Place, Place]]:
    """Where each docstring begins and ends."""
    lines = _split_lines(source)

    def place(line: int, byte: int) -> Place:  # the parser counts in bytes of UTF-8
        return line, len(lines[line - 1].encode()[:byte].decode())

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str())) as first:
                    yield place(first.lineno, first.col_offset), place(first.end_lineno, first.end_col_offset)


def _list_tokens(source: str) -> Iterator[tuple[int, str, Place]]:
    """Kind, text and place of each token that has a meaning; a formatted string is one token, as it was before Python
    3.12.
    """
    lines, depth, begin = _split_lines(source), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name.endswith("STRING_START"):
            begin, depth = begin if depth else token.start, depth + 1
        elif name.endswith("STRING_END"):
            depth -= 1
            if not depth:
                between = lines[begin[0] - 1 : token.end[0]]
                between[-1] = between[-1][: token.end[1]]
                between[0] = between[0][begin[1] :]
                yield tokenize.STRING, "".join(between), begin
        elif not depth and token.type not in _MEANINGLESS:
            yield token.type, token.string, token.start


def _split_lines(source: str) -> list[str]:
    """Lines as the parser and the tokenizer count them, which break at a line feed alone."""
    return io.StringIO(source).readlines()


def import_closure(root: Path, modules: Iterable[str]) -> list[str]:
    """First-party source files that the given modules import, directly or not, as sorted paths relative to `root`.

    Static: reads `import` statements anywhere in a file (also inside functions), resolves relative imports, and
    includes each package's `__init__.py` on the way, since Python runs it.
    """
    found: dict[str, str | None] = {}  # name of a module -> its file, None for one of others or for what is no module
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
    """The modules that a source imports anywhere, and the names that it takes from modules, all by absolute names.

    `package` is the dotted name of the package that its file lies in; `path` is for messages.
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
