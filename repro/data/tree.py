"""Classification data sets: root/<split>/<class>/<image>, scanned once with `os.scandir`.

For storage that is slow with small files, a split may also be tar archives: root/<split>/*.tar. The class of an image
is then the first of these that exists:

- a member `<key>.cls` of WebDataset shards, whose keys end at the first dot: an index among the sorted wnids of
  ImageNet-1K, or the number of a class in a user's own set;
- the image's folder in the archive;
- the archive's name (`n01440764.tar`, as in ILSVRC2012_img_train.tar).

Images are read at their offset in the archive, in any order. Training on a sharded data set therefore has the same
order as on its files, and resumes at the same batch; a shuffle buffer allows neither.
"""

import contextlib
import dataclasses
import itertools
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core.errors import UserError
from ..core.hashing import hash_file, short_hash
from ..core.record import atomic
from ..core.runtime import Runtime
from .archives import list_members
from .findings import RAISE_FIRST, Reporter, count, show_few
from .kinds import KINDS, Kind, load_function
from .manifest import Folder, record_files
from .pictures import Entries, find_splits, list_entries, may_be_picture, tell_unread
from .settings import TuneSplitSettings

_ARCHIVES = (".tar", ".gz", ".zip", ".tgz")  # suffixes; only an uncompressed .tar can be read in place
# where ImageNet lies below a root that was chosen too high: folders of Kaggle's archive and of common scripts
_USUAL_PLACES = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "imagenet", "ILSVRC2012", "ImageNet", "data")
# cache of the listing in the archives' folder: reading 1.28 million headers takes minutes
_INDEX = ".shards.npz"
# version of the rules of a listing; another version invalidates the cache. The rules are those of `list_members`, of
# `pictures` and of `Kind.suffixes`: the cache sees no change of code, only of the archives
_RULES = 3
# (class, file name, bytes, index of the archive, byte offset) of an archived image
_Row = tuple[str, bytes, int, int, int]


class ImageBytes(NamedTuple):
    """Location of an image's bytes: a whole file, or `size` bytes of it from `offset` on."""

    file: str
    offset: int = 0
    size: int | None = None

    def read(self) -> bytes:
        """Read the bytes; raises OSError."""
        with open(self.file, "rb") as stream:
            stream.seek(self.offset)
            return stream.read(-1 if self.size is None else self.size)


@dataclasses.dataclass(frozen=True)
class Archives:
    """Locations of the images of an archived split."""

    files: np.ndarray  # (S,) bytes; file names of the archives
    number: np.ndarray  # (N,) int64; index in `files` of each image's archive
    offsets: np.ndarray  # (N,) int64; byte offset of each image in its archive


@dataclasses.dataclass(frozen=True)
class Split:
    """The files of one split, sorted by class and then by name.

    Arrays instead of lists: the reference counts of 1.28 million strings would make every forked worker copy the memory
    pages.
    """

    names: np.ndarray  # (N,) bytes; file names within their class folder
    sizes: np.ndarray  # (N,) int64; bytes
    targets: np.ndarray  # (N,) int64; class indices
    folder: str  # name of the split's folder, which need not be that of the split
    archives: Archives | None = None  # locations of archived images; None for class folders

    def take(self, chosen: np.ndarray) -> "Split":
        """Select the images at these indices (n,); they must ascend, since `list_folders` relies on sorted targets."""
        archives = self.archives and dataclasses.replace(
            self.archives, number=self.archives.number[chosen], offsets=self.archives.offsets[chosen]
        )
        return Split(self.names[chosen], self.sizes[chosen], self.targets[chosen], self.folder, archives)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A scanned root. The index of a class is its place in the sorted folder names."""

    root: Path  # holds a folder for each split
    classes: tuple[str, ...]  # sorted names of the class folders, the same in every split
    splits: dict[str, Split]
    kind: Kind
    max_pixels: int = Runtime.max_pixels  # largest image that is read

    def folder(self, split: str) -> Path:
        """Return the folder of a split's images."""
        return self.root / self.splits[split].folder

    def path(self, split: str, index: int) -> Path:
        """Return the path of an image; for an archived one, the archive's path followed by the file name."""
        files, source = self.splits[split], self.source(split, index)
        return Path(source.file) if files.archives is None else Path(source.file, os.fsdecode(files.names[index]))

    def source(self, split: str, index: int) -> ImageBytes:
        """Return the location of an image's bytes."""
        # strings instead of Path objects, whose joins are slow: this runs for every image
        files = self.splits[split]
        folder = os.path.join(self.root, files.folder)
        if files.archives is None:
            return ImageBytes(os.path.join(folder, self.classes[files.targets[index]], os.fsdecode(files.names[index])))
        archive = os.fsdecode(files.archives.files[files.archives.number[index]])
        return ImageBytes(os.path.join(folder, archive), int(files.archives.offsets[index]), int(files.sizes[index]))

    def list_folders(self, split: str) -> list[Folder]:
        """Record a split by class, see `Kind.compares_contents`.

        An archived split gets the records that its folders would have.
        """
        files = self.splits[split]
        ends = np.searchsorted(files.targets, np.arange(len(self.classes)), side="right").tolist()
        listed = []
        for name, start, end in zip(self.classes, [0, *ends], ends):
            hashes = None
            if self.kind.compares_contents:
                hashes = [short_hash(self.source(split, index).read()) for index in range(start, end)]
            record = record_files(list(zip(files.names[start:end].tolist(), files.sizes[start:end].tolist())), hashes)
            listed.append(Folder(name, self.folder(split) / name, record))
        return listed


