"""Data sets that a command names by path: `folder:PATH`, `coco:PATH`, `boxes:PATH` or `ade20k:PATH`.

They need no edit of params.yaml. A folder of pictures that holds splits is read in place, see `pictures.find_splits`.
Class folders without a split, or a CSV file of `file,label`, are split here: data/own_<name>/ gets train/<class>/ and
val/<class>/ with links, and split.csv lists the split of each picture. The split of a picture depends only on its own
path below the folder, so new pictures do not move the others; except in a class of few pictures, where one may change
sides so that each side has one. A name is reserved for the first set that takes it, whose path is in
results/own/<name>/data/source.txt.
"""

import csv
import hashlib
import os
import re
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..core.csvfile import format_csv
from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import write_text
from .findings import RaiseFirst
from .kinds import OWN_KINDS
from .pictures import EXTENSIONS, find_splits, is_left_out, is_picture, list_classes

_TABLE = "split.csv"  # in the folder of links; a folder without it was not made here, and is not replaced
_HELD_OUT = 5  # one picture in this many is held out
MOST_BYTES = 255  # limit of common file systems on a file name
_MOST_IN_RESULTS = 100  # limit on a set's name; the names of its records are longer


class OwnData(NamedTuple):
    """A data set that a command names: its kind, its path, and the name of its results."""

    kind: str
    path: Path
    name: str

    @property
    def full_name(self) -> str:
        """`KIND:PATH` with the resolved path: params hold it, and their hash must not depend on the spelling."""
        return f"{self.kind}:{self.path}"


def parse_own(data: str) -> OwnData | None:
    """Parse `KIND:PATH`; return None for the name of a cell.

    Raises:
        UserError: the kind is unknown, or nothing exists at the path.
    """
    kind, colon, place = data.partition(":")
    if not colon:
        return None
    if kind not in OWN_KINDS:
        raise UserError(
            f"--data {data}: expected {' or '.join(f'{each}:PATH' for each in OWN_KINDS)}, or a cell's name"
        )
    path = Path(os.path.expanduser(place)).resolve()
    if not place or not path.exists():
        raise UserError(f"--data {data}: {path}: no such file or folder")
    if kind != "folder" and not path.is_dir():
        raise UserError(f"--data {data}: {path} is not a folder")
    name = re.sub(r"[^\w-]+", "_", path.stem if path.is_file() else path.name)
    name = _shorten(name, _MOST_IN_RESULTS)
    # one folder may hold boxes and label maps of the same pictures
    return OwnData(kind, path, f"own_{name}" if kind == "folder" else f"own_{name}_{kind}")


def locate_own(paths: Paths, own: OwnData) -> Path:
    """Return the root for the readers: the set's folder, or the folder of links if the set is split here.

    Raises:
        UserError: the name is reserved for another set.
    """
    source = own_folder(paths, own) / "data" / "source.txt"
    if source.is_file() and (other := source.read_text(encoding="utf-8").removesuffix("\n")) != _describe(own):
        raise UserError(
            f"{own.path}: another set is called {own.name.removeprefix('own_')}, {other}; rename one, or, where it was "
            f"moved here, remove {source}"
        )
    return paths.root / "data" / own.name if _needs_split(own) else own.path


def own_folder(paths: Paths, own: OwnData) -> Path:
    """Return the folder of a set's results, which no page reports."""
    return paths.results / "own" / own.name.removeprefix("own_")


def claim_name(paths: Paths, own: OwnData) -> None:
    """Reserve the name of a prepared set."""
    write_text(own_folder(paths, own) / "data" / "source.txt", _describe(own) + "\n")


