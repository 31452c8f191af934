"""The rule that decides which files and folders are pictures: for class folders, archives, lists and `predict`."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.errors import UserError
from .findings import RAISE_FIRST, Reporter, count, show_few

# suffixes of the formats that `pixels` decodes. The listing of archives is cached by these suffixes and by
# `is_left_out`: raise `tree._RULES` with every change of either, or the cache keeps the earlier files
EXTENSIONS = (".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".bmp", ".webp")
# files of operating systems and photo programs; further ones begin with a dot
_OF_SYSTEMS = {
    *("__macosx", "icon\r", "thumbs.db", "ehthumbs.db", "desktop.ini", "picasa.ini", "$recycle.bin", "lost+found"),
    *("system volume information", "@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "thumbnails"),
    "_thumbs",
}
# suffixes of files that are clearly not pictures
_OF_NOTES = {
    *(".txt", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".md", ".yaml", ".yml", ".toml", ".html", ".htm", ".log"),
    *(".ini", ".db", ".cls", ".npy", ".npz", ".pt", ".py", ".sh", ".pdf", ".xlsx", ".docx", ".url", ".id", ".index"),
}
# split -> names of its folder in letters alone, without the words in _AROUND
_NAMES = {
    "train": "train|training|trn",
    "tune": "tune|tuning",
    "val": "val|valid|validate|validation|dev|devel|development|eval|evaluation|heldout|holdout",
    "test": "test|tests|testing|tst",
}
# words that may stand before and after the name of a split, as in my_train_images
_AROUND = "(?:my|seg|dataset|data|set|split|images|image|imgs|img|pictures|photos|folder|x)*"


class Entries(NamedTuple):
    """Direct content of a folder, each sorted by name, without names that are left out."""

    images: list[tuple[bytes, int]]  # (name, bytes)
    folders: list[str]  # links to folders are folders
    others: list[str]  # other files
    broken: list[str]  # links that lead nowhere


def is_left_out(name: str) -> bool:
    """Return whether a path is not part of a data set: one of its names is hidden, or of a system (macOS, NAS)."""
    return any(part.startswith(".") or part.casefold() in _OF_SYSTEMS for part in name.split("/"))


def is_picture(name: str, suffixes: tuple[str, ...] = EXTENSIONS) -> bool:
    """Return whether a file has one of the suffixes, in any letter case."""
    return name.lower().endswith(suffixes)


def list_entries(
    folder: Path, report: Reporter | None = RAISE_FIRST, suffixes: tuple[str, ...] = EXTENSIONS
) -> Entries:
    """List a folder; `images` are the files with one of the suffixes.

    A broken link is reported as an error, if there is a report.

    Raises:
        UserError: the folder cannot be read.
    """
    images, folders, others, broken = [], [], [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_left_out(entry.name):
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.is_file():
                    if is_picture(entry.name, suffixes):
                        images.append((os.fsencode(entry.name), entry.stat().st_size))
                    else:
                        others.append(entry.name)
                else:  # a broken link, or a pipe, which would block a reader for ever
                    (broken if entry.is_symlink() and not os.path.exists(entry.path) else others).append(entry.name)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}") from None
    if report is not None and broken:
        places = [(folder / name, "this link is broken") for name in sorted(broken)]
        report.errors(places, "remove it, or restore what it points to")
    return Entries(sorted(images), sorted(folders), sorted(others), sorted(broken))


def list_classes(root: Path, report: Reporter) -> dict[str, list[str]]:
    """Map each class to its sorted pictures as paths below `root`, for class folders of any depth; links are followed.

    Reports broken links as errors, and tells of everything that is not read: other files, pictures outside of class
    folders, folders without pictures, links that lead back.

    Raises:
        UserError: a folder cannot be read, or two classes share it.
    """
    top, classes, others = list_entries(root, report), {}, []
    above = {root.resolve(), *root.resolve().parents}
    homes: dict[Path, str] = {}
    for label in top.folders:
        pictures, waiting = [], [label]
        while waiting:
            folder = waiting.pop()
            real = (root / folder).resolve()
            if real in above:
                report.tell(root / folder, "is a link to a folder that holds it", "nothing is read through it")
                continue
            if (home := homes.setdefault(real, folder)) != folder:
                if home.partition("/")[0] != label:
                    problem = f"is the same folder as {root / home}, of another class"
                    raise UserError(f"{root / folder}: {problem}; a picture has one class")
                continue  # already read under another name
            found = list_entries(root / folder, report)
            pictures += [f"{folder}/{os.fsdecode(name)}" for name, _ in found.images]
            others += [f"{folder}/{name}" for name in found.others]
            waiting += [f"{folder}/{name}" for name in reversed(found.folders)]
        if pictures:
            classes[label] = sorted(pictures, key=lambda file: file.split("/"))
        else:
            report.tell(root / label, "holds no picture", "it is no class")
    tell_unread(root, [*top.others, *others], report)
    if top.images:
        report.tell(root, f"holds {count(len(top.images), 'picture')} outside of class folders", "they are not read")
    return classes


def find_splits(root: Path) -> dict[str, str]:
    """Map each split to its folder in a user's own set; empty where the folders of `root` are classes.

    Split folders are recognised by name, in any letter case and by common synonyms. If several folders name one split,
    the one of its exact name is taken.

    Raises:
        UserError: two folders for one split; or folders with other names that contain the same folders, as splits do.
    """
    inside = {name: list_entries(root / name, None) for name in list_entries(root, None).folders}
    nested = {name: set(found.folders) for name, found in inside.items() if found.folders and not found.images}
    named: dict[str, list[str]] = {}
    for name in inside:
        if (split := _name_split(name)) is not None:
            named.setdefault(split, []).append(name)
    like = {name for names in named.values() for name in names}
    # a single folder named like a split may be a class
    if ("train" in named and len(named) > 1) or (like and (like == inside.keys() or like <= nested.keys())):
        for split, names in named.items():
            if len(names) > 1 and split not in names:
                raise UserError(f"{root}: {_show_folders(names)} would both be the split {split}; rename one")
        return {split: split if split in names else names[0] for split, names in named.items()}
    # no name says so, but all filled folders hold folders, and most of those are in several of them
    shared = Counter(name for names in nested.values() for name in names)
    repeated = sorted(name for name, times in shared.items() if times > 1)
    filled = sum(bool(found.folders or found.images) for found in inside.values())
    if len(nested) == filled > 1 and len(repeated) > 1 and 2 * len(repeated) > len(shared):
        raise UserError(
            f"{root}: {_show_folders(nested)} hold the same folders ({_show_folders(repeated)}), as splits do; name "
            "them train/ and val/, or list files and classes in a CSV file (docs/data.md)"
        )
    return {}


def describe_splits(root: Path, splits: Sequence[str]) -> str:
    """Describe for a user how the folders of a set are used; `splits` begins with the one for training."""
    found = find_splits(root)
    used = [found.get(split, split) for split in splits]
    idle = [name for name in list_entries(root, None).folders if name not in used]
    text = f"{used[0]}/ is learned from, {used[-1]}/ is held out"
    return text + (f"; {_show_folders(idle)} {'is' if len(idle) == 1 else 'are'} not read" if idle else "")


def tell_unread(place: Path, others: Iterable[str], report: Reporter) -> None:
    """Tell the report how many of the files in `others` may be pictures that are not read."""
    suffixes = Counter(os.path.splitext(name)[1].lower() or "without suffix" for name in others if may_be_picture(name))
    if suffixes:
        named = ", ".join(f"{number:,} {suffix}" for suffix, number in suffixes.most_common())
        problem = f"holds {count(suffixes.total(), 'file')} that {'is' if suffixes.total() == 1 else 'are'} not read"
        report.tell(place, f"{problem} ({named})", "save pictures as JPEG or PNG")


def may_be_picture(name: str) -> bool:
    """Return whether a file that is not read may be meant as a picture: its suffix is not that of a note or a program.

    A file without a suffix may be one.
    """
    return os.path.splitext(name)[1].lower() not in _OF_NOTES


def _show_folders(names: Iterable[str]) -> str:
    """Format the first three folders for a message."""
    return show_few([f"{name}/" for name in names])


def _name_split(folder: str) -> str | None:
    """Return the split that a folder's name stands for (`val` for Valid, validation_set or dev), or None."""
    letters = re.sub("[^a-z]", "", folder.casefold())
    return next(
        (split for split, names in _NAMES.items() if re.fullmatch(f"{_AROUND}(?:{names}){_AROUND}", letters)), None
    )