def scan_tree(
    root: Path, kind: str | Kind, report: Reporter = RAISE_FIRST, tune: TuneSplitSettings | None = None
) -> Tree:
    """Read the names and sizes of all images below `root`, which holds <split>/<class>/ for every split of the kind.

    Args:
        root: folder of the data set.
        kind: a row of `KINDS`, or its name; with a name, the splits are those of `Kind.at(root)`.
        report: receives the findings. Errors: a missing root or split, images outside of class folders, empty class
            folders, classes that are unknown to the kind or missing in a split. Warnings: files that are not read. If
            it lets the scan continue after an error, a split that cannot be read is left out.
        tune: settings that cut a split `tune` off `train`. No file is moved: the split is a function of these settings,
            the classes and the sorted names of their images.

    Raises:
        UserError: an error, if the report raises it; a folder that cannot be listed; a folder of `tune` where one is
            to be cut off; otherwise as `choose_tune`.
    """
    row = KINDS[kind].at(root) if isinstance(kind, str) else kind
    if tune is not None:
        uncut = dataclasses.replace(row, splits=tuple(split for split in row.splits if split != "tune"))
        tree = scan_tree(root, uncut, report)
        if (folder := find_splits(root).get("tune")) is not None:
            problem = "is there, and tune_split would cut another one off train"
            raise UserError(f"{root / folder}: {problem}; move it away, or leave tune_split out")
        return _cut_tune(tree, tune)
    if not root.is_dir():
        report.error(root, "no such folder", _advise_layout(row))
        return Tree(root, (), {}, row)
    found, folders = {}, find_splits(root) if row.other_splits else {}
    for split in row.splits:
        folder = root / folders.get(split, split)
        if (read := _read_split(folder, row, report)) is not None:
            found[split] = read
            _check_names(folder, read[0], row, report)
    single = [
        (root / one / name, f"class {name!r} is in {one} but not in {other}")
        for one, other in itertools.permutations(found, 2)
        for name in sorted(set(found[one][0]) - set(found[other][0]))
    ]
    report.errors(single, "every split needs the same classes")
    classes = sorted({name for names, _ in found.values() for name in names})
    place_of = {name: place for place, name in enumerate(classes)}
    splits = {}
    for split, (names, files) in found.items():
        # the identity where every split has all classes
        places = np.array([place_of[name] for name in names], dtype=np.int64)
        splits[split] = dataclasses.replace(files, targets=places[files.targets])
    return Tree(root, tuple(classes), splits, row)


def record_folder(root: Path, name: str, prefix: str, with_contents: bool) -> Folder:
    """Record the folder of images `root/name`, whose name in the manifest begins with `prefix`.

    With `with_contents` its hash covers the files' contents. Raises UserError as `list_entries`.
    """
    folder = root / name
    images = list_entries(folder).images
    hashes = [hash_file(folder / os.fsdecode(file)) for file, _ in images] if with_contents else None
    return Folder(prefix + name, folder, record_files(images, hashes))


