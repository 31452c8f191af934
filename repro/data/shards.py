"""A split as tar archives, for storage that hates small files: root/{train,val}/*.tar.

An image's class is, in this order: what a member `<key>.cls` beside it says, an index among the sorted wnids of ImageNet-1K
(WebDataset shards); the folder it lies in within the archive; or the archive's own name (`n01440764.tar`, as they lie in
ILSVRC2012_img_train.tar). Images are read by their place in the archive, in any order, so a sharded data set trains in the same
order as its files would, and continues at the same batch; no shuffle buffer stands between.
"""

import dataclasses
import functools
import itertools
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..core.errors import UserError
from ..core.record import atomic

_INDEX = ".shards.npz"  # of a listing, beside the archives: headers alone take minutes to read for 1.28 million images


@dataclasses.dataclass(frozen=True)
class Archives:
    """Where the images of a split lie.

    Args:
        files: (S,) bytes; file names of the archives.
        number: (N,) int64; which of them holds an image.
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


def list_shards(folder: Path, extensions: Sequence[str]) -> tuple[dict[str, np.ndarray], Archives]:
    """The images of a folder of archives, ordered by class and then by name.

    The listing is kept in `.shards.npz` there, where it can be written.

    Args:
        extensions: of images, in lower case.

    Returns:
        {classes (K,) bytes, sorted; names (N,) bytes; sizes (N,) int64; targets (N,) int64}, and where the images lie.

    Raises:
        UserError: an archive that is damaged or cut short, an image without a class, twice the same image, or no image at all.
    """
    archives = sorted(folder.glob("*.tar"))
    stamp = np.array([(path.stat().st_size, path.stat().st_mtime_ns) for path in archives], dtype=np.int64)
    files = np.array([os.fsencode(path.name) for path in archives], dtype=np.bytes_)
    kept = _load(folder / _INDEX, files, stamp)
    if kept is None:
        kept = _list(archives, extensions)
        try:
            with atomic(folder / _INDEX) as temporary, open(temporary, "wb") as stream:
                np.savez(stream, files=files, stamp=stamp, **kept)
        except OSError:  # a read-only data set: it is listed again next time
            pass
    return kept, Archives(files, kept.pop("number"), kept.pop("offsets"))


def _load(path: Path, files: np.ndarray, stamp: np.ndarray) -> dict[str, np.ndarray] | None:
    """An earlier listing of the same archives."""
    try:
        with np.load(path) as found:
            kept = {name: found[name] for name in found.files}
        same = np.array_equal(kept.pop("files"), files) and np.array_equal(kept.pop("stamp"), stamp)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return kept if same else None


def _list(archives: list[Path], extensions: Sequence[str]) -> dict[str, np.ndarray]:
    rows = []
    for place, path in enumerate(archives):
        rows += [(name, file, size, place, offset) for name, file, size, offset in _members(path, extensions)]
    if not rows:
        raise UserError(f"{archives[0].parent}: its archives hold no image ({', '.join(extensions)})")
    rows.sort()
    for (name, file, *_), (next_name, next_file, *_) in itertools.pairwise(rows):
        if (name, file) == (next_name, next_file):
            raise UserError(f"{archives[0].parent}: {os.fsdecode(file)} of class {name} is there twice; remove one archive or image")
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


def _members(path: Path, extensions: Sequence[str]) -> Iterator[tuple[str, bytes, int, int]]:
    """(class, file name, bytes, first byte) of each image of an archive."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed: the others cannot be read by place
            for member in archive:
                key, extension = os.path.splitext(member.name)
                if member.isfile() and extension.lower() in extensions:
                    images[key] = member
                elif member.isfile() and extension == ".cls":
                    labels[key] = _wnid(path, member.name, archive.extractfile(member).read())
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{path}: not a readable tar archive ({error}); get it again") from None
    end = path.stat().st_size
    for key, member in images.items():
        if member.offset_data + member.size > end:
            raise UserError(f"{path}: cut short within {member.name}; get it again")
        folder, file = os.path.split(member.name)
        yield labels.get(key) or os.path.basename(folder) or path.stem, os.fsencode(file), member.size, member.offset_data


def _wnid(path: Path, member: str, text: bytes) -> str:
    names = _wnids()
    if not text.strip().isdigit() or int(text) >= len(names):
        raise UserError(f"{path}: {member} holds {text[:20]!r}, expected a class index from 0 to {len(names) - 1}")
    return names[int(text)]


@functools.cache
def _wnids() -> list[str]:
    from timm.data import ImageNetInfo

    return ImageNetInfo("imagenet-1k").label_names()
