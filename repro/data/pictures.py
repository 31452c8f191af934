"""A person's own pictures."""

from pathlib import Path

from ..core.errors import UserError
from .tree import EXTENSIONS


def find_pictures(given: list[Path]) -> list[Path]:
    """The files that are meant: pictures as given, and the pictures in each folder.

    Raises:
        UserError: a folder without pictures.
    """
    files = []
    for path in given:
        inside = sorted(each for each in path.iterdir() if each.suffix.lower() in EXTENSIONS) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path}: holds no picture ({', '.join(EXTENSIONS)})")
        files += inside
    return files