def list_images(folder: Path, report: Reporter, advice: str) -> dict[str, int] | None:
    """Map file name to bytes for the images in a folder; None where the folder is missing.

    Reports as errors a missing folder, no image in it and empty files; as warnings, files that are not read.
    """
    if not folder.is_dir():
        report.error(folder, "no such folder", advice)
        return None
    entries = list_entries(folder, report)
    if not entries.images and entries.folders:
        report.error(
            folder,
            f"has no images, only the folder {entries.folders[0]}/",
            f"move the images up, directly into {folder.name}/",
        )
    elif not entries.images:
        report.error(folder, "holds no image", advice)
    _warn_of_others(folder, entries.others, report)
    sizes = {os.fsdecode(name): size for name, size in entries.images}
    report.errors([(folder / name, "is empty") for name, size in sizes.items() if not size], advice)
    return sizes


def _warn_of_others(folder: Path, others: Sequence[str], report: Reporter) -> None:
    """Warn of files in a folder that are not read; those that may be pictures are also named before a training."""
    tell_unread(folder, others, report)
    if notes := [name for name in others if not may_be_picture(name)]:
        report.warning(folder, f"holds {count(len(notes), 'other file')} ({show_few(notes)})", "nothing reads them")


def _read_split(folder: Path, kind: Kind, report: Reporter) -> tuple[tuple[str, ...], Split] | None:
    """Read the sorted classes and the files of a split's folder; None where there is nothing to read."""
    root = folder.parent
    if not folder.is_dir():
        inside = next(
            (place for place in _USUAL_PLACES if all((root / place / name).is_dir() for name in kind.splits)), None
        )
        report.error(folder, "no such folder", f"take {root / inside} as the root" if inside else _advise_layout(kind))
        return None
    entries = list_entries(folder, report, kind.suffixes)
    archives = [folder / name for name in entries.others if name.lower().endswith(".tar")]
    if archives and not entries.folders and not entries.images:
        _warn_of_others(folder, [name for name in entries.others if not name.lower().endswith(".tar")], report)
        return _read_archives(archives, report, kind)
    if entries.images:
        report.error(folder, f"holds {count(len(entries.images), 'image')} outside of class folders", kind.sorting)
    elif not entries.folders:
        report.error(folder, "holds no class folders", _advise_layout(kind))
    if packed := [name for name in entries.others if name.lower().endswith(_ARCHIVES)]:
        problem = f"holds {count(len(packed), 'archive')} beside class folders ({show_few(packed)})"
        report.warning(folder, problem, "unpack the archives that are missing as folders, then remove all archives")
    if not entries.folders:
        return None
    return tuple(entries.folders), _read_folders(folder, entries, report, kind.suffixes)


def _read_folders(folder: Path, entries: Entries, report: Reporter, suffixes: tuple[str, ...]) -> Split:
    """List the images in class folders."""
    names, sizes, counts, empty, too_deep = [], [], [], [], []
    others = [name for name in entries.others if not name.lower().endswith(_ARCHIVES)]
    for name in report.track(entries.folders, f"listing {folder.name}/"):
        found = list_entries(folder / name, report, suffixes)
        names.extend(file for file, _ in found.images)
        sizes.extend(size for _, size in found.images)
        counts.append(len(found.images))
        others += [f"{name}/{file}" for file in found.others]
        if not found.images and found.folders:
            too_deep.append((folder / name, f"has no images, only the folder {found.folders[0]}/"))
        elif not found.images:
            empty.append((folder / name, f"holds no image ({', '.join(suffixes)})"))
    report.errors(too_deep, "move the images up, directly into the class folder")
    report.errors(empty, "fill this class folder, or remove it from every split")
    _warn_of_others(folder, others, report)
    targets = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return Split(np.array(names, dtype=np.bytes_), np.array(sizes, dtype=np.int64), targets, folder.name)