def split_own(paths: Paths, own: OwnData) -> None:
    """Link the pictures of a set without splits into train/ and val/, and print what is not read; else do nothing.

    Raises:
        UserError: fewer than two classes, a class with one picture, an unreadable folder or CSV file, folders that look
            like splits, or a name that is reserved for another set.
    """
    root = locate_own(paths, own)
    if not _needs_split(own):
        return
    if own.path.is_file():
        base, classes = own.path.parent, _read_csv(own.path)
    else:
        base, classes = own.path, list_classes(own.path, RaiseFirst(progress=True))
    if len(classes) < 2:
        found = f"the class {next(iter(classes))!r} alone" if classes else "no picture in a folder of its class"
        raise UserError(f"{own.path}: holds {found}; a classifier needs two classes or more")
    if few := sorted(label for label, files in classes.items() if len(files) < 2):
        raise UserError(f"{own.path}: class {few[0]!r} has one picture; add another, to learn from one and test on one")
    if root.exists() and not (root / _TABLE).is_file():
        raise UserError(f"{root}: is in the way; move it, or rename {own.path.name}")
    links, rows = {}, []
    for label, files in classes.items():
        # every class needs a picture on both sides
        held_out = {file for file in files if _is_held_out(file)} or {max(files, key=_draw)}
        if len(held_out) == len(files):
            held_out.remove(min(files, key=_draw))
        for file in files:
            split = "val" if file in held_out else "train"
            link = os.path.join(split, _show(label), _shorten(file.replace("/", "__"), MOST_BYTES))
            if links.setdefault(link, file) != file:
                where = f"two pictures would be {os.path.basename(link)} here"
                raise UserError(f"{own.path}: {where}, {links[link]} and {file}; rename one")
            rows.append({"file": _show(file), "label": _show(label), "split": split})
    targets = {link: str(base / file) for link, file in links.items()}
    if _holds(root, targets, table := format_csv(rows)):  # a training may be reading it
        return
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.") as around:
            new = Path(around) / "new"
            for link, target in targets.items():
                (new / link).parent.mkdir(parents=True, exist_ok=True)
                (new / link).symlink_to(target)
            write_text(new / _TABLE, table)
            if root.exists():
                root.rename(Path(around) / "old")
            new.rename(root)
    except OSError as error:
        where = error.filename2 or error.filename or root
        raise UserError(f"{where}: {error.strerror}; {root.parent} must be writable and take links") from None


def _holds(root: Path, targets: Mapping[str, str], table: str) -> bool:
    """Return whether a folder of links has these targets by link, this table, and nothing else."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    found = {os.path.relpath(file, root): os.path.islink(file) and os.readlink(file) for file in files}
    return found == {**targets, _TABLE: False} and (root / _TABLE).read_bytes() == table.encode()


def _needs_split(own: OwnData) -> bool:
    """Return whether a set is split here: class folders without splits, or a CSV file, which names no splits either."""
    return own.kind == "folder" and (own.path.is_file() or not find_splits(own.path))


def _describe(own: OwnData) -> str:
    """Return `KIND:PATH`, the content of source.txt, by which the owner of a name is recognised."""
    return f"{own.kind}:{_show(own.path)}"


def _show(name: str | Path) -> str:
    """Return a name, which may be any bytes, as text that UTF-8 can hold."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _shorten(name: str, most_bytes: int) -> str:
    """Shorten a file name to `most_bytes`: keep its beginning and its suffix, and insert a hash of the whole."""
    if len(os.fsencode(name)) <= most_bytes:
        return name
    end = f"__{_draw(name).hex()[:16]}{os.path.splitext(name)[1][:16]}"
    # drops a character that the cut splits
    return os.fsencode(name)[: most_bytes - len(os.fsencode(end))].decode("utf-8", "ignore") + end


def _read_csv(path: Path) -> dict[str, list[str]]:
    """Map each label to its files, from a CSV file with the columns `file` and `label`.

    Paths are relative to the CSV file.
    """
    labels: dict[str, str] = {}
    classes: dict[str, list[str]] = defaultdict(list)
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            if not {"file", "label"} <= set(reader.fieldnames or ()):
                raise UserError(f"{path}: its first line must name the columns file and label")
            for row in reader:
                file, label = os.path.normpath(row["file"] or ""), (row["label"] or "").strip()
                where = f"{path}, line {reader.line_num}"
                if not _names_a_class(label):
                    raise UserError(f"{where}: {label[:80]!r} cannot be the name of a class, which is that of a folder")
                if file.startswith(("../", "/")) or not os.path.isfile(path.parent / file):
                    raise UserError(f"{where}: {row['file']}: no such file below {path.parent}")
                if is_left_out(file):
                    raise UserError(f"{where}: {file}: is hidden or a system's own, which no data set has; rename it")
                if not is_picture(file):
                    problem = f"not read, pictures are {', '.join(EXTENSIONS)}"
                    raise UserError(f"{where}: {file}: {problem}; save it as JPEG or PNG")
                if labels.setdefault(file, label) != label:
                    raise UserError(f"{where}: {file} has two labels, {labels[file]} and {label}")
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a readable CSV file: {error}") from None
    for file, label in labels.items():
        classes[label].append(file)
    return classes


def _names_a_class(label: str) -> bool:
    """Return whether a folder of this name can be made and would be read."""
    allowed = "/" not in label and not any(unicodedata.category(character) == "Cc" for character in label)
    return bool(label) and allowed and not is_left_out(label) and len(os.fsencode(label)) <= MOST_BYTES


def _draw(file: str) -> bytes:
    """Return a picture's lot in the draw of the split: a hash of its name, which other pictures do not change."""
    return hashlib.sha256(os.fsencode(file)).digest()


def _is_held_out(file: str) -> bool:
    """Return whether a picture's lot puts it into `val`, before `split_own` sees to classes of few pictures."""
    return int.from_bytes(_draw(file)[:8]) % _HELD_OUT == 0
