"""A split as tar archives, for storage that hates small files: root/{train,val}/*.tar.

The class of an image comes from the first of these that exists: a member `<key>.cls` beside it, which holds an index among the sorted
wnids of ImageNet-1K (WebDataset shards); the folder in the archive; the archive's own name (`n01440764.tar`, as the archives in
ILSVRC2012_img_train.tar are called). Images are read by their place in the archive, in any order. A sharded data set therefore
trains in the same order as its files would, and continues at the same batch; a shuffle buffer allows neither.
"""

import dataclasses
import itertools
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..core.record import atomic
from .findings import Report
from .kinds import list_wnids

_INDEX = ".shards.npz"  # the listing is kept beside the archives: to read 1.28 million headers takes minutes
Row = tuple[str, bytes, int, int, int]  # class, file name, bytes, which archive, first byte


@dataclasses.dataclass(frozen=True)
class Archives:
    """Where the images of a split lie.

    Args:
        files: (S,) bytes; file names of the archives.
        number: (N,) int64; the archive of each image, a place in `files`.
        offsets: (N,) int64; where its bytes begin there.
    """

    files: np.ndarray
    number: np.ndarray
    offsets: np.ndarray

    def file(self, index: int) -> str:
        """The archive that holds an image."""
        return os.fsdecode(self.files[self.number[index]])


def is_sharded(folder: Path) -> bool:
    """Whether a split's folder holds archives and no class folders."""
    return any(folder.glob("*.tar")) and not any(entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))


def list_shards(folder: Path, extensions: Sequence[str], report: Report) -> tuple[dict[str, np.ndarray], Archives] | None:
    """The images of a folder of archives, ordered by class and then by name.

    A listing without errors is kept in `.shards.npz` in that folder, where it can be written.

    Args:
        folder: holds the archives.
        extensions: of images, in lower case.
        report: takes what is wrong: an archive that is damaged or cut short, an image without a class, an image that occurs twice.

    Returns:
        {classes (K,) bytes, sorted; names (N,) bytes; sizes (N,) int64; targets (N,) int64}, and where the images lie; None where
        there is no image.

    Raises:
        UserError: an error, if the report raises it.
    """
    archives = sorted(folder.glob("*.tar"))
    stamp = np.array([(path.stat().st_size, path.stat().st_mtime_ns) for path in archives], dtype=np.int64)
    files = np.array([os.fsencode(path.name) for path in archives], dtype=np.bytes_)
    kept = _load(folder / _INDEX, files, stamp)
    if kept is None:
        errors_before = report.num_errors
        rows = _list_rows(archives, extensions, report)
        if not rows:
            report.error(folder, f"its archives hold no image ({', '.join(extensions)})", "pack the images into them")
            return None
        kept = _to_arrays(rows)
        if report.num_errors == errors_before:
            _save(folder / _INDEX, files=files, stamp=stamp, **kept)
    return kept, Archives(files, kept.pop("number"), kept.pop("offsets"))


def _load(path: Path, files: np.ndarray, stamp: np.ndarray) -> dict[str, np.ndarray] | None:
    """An earlier listing of the same archives; None where there is none."""
    try:
        with np.load(path) as found:
            kept = {name: found[name] for name in found.files}
        same = np.array_equal(kept.pop("files"), files) and np.array_equal(kept.pop("stamp"), stamp)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return kept if same else None


def _save(path: Path, **arrays: np.ndarray) -> None:
    try:
        with atomic(path) as temporary, open(temporary, "wb") as stream:
            np.savez(stream, **arrays)
    except OSError:
        pass  # a read-only data set is listed again next time


def _list_rows(archives: Sequence[Path], extensions: Sequence[str], report: Report) -> list[Row]:
    """A sorted row for each image."""
    rows: list[Row] = []
    for place, path in enumerate(report.track(archives, f"listing {archives[0].parent.name}/")):
        rows += [(name, file, size, place, offset) for name, file, size, offset in _list_members(path, extensions, report)]
    rows.sort()
    twice = [
        (archives[place].parent, f"image {os.fsdecode(file)} of class {name} is there twice")
        for (name, file, *_), (next_name, next_file, _, place, _) in itertools.pairwise(rows)
        if (name, file) == (next_name, next_file)
    ]
    report.errors(twice, "remove one archive or image")
    return rows


def _to_arrays(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    classes = sorted({row[0] for row in rows})
    index = {name: place for place, name in enumerate(classes)}
    _, names, sizes, number, offsets = zip(*rows)
    return {
        "classes": np.array([os.fsencode(name) for name in classes], dtype=np.bytes_),
        "names": np.array(names, dtype=np.bytes_),
        "sizes": np.array(sizes, dtype=np.int64),
        "targets": np.array([index[row[0]] for row in rows], dtype=np.int64),
        "number": np.array(number, dtype=np.int64),
        "offsets": np.array(offsets, dtype=np.int64),
    }


def _list_members(path: Path, extensions: Sequence[str], report: Report) -> Iterator[tuple[str, bytes, int, int]]:
    """(class, file name, bytes, first byte) of each image of an archive."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed, since compressed archives cannot be read by place
            for member in archive:
                key, extension = os.path.splitext(member.name)
                if member.isfile() and extension.lower() in extensions:
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