def _read_archives(archives: list[Path], report: Reporter, kind: Kind) -> tuple[tuple[str, ...], Split] | None:
    """List the sorted classes and the images of a split of archives; None where there is no image.

    A listing without errors is cached in `.shards.npz` in their folder, if that is writable.
    """
    folder = archives[0].parent
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in archives]
    stamp = short_hash(repr((_RULES, kind.name, states)))
    kept = _load_listing(folder / _INDEX, stamp)
    if kept is None:
        errors_before, others = report.num_errors, []
        rows = _list_rows(archives, report, kind, others)
        if not rows:
            tell_unread(folder, others, report)
            report.error(
                folder, f"its archives hold no image ({', '.join(kind.suffixes)})", "pack the images into them"
            )
            return None
        labels, names, *numbers = zip(*rows)
        classes = {name: place for place, name in enumerate(dict.fromkeys(labels))}  # sorted, since the rows are
        kept = {
            "classes": np.array([os.fsencode(name) for name in classes], dtype=np.bytes_),
            "names": np.array(names, dtype=np.bytes_),
            "targets": np.array([classes[name] for name in labels], dtype=np.int64),
            "others": np.array([os.fsencode(name) for name in others], dtype=np.bytes_),
            **{key: np.array(column, dtype=np.int64) for key, column in zip(("sizes", "number", "offsets"), numbers)},
        }
        if report.num_errors == errors_before:
            # a read-only data set has no cache, and is listed each time
            with contextlib.suppress(OSError), atomic(folder / _INDEX) as temporary, open(temporary, "wb") as stream:
                np.savez(stream, stamp=stamp, **kept)
    tell_unread(folder, map(os.fsdecode, kept["others"].tolist()), report)
    report.ok(folder, count(len(archives), "archive"))
    files = np.array([os.fsencode(path.name) for path in archives], dtype=np.bytes_)
    where = Archives(files, kept["number"], kept["offsets"])
    split = Split(kept["names"], kept["sizes"], kept["targets"], folder.name, where)
    return tuple(map(os.fsdecode, kept["classes"].tolist())), split


def _load_listing(path: Path, stamp: str) -> dict[str, np.ndarray] | None:
    """Load the cached listing with this stamp; None where there is none, or only that of other archives or rules."""
    try:
        with np.load(path) as found:
            kept = dict(found)
        return kept if str(kept.pop("stamp")) == stamp else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _list_rows(archives: list[Path], report: Reporter, kind: Kind, others: list[str]) -> list[_Row]:
    """List a sorted row for each image; `others` is extended by files that may be pictures and are not read."""
    rows: list[_Row] = []
    for place, path in enumerate(report.track(archives, f"listing {archives[0].parent.name}/")):
        rows += [
            (name, file, size, place, offset) for name, file, size, offset in list_members(path, report, kind, others)
        ]
    rows.sort()
    twice = [
        (archives[place].parent, f"image {os.fsdecode(file)} of class {name} is there twice")
        for (name, file, *_), (next_name, next_file, _, place, _) in itertools.pairwise(rows)
        if (name, file) == (next_name, next_file)
    ]
    report.errors(twice, "remove one archive or image")
    return rows


def _cut_tune(tree: Tree, settings: TuneSplitSettings) -> Tree:
    """Return the tree with images of the first split in a new split `tune`; the files stay where they are.

    The same settings, classes and sorted names always give the same split, on which records and resumed trainings rely.
    """
    (first, files), *held_out = tree.splits.items()
    chosen = load_function("embedded.choose_tune")(files.targets, settings, tree.folder(first), tree.classes)
    rest, tune = (files.take(np.flatnonzero(places)) for places in (~chosen, chosen))
    splits = {first: rest, "tune": tune, **dict(held_out)}
    return dataclasses.replace(tree, splits=splits, kind=dataclasses.replace(tree.kind, splits=tuple(splits)))


def _check_names(folder: Path, classes: Sequence[str], kind: Kind, report: Reporter) -> None:
    """Report class folders that are unknown to the kind: each would shift the index of every class after it."""
    if kind.class_names is None:
        return
    known = kind.class_names()
    strangers = [(folder / name, f"is not a class of {kind.name}") for name in sorted(set(classes) - set(known))]
    report.errors(
        strangers,
        f"class folders are named like {known[0]}; rename or remove it, or take kind folder for classes of your own",
    )


def _advise_layout(kind: Kind) -> str:
    """Return what to do about a data set that is missing, or whose folders are not those of its kind."""
    return f"lay the data out as {kind.layout} (docs/data.md) and set runtime.data_roots.{kind.name}"
