"""Images in an uncompressed tar archive, found by their byte offset and named as if the archive were unpacked."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from .findings import Reporter
from .kinds import OWN_KINDS, Kind, list_wnids
from .pictures import is_left_out, is_picture, may_be_picture

_MOST_LINKS = 40  # Linux' limit on symbolic links in one path


def list_members(path: Path, report: Reporter, kind: Kind, others: list[str]) -> Iterator[tuple[str, bytes, int, int]]:
    """Yield (class, file name, size in bytes, byte offset) of each image in an archive, as if it were unpacked.

    Exhaust it: images without a class are reported after the last one. Its results are cached: a change of them needs
    another `tree._RULES`.

    Args:
        report: receives the findings.
        others: is extended by the names of files that may be pictures and are not read.
    """
    kept = _read_members(path, report, kind.suffixes)
    images = {name: place for name, place in kept.items() if is_picture(name, kind.suffixes)}
    others += [name for name in kept if name not in images and may_be_picture(name)]
    labels: dict[str, set[str]] = {}  # key -> names of classes
    for name in kept:
        if name.lower().endswith(".cls"):
            label = _read_label(kept[name], path, name, report, kind)
            # a .cls may belong to one file (a.b.cls to a.b.jpg) or to WebDataset's key (a.cls to a.b.jpg)
            for key in {os.path.splitext(name)[0], _key(name)}:
                labels.setdefault(key, set()).add(label)
    # keys of files that are no images: a shard of WebDataset without .cls has, for example, a .json for each image
    beside = {_key(name) for name in kept.keys() - images.keys()}
    end, unlabelled = path.stat().st_size, []
    for name, (offset, size) in images.items():
        if offset + size > end:
            report.error(path, f"cut short within {name}", "get it again")
            continue
        folder, file = os.path.split(name)
        found = labels.get(os.path.splitext(name)[0]) or labels.get(_key(name)) or set()
        if len(found) > 1 or (not found and (labels or (not folder and _key(name) in beside))):
            unlabelled.append((path, f"{name} has {f'{len(found)} classes' if found else f'no {_key(name)}.cls'}"))
        label = min(found) if found else os.path.basename(folder) or path.stem
        yield label, os.fsencode(file), size, offset
    report.errors(unlabelled, "give each key one .cls, or pack the images in a folder for each class")


def _read_members(path: Path, report: Reporter, suffixes: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Map the names of an archive's files to their (byte offset, size), with links followed.

    Files of operating systems are left out. Pictures without such a place, and damage of the archive, are errors.
    """
    # name -> (byte offset, size), or the target of a link; a later member replaces an earlier one of the same name, as
    # when tar unpacks it
    files: dict[str, tuple[int, int] | str] = {}
    unfit: list[tuple[str, str]] = []
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed only: a compressed archive has no byte offsets
            for member in archive:
                name = _clean(member.name)
                if member.issym():
                    files[name] = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
                elif member.islnk():
                    # a hard link keeps the bytes of the earlier member, even where a later one replaces that name
                    files[name] = files.get(_clean(member.linkname), member.linkname)
                elif member.isfile() and not _has_holes(member):
                    files[name] = member.offset_data, member.size
                elif not member.isdir() and is_picture(name, suffixes):
                    unfit.append((name, f"is {'a sparse' if member.isfile() else 'no plain'} file"))
            # tarfile takes a damaged header for the end of the archive, where there are only zeros
            archive.fileobj.seek(archive.offset)
            if any(archive.fileobj.read(tarfile.BLOCKSIZE)):
                report.error(path, f"damaged at byte {archive.offset}", "get it again")
    except (tarfile.TarError, OSError) as error:
        report.error(path, f"not a readable tar archive ({error})", "get it again")
    whole: dict[str, tuple[int, int]] = {}
    for name, place in files.items():
        for _ in range(_MOST_LINKS):
            place = files.get(place) if isinstance(place, str) else place
        if isinstance(place, tuple):
            whole[name] = place
        elif is_picture(name, suffixes) or not os.path.splitext(name)[1]:
            unfit.append((name, f"is a link to {files[name]}, which is no file in it"))
    problems = [(path, f"{name} {problem}") for name, problem in unfit if not is_left_out(name)]
    report.errors(problems, "pack it again, with tar --dereference and without --sparse")
    return {name: place for name, place in whole.items() if not is_left_out(name)}


def _read_label(place: tuple[int, int], path: Path, name: str, report: Reporter, kind: Kind) -> str:
    """Read the class index in a .cls file. Return its wnid, or in a user's own set the index as four digits."""
    with open(path, "rb") as stream:
        stream.seek(place[0])
        text = stream.read(place[1])
    limit = 10_000 if kind.name in OWN_KINDS else len(list_wnids())
    if text.strip().isdigit() and (index := int(text)) < limit:
        return f"{index:04d}" if kind.name in OWN_KINDS else list_wnids()[index]
    problem = f"{name} holds {text[:20]!r}, expected a class index from 0 to {limit - 1}"
    report.error(path, problem, "pack it again, with indices among the sorted classes")
    return "unknown"


def _clean(name: str) -> str:
    """Return a member's name as tar unpacks it: a relative path without `./` or `..`."""
    return "/".join(part for part in os.path.normpath(name).split("/") if part not in ("", ".", ".."))


def _key(name: str) -> str:
    """Return WebDataset's key of a member: its path up to the first dot of the file name."""
    folder, file = os.path.split(name)
    return os.path.join(folder, file.partition(".")[0])


def _has_holes(member: tarfile.TarInfo) -> bool:
    """Return whether a sparse file is stored in several pieces, so that one (offset, size) cannot address it."""
    return member.issparse() and [part for part in member.sparse if part[1]] != [(0, member.size)]
