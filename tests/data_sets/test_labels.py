"""Label maps and the names of their classes are read exactly, in every form that keeps them, or refused in a line."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from repro.core.errors import UserError
from repro.data.ade20k import AdePairs
from repro.data.pixels import read_labels
from repro.data.prepare import scan_manifest
from tests.data_sets.conftest import findings, make_cell, only

LABELS = np.random.default_rng(0).integers(0, 4, (24, 32), dtype=np.uint8)
COLOURS = np.random.default_rng(1).integers(0, 256, 768, dtype=np.uint8).tolist()


def palette(colours=COLOURS):
    coloured = Image.fromarray(LABELS, "P")
    coloured.putpalette(colours)
    return coloured


def save_4_bits(path):
    """Write a PNG of grey levels with 4 bits, which Pillow does not write."""
    packed = LABELS[:, ::2] << 4 | LABELS[:, 1::2]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 32, 24, 4, 0, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in packed))), (b"IEND", b"")]
    content = [struct.pack(">I", len(x)) + k + x + struct.pack(">I", zlib.crc32(k + x)) for k, x in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(content))


def saved(what=None, form="PNG", **options):
    return lambda path: (what or Image.fromarray(LABELS)).save(path, form, **options)


upright = Image.Exif()
upright[0x0112] = 1
EXACT = {
    "grey": saved(),
    "grey, with other data": saved(dpi=(72, 72), exif=upright),
    "grey, with a transparent level": saved(transparency=0),
    "palette": saved(palette()),
    "palette of 2 bits": saved(palette(), bits=2),
    "palette with a transparent colour": saved(palette(), transparency=3),
    "palette whose colours are equal": saved(palette([9, 9, 9] * 256)),
    "bitmap": saved(form="BMP"),
    "bitmap with a palette": saved(palette(), "BMP"),
}


@pytest.mark.parametrize("save", EXACT.values(), ids=EXACT)
def test_labels_are_read_exactly(tmp_path, save):
    """Whatever the suffix of the file says."""
    save(tmp_path / "a.jpg")
    assert np.array_equal(read_labels(tmp_path / "a.jpg")[0], LABELS)


MAP = Image.fromarray(LABELS)
CHANGED = {
    "JPEG": (saved(form="JPEG"), "JPEG"),
    "lossless WebP": (saved(form="WEBP", lossless=True), "WEBP"),
    "colours": (saved(MAP.convert("RGB")), "RGB"),
    "grey and alpha": (saved(MAP.convert("LA")), "LA"),
    "16 bits": (saved(Image.fromarray(LABELS.astype(np.uint16))), "I;16"),
    "black and white": (saved(MAP.convert("1")), "mode 1"),
    "grey of 4 bits": (save_4_bits, "4 bits"),
    "TIFF": (saved(form="TIFF"), "unreadable"),
}


@pytest.mark.parametrize(("save", "word"), CHANGED.values(), ids=CHANGED)
def test_what_changes_labels_is_refused_in_a_line_for_ones_own_set(tmp_path, save, word):
    save(tmp_path / "a.png")
    with pytest.raises(UserError, match=rf"a\.png: .*{word}.*; \w+") as caught:
        read_labels(tmp_path / "a.png")
    assert "\n" not in str(caught.value) and "release" not in str(caught.value)


def write_pair(root, labels=LABELS, *, size=(32, 24), exif=None, split="training", name="a"):
    for part in ("images", "annotations"):
        (root / part / split).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 90, 90)).save(root / f"images/{split}/{name}.jpg", **({"exif": exif} if exif else {}))
    Image.fromarray(labels).save(root / f"annotations/{split}/{name}.png")


def name_classes(root, content=b"sky\nroad\ncar\n"):
    (root / "classes.txt").write_bytes(content)
    return root


NAMES = ("ciel", "forêt", "路")
TEXT = "\n".join(NAMES)


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        f"{TEXT}\n\n \n".encode("utf-8-sig"),
        f"\t{TEXT}\n".replace("\n", "  \r\n").encode(),
        f"{TEXT}\n".replace("\n", "\r").encode(),
    ],
)
def test_classes_in_utf_8(tmp_path, content):
    write_pair(tmp_path)
    assert AdePairs(name_classes(tmp_path, content), "train").classes == NAMES


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode("utf-16"),
        TEXT.encode("gb18030"),
        "ciel\nforêt\n".encode("latin-1"),
        "sky\nroad".encode("utf-16-le"),  # valid UTF-8 with NUL
    ],
)
@pytest.mark.parametrize("file", ["classes.txt", "objectInfo3.txt"])
def test_classes_in_another_encoding_are_one_line(tmp_path, content, file):
    write_pair(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{file}: .*UTF-8") as caught:
        AdePairs(tmp_path, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"road\nsky\ncar\n", b"sky\nroad\ncar\nbus\n"])
def test_names_that_changed_after_the_preparation_are_one_line(tmp_path, content):
    for split in ("training", "validation"):
        write_pair(name_classes(tmp_path), split=split)
    prepared = make_cell(tmp_path, scan_manifest(tmp_path, "ade20k"))
    assert prepared.open_pairs("train").classes == ("sky", "road", "car")
    name_classes(tmp_path, content)
    with pytest.raises(UserError, match="classes .*manifest; restore") as caught:
        prepared.open_pairs("train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("part", "other"), [("images", "a.jpeg"), ("images", "a.JPG"), ("annotations", "a.bmp")])
def test_two_pictures_of_one_stem_are_an_error_that_names_both(tmp_path, part, other):
    write_pair(name_classes(tmp_path))
    (first,) = (tmp_path / part / "training").iterdir()
    (first.parent / other).write_bytes(first.read_bytes())
    with pytest.raises(UserError) as caught:
        AdePairs(tmp_path, "train")
    assert first.name in str(caught.value) and other in str(caught.value)


@pytest.mark.parametrize("orientation", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("size", [(32, 24), (24, 24)])
def test_a_turned_photo_is_read_where_its_size_says_how_it_was_labelled(tmp_path, orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = size[::-1] if orientation > 4 else size
    write_pair(name_classes(tmp_path), LABELS[: shown[1], :1].repeat(shown[0], 1)[: shown[1]], size=size, exif=exif)
    if shown[1] == 32:
        labels = np.resize(LABELS, (32, 24))
        Image.fromarray(labels).save(tmp_path / "annotations/training/a.png")
    pairs = AdePairs(tmp_path, "train")
    if orientation == 1 or shown != size:
        assert pairs.read(0)[1].shape == shown[::-1]
        return
    with pytest.raises(UserError, match=r"a\.jpg: .*EXIF.*a\.png"):
        pairs.read(0)
    # a label map with the same EXIF data is turned with its photo
    Image.fromarray(np.resize(LABELS, size[::-1])).save(tmp_path / "annotations/training/a.png", exif=exif)
    assert pairs.read(0)[1].shape == shown[::-1]


@pytest.mark.parametrize("entry", [b"\0\x02\0\0\0\x02" + b"6\0\0\0", b"\0\x03\0\0\0\x01" + b"\0\x09\0\0"])
def test_an_orientation_that_is_none_turns_nothing(tmp_path, entry):
    """A text, and the number 9; the entry has a type, a count and a value."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + b"\x01\x12" + entry + bytes(4)
    write_pair(name_classes(tmp_path), np.resize(LABELS, (24, 24)), size=(24, 24), exif=exif)
    assert AdePairs(tmp_path, "train").read(0)[1].shape == (24, 24)


