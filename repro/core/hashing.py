"""Hashes of files and texts, and checks of files by their hash."""

import hashlib
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from .errors import UserError

FIRST_PARTY = ("repro", "kernels", "stages")  # the packages of this project
_DIGITS = 16  # hex digits of a SHA-256 that records keep; `training.checkpoint` expects as many in a state's name


def short_hash(content: bytes | memoryview | str) -> str:
    """Return the first 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8, as used in every record."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:_DIGITS]


def hash_file(path: Path, digits: int = _DIGITS, *, blank: int | None = None) -> str:
    """Return the first hex digits of a file's SHA-256; raise OSError if it cannot be read.

    With `blank`, the 64 bytes from this offset are hashed as the character `0`, because a file keeps its own hash
    there.
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
    """Refuse a file whose SHA-256 does not begin with the stated digits, 8 or more; None refuses nothing.

    Args:
        named: the file's name in messages; its path by default.
        stated: the option or the key of a params file that states the digits.
        advice: the end of messages.
        blank: see `hash_file`.

    Raises:
        UserError: another hash, too few digits, digits that are not hexadecimal, or no file.
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
    """Verify the checksums of a zip archive, such as a file of `torch.save`; PyTorch does not check them.

    A file that is no zip archive passes.

    Raises:
        ValueError: the content of a member does not match its checksum; other damage raises errors of `zipfile`.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"damaged: the content of {damaged} is not what its checksum says")


def hash_files(root: Path, files: Iterable[str]) -> str:
    """Return the short hash of the names and contents of files, whose names are relative to `root`."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]


def require_own_code(root: Path) -> None:
    """Raise a UserError if the running code is not that of the work tree at `root`, whose commit its records name.

    A folder without dvc.yaml is no work tree. A folder without this code, in which a wheel runs, passes too.
    """
    for name in FIRST_PARTY if (root / "dvc.yaml").is_file() else ():
        own, runs = root / name / "__init__.py", getattr(find_spec(name), "origin", None)
        if runs and own.is_file() and own.resolve() != Path(runs).resolve():
            raise UserError(
                f"{Path(runs).parent}: this code runs, and results would go to {root}, whose records name its own; use "
                "that checkout's .venv, or `python -m repro` there"
            )
