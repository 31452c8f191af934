"""A person's own pictures: which files are meant."""

from pathlib import Path

from ..core.errors import UserError
from ..data.tree import EXTENSIONS


def find_pictures(given: list[Path], *, unique_names: bool = False) -> list[Path]:
    """The given files, and the pictures in the given folders.

    Args:
        given: files and folders.
        unique_names: refuse two pictures whose names differ only by folder or suffix, for results in files of these names.

    Raises:
        UserError: a folder without pictures, or names that are not unique.
    """
    files = []
    for path in given:
        inside = sorted(each for each in path.iterdir() if each.suffix.lower() in EXTENSIONS) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path}: holds no picture ({', '.join(EXTENSIONS)})")
        files += inside
    stems = [path.stem for path in files]
    repeated = next((path for path in files if unique_names and stems.count(path.stem) > 1), None)
    if repeated is not None:
        raise UserError(f"{repeated}: another picture is also named {repeated.stem}, and one result would replace the other; rename one")
    return files
