"""Data sets that a command names, `folder:PATH`, `coco:PATH`, `boxes:PATH` or `ade20k:PATH`, without an edit of params.yaml.

A folder of pictures is read as it is where it holds train/ and val/, or train/ and test/. Class folders without a split, or a CSV file of
`file,label`, are split here: data/own_<name>/ gets train/<class>/ and val/<class>/ of links, and split.csv says where
each picture went. A picture's side depends on its own path below the folder alone, so that new ones do not move the
others.
"""

import csv
import hashlib
import os
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from ..core.csvfile import write_csv
from ..core.errors import UserError
from ..core.paths import Paths
from .kinds import KINDS, OWN_KINDS
from .tree import EXTENSIONS

HELD_OUT = 5  # one picture in this many is held out


class OwnData(NamedTuple):
    """A data set that a command names: its kind, where it lies, and the name that its results have."""

    kind: str
    path: Path
    name: str


def parse_own(data: str) -> OwnData | None:
    """What `KIND:PATH` names; None for the name of a cell.

    Raises:
        UserError: an unknown kind, or nothing at the path.
    """
    kind, colon, place = data.partition(":")
    if not colon:
        return None
    if kind not in OWN_KINDS:
        raise UserError(
            f"--data {data}: expected {' or '.join(f'{each}:PATH' for each in OWN_KINDS)}, or a cell's name"
        )
    path = Path(place).expanduser().resolve()
    if not place or not path.exists():
        raise UserError(f"--data {data}: {path}: no such file or folder")
    if kind != "folder" and not path.is_dir():
        raise UserError(f"--data {data}: {path} is not a folder")
    name = re.sub(r"[^\w-]+", "_", path.stem if path.is_file() else path.name)
    # one folder may hold boxes and label maps of the same pictures
    return OwnData(kind, path, f"own_{name}" if kind == "folder" else f"own_{name}_{kind}")


def locate_own(paths: Paths, own: OwnData) -> Path:
    """The root that the readers take: the folder itself, or that of the links."""
    return paths.root / "data" / own.name if _needs_split(own) else own.path


def split_own(paths: Paths, own: OwnData) -> None:
    """Link the pictures of a set without a split into train/ and val/; nothing where it has one.

    Raises:
        UserError: fewer than two classes, a class with one picture, or a CSV that cannot be read.
    """
    if not _needs_split(own):
        return
    if own.path.is_file():
        base, labels = own.path.parent, _read_csv(own.path)
    else:
        base, labels = own.path, _list_classes(own.path)
    classes: dict[str, list[str]] = defaultdict(list)
    for file, label in labels.items():
        classes[label].append(file)
    if len(classes) < 2:
        found = f"the class {next(iter(classes))!r} alone" if classes else "no picture in a folder of its class"
        raise UserError(f"{own.path}: holds {found}; a classifier needs two classes or more")
    if few := sorted(label for label, files in classes.items() if len(files) < 2):
        raise UserError(f"{own.path}: class {few[0]!r} has one picture; add another, to learn from one and test on one")
    root = locate_own(paths, own)
    if root.exists() and not (root / "split.csv").is_file():
        raise UserError(f"{root}: is in the way; move it, or rename {own.path.name}")
    unfinished = root.with_name(f"{root.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # links alone
    rows = []
    for label, files in classes.items():
        held_out = {file for file in files if _is_held_out(file)} or {max(files, key=_draw)}
        if len(held_out) == len(files):
            held_out.remove(min(files, key=_draw))
        for file in files:
            split = "val" if file in held_out else "train"
            link = unfinished / split / label / file.replace("/", "__")
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_symlink():
                raise UserError(f"{own.path}: two pictures would be {link.name} here, one of them {file}; rename it")
            link.symlink_to(base / file)
            rows.append({"file": file, "label": label, "split": split})
    write_csv(unfinished / "split.csv", rows)
    shutil.rmtree(root, ignore_errors=True)
    unfinished.rename(root)


def _needs_split(own: OwnData) -> bool:
    splits = KINDS[own.kind].at(own.path).splits
    return own.kind == "folder" and not all((own.path / split).is_dir() for split in splits)


def _list_classes(folder: Path) -> dict[str, str]:
    """File below the folder -> class, for class folders with pictures at any depth."""
    return {
        file.relative_to(folder).as_posix(): top.name
        for top in sorted(folder.iterdir())
        if top.is_dir() and not top.name.startswith(".")
        for file in sorted(top.rglob("*"))
        if file.suffix.lower() in EXTENSIONS
    }


def _read_csv(path: Path) -> dict[str, str]:
    """File -> label, of a CSV file with the columns `file` and `label`; paths begin at its folder."""
    labels: dict[str, str] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            if not {"file", "label"} <= set(reader.fieldnames or ()):
                raise UserError(f"{path}: its first line must name the columns file and label")
            for row in reader:
                file, label = os.path.normpath(row["file"] or ""), (row["label"] or "").strip()
                where = f"{path}, line {reader.line_num}"
                if not label or label in (".", "..") or "/" in label:
                    raise UserError(f"{where}: {label!r} cannot be the name of a class")
                if file.startswith(("..", "/")) or not (path.parent / file).is_file():
                    raise UserError(f"{where}: {row['file']}: no such file below {path.parent}")
                if labels.setdefault(file, label) != label:
                    raise UserError(f"{where}: {file} has two labels, {labels[file]} and {label}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a readable CSV file: {error}") from None
    return labels


def _draw(file: str) -> bytes:
    return hashlib.sha256(file.encode()).digest()


def _is_held_out(file: str) -> bool:
    return int.from_bytes(_draw(file)[:8]) % HELD_OUT == 0
