"""Short hashes of contents."""

import hashlib
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from .errors import UserError

FIRST_PARTY = ("repro", "kernels", "stages")
DIGITS = 16


def short_hash(content: bytes | memoryview | str) -> str:
    """The first 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8: how every record names a content."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:DIGITS]


def hash_file(path: Path, digits: int = DIGITS, *, blank: int | None = None) -> str:
    """The first digits of a file's SHA-256; raises OSError where it cannot be read.

    With `blank`, zeros stand for the 64 digits that begin at this byte: where a file keeps its own hash.
    """
    start = hashlib.sha256()
    with open(path, "rb") as stream:
        if blank is not None:
            start.update(stream.read(blank) + b"0" * 64)
            stream.seek(blank + 64)
        return hashlib.file_digest(stream, lambda: start).hexdigest()[:digits]


def require_hash(
    path: Path | None,
    sha256: str | None,
    advice: str = "; get the right file",
    *,
    named: str = "",
    stated: str = "--sha256",
    blank: int | None = None,
) -> None:
    """Refuse a file whose SHA-256 does not begin with the stated digits, 8 or more; None states nothing.

    Errors name the file as `named`, by default by its path, and the digits by the option or the key of a params file
    that `stated` them; `advice` ends them. `blank`: see `hash_file`.

    Raises:
        UserError: another hash, too few digits or others than hexadecimal ones, or no file.
    """
    if sha256 is None:
        return
    if len(sha256) < 8 or set(sha256.lower()) - set("0123456789abcdef"):
        raise UserError(f"{stated} {sha256}: expected 8 hex digits or more")
    if path is None or not path.is_file():
        raise UserError(f"{named or path or stated}: no such file, so its hash cannot be verified; name the right one")
    found = hash_file(path, digits=64, blank=blank)
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
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()[:DIGITS]


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