def check(root, *values, names=b"sky\nroad\ncar\n"):
    """The lines and warnings of a check of two splits whose label maps have these values, a row of each."""
    for split in ("training", "validation"):
        write_pair(root, np.array(values, np.uint8).repeat(32).reshape(-1, 32), size=(32, len(values)), split=split)
    lines, errors, _ = findings("ade20k", name_classes(root, names))
    return lines, only(lines, "warning"), errors


def test_the_share_of_each_class_is_said_by_name(tmp_path):
    lines, warnings, errors = check(tmp_path, 1, 1, 2, 3)
    (line,) = [line for line in lines if "sky" in line]
    assert all(words in line for words in ("sky 50.0%", "road 25.0%", "car 25.0%", "0.0%"))
    assert (warnings, errors) == ([], 0)


@pytest.mark.parametrize(
    ("values", "shifted"),
    [
        # labels from 0, with a void above them and without
        ((0, 1, 2, 3), True),
        ((0, 1, 1, 1, 1, 2), True),
        ((0, *[1] * 12, *[2] * 12), True),
        ((0, *[1] * 5, *[2] * 5, *[3] * 5), False),
        ((0, *[1] * 12, *[2] * 12, 3), False),
        ((1, 2, 3), False),
        ((3, 3, 1), False),
    ],
)
def test_labels_that_begin_at_0_are_seen(tmp_path, values, shifted):
    _, warnings, errors = check(tmp_path, *values)
    assert bool([line for line in warnings if "sky" in line and "add 1" in line]) == shifted == bool(warnings)
    assert errors == 0


@pytest.mark.parametrize(("values", "word"), [((0, 1, 255), "add 1"), ((0, 255), "black and white"), ((9, 4), "label")])
def test_a_void_of_255_is_an_error_that_says_what_to_do(tmp_path, values, word):
    lines, _, errors = check(tmp_path, *values)
    assert errors == 2 and all(word in line for line in only(lines, "error"))


def test_classes_that_cannot_be_read_do_not_end_the_check(tmp_path):
    lines, warnings, errors = check(tmp_path, 0, 1, 2, names="sky\nroad".encode("utf-16"))
    assert errors and "UTF-8" in only(lines, "error")[0] and not warnings
