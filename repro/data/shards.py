"""A split as tar archives, for storage that hates small files: root/{train,val}/*.tar.

The class of an image comes from the first of these that exists: a member `<key>.cls` beside it, which holds an index among the sorted
wnids of ImageNet-1K (WebDataset shards); the folder in the archive; the archive's own name (`n01440764.tar`, as the archives in
ILSVRC2012_img_train.tar are called). Images are read by their place in the archive, in any order. A sharded data set therefore
trains in the same order as its files would, and continues at the same batch; a shuffle buffer allows neither.
"""

import contextlib
import dataclasses
import itertools
import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..core.record import atomic
from .findings import Report
from .kinds import list_wnids

EXTENSIONS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")  # of images
_INDEX = ".shards.npz"  # the listing is kept beside the archives: to read 1.28 million headers takes minutes
Row = tuple[str, bytes, int, int, int]  # class, file name, bytes, which archive, first byte


@dataclasses.dataclass(frozen=True)
class Archives:
    """Where the images of a split lie."""

    files: np.ndarray  # (S,) bytes; file names of the archives
    number: np.ndarray  # (N,) int64; the archive of each image, a place in `files`
    offsets: np.ndarray  # (N,) int64; where its bytes begin there

    def file(self, index: int) -> str:
        """The archive that holds an image."""
        return os.fsdecode(self.files[self.number[index]])


def is_sharded(folder: Path) -> bool:
    """Whether a split's folder holds archives and no class folders."""
    return any(folder.glob("*.tar")) and not any(entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))


def list_shards(folder: Path, report: Report) -> tuple[dict[str, np.ndarray], Archives] | None:
    """The images of a folder of archives, ordered by class and then by name.

    A listing without errors is kept in `.shards.npz` in that folder, where it can be written. The report takes, and may raise, what is
    wrong: an archive that is damaged or cut short, an image without a class, an image that occurs twice.

    Returns:
        {classes (K,) bytes, sorted; names (N,) bytes; sizes (N,) int64; targets (N,) int64}, and where the images lie; None where
        there is no image.
    """
    archives = sorted(folder.glob("*.tar"))
    stamp = np.array([(path.stat().st_size, path.stat().st_mtime_ns) for path in archives], dtype=np.int64)
    files = np.array([os.fsencode(path.name) for path in archives], dtype=np.bytes_)
    kept = _load(folder / _INDEX, files, stamp)
    if kept is None:
        errors_before = report.num_errors
        rows = _list_rows(archives, report)
        if not rows:
            report.error(folder, f"its archives hold no image ({', '.join(EXTENSIONS)})", "pack the images into them")
            return None
        labels, names, *numbers = zip(*rows)
        classes = {name: place for place, name in enumerate(dict.fromkeys(labels))}  # sorted, as the rows are
        kept = {
            "classes": np.array([os.fsencode(name) for name in classes], dtype=np.bytes_),
            "names": np.array(names, dtype=np.bytes_),
            "targets": np.array([classes[name] for name in labels], dtype=np.int64),
            **{key: np.array(column, dtype=np.int64) for key, column in zip(("sizes", "number", "offsets"), numbers)},
        }
        if report.num_errors == errors_before:
            # a read-only data set is listed again next time
            with contextlib.suppress(OSError), atomic(folder / _INDEX) as temporary, open(temporary, "wb") as stream:
                np.savez(stream, files=files, stamp=stamp, **kept)
    return kept, Archives(files, kept.pop("number"), kept.pop("offsets"))


def _load(path: Path, files: np.ndarray, stamp: np.ndarray) -> dict[str, np.ndarray] | None:
    """An earlier listing of the same archives; None where there is none."""
    try:
        with np.load(path) as found:
            kept = dict(found)
        same = np.array_equal(kept.pop("files"), files) and np.array_equal(kept.pop("stamp"), stamp)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return kept if same else None


def _list_rows(archives: list[Path], report: Report) -> list[Row]:
    """A sorted row for each image."""
    rows: list[Row] = []
    for place, path in enumerate(report.track(archives, f"listing {archives[0].parent.name}/")):
        rows += [(name, file, size, place, offset) for name, file, size, offset in _list_members(path, report)]
    rows.sort()
    twice = [
        (archives[place].parent, f"image {os.fsdecode(file)} of class {name} is there twice")
        for (name, file, *_), (next_name, next_file, _, place, _) in itertools.pairwise(rows)
        if (name, file) == (next_name, next_file)
    ]
    report.errors(twice, "remove one archive or image")
    return rows


def _list_members(path: Path, report: Report) -> Iterator[tuple[str, bytes, int, int]]:
    """(class, file name, bytes, first byte) of each image of an archive."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed, since compressed archives cannot be read by place
            for member in archive:
                key, extension = os.path.splitext(member.name)
                if member.isfile() and extension.lower() in EXTENSIONS:
                    images[key] = member
                elif member.isfile() and extension == ".cls":
                    text = archive.extractfile(member).read()
                    if text.strip().isdigit() and int(text) < len(list_wnids()):
                        labels[key] = list_wnids()[int(text)]
                    else:
                        problem = f"{member.name} holds {text[:20]!r}, expected a class index from 0 to {len(list_wnids()) - 1}"
                        report.error(path, problem, "pack it again, with indices among the sorted wnids")
    except (tarfile.TarError, OSError) as error:
        report.error(path, f"not a readable tar archive ({error})", "get it again")
    end = path.stat().st_size
    for key, member in images.items():
        if member.offset_data + member.size > end:
            report.error(path, f"cut short within {member.name}", "get it again")
            continue
        folder, file = os.path.split(member.name)
        yield labels.get(key) or os.path.basename(folder) or path.stem, os.fsencode(file), member.size, member.offset_data
