"""Label maps and the names of their classes are read exactly, in every form that keeps them, or refused in a line."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from repro.core.errors import UserError
from repro.data.ade20k import AdePairs
from repro.data.check.dense import check_ade20k, check_coco
from repro.data.pixels import read_labels
from tests.data_sets.conftest import findings, only
from tests.data_sets.made import annotation, image, write_coco

LABELS = np.random.default_rng(0).integers(0, 4, (24, 32), dtype=np.uint8)
COLOURS = np.random.default_rng(1).integers(0, 256, 768, dtype=np.uint8).tolist()


def palette(colours=COLOURS):
    coloured = Image.fromarray(LABELS, "P")
    coloured.putpalette(colours)
    return coloured


def grey(bits):
    """A PNG of grey levels with fewer bits than a byte, which Pillow does not write."""

    def save(path):
        packed = np.packbits(np.unpackbits(LABELS[..., None], axis=2)[..., 8 - bits :].reshape(24, -1), axis=1)
        chunks = [(b"IHDR", struct.pack(">IIBBBBB", 32, 24, bits, 0, 0, 0, 0))]
        chunks += [(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in packed))), (b"IEND", b"")]
        content = [struct.pack(">I", len(x)) + k + x + struct.pack(">I", zlib.crc32(k + x)) for k, x in chunks]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(content))

    return save


def saved(what=None, form="PNG", **options):
    return lambda path: (what or Image.fromarray(LABELS)).save(path, form, **options)


upright = Image.Exif()
upright[0x0112] = 1
EXACT = {
    "grey": saved(),
    "grey, optimised": saved(optimize=True),
    "grey, with other data": saved(dpi=(72, 72), exif=upright),
    "grey, with a transparent level": saved(transparency=0),
    "palette": saved(palette()),
    "palette of 4 bits": saved(palette(), bits=4),
    "palette of 2 bits": saved(palette(), bits=2),
    "palette with a transparent colour": saved(palette(), transparency=3),
    "palette whose colours are equal": saved(palette([9, 9, 9] * 256)),
    "palette of reversed greys": saved(palette(np.repeat(np.arange(256)[::-1], 3).tolist())),
    "palette of four colours": saved(palette(COLOURS[:12])),
    "bitmap": saved(form="BMP"),
    "bitmap with a palette": saved(palette(), "BMP"),
}


@pytest.mark.parametrize("save", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_labels_are_read_exactly(tmp_path, save, suffix):
    save(tmp_path / f"a.{suffix}")
    assert np.array_equal(read_labels(tmp_path / f"a.{suffix}"), LABELS)


MAP = Image.fromarray(LABELS)
CHANGED = {
    "JPEG": (saved(form="JPEG"), "JPEG"),
    "JPEG of best quality": (saved(form="JPEG", quality=100, subsampling=0), "JPEG"),
    "JPEG in colour": (saved(MAP.convert("RGB"), "JPEG"), "JPEG"),
    "progressive JPEG": (saved(form="JPEG", progressive=True), "JPEG"),
    "CMYK": (saved(MAP.convert("CMYK"), "JPEG"), "JPEG"),
    "WebP": (saved(form="WEBP"), "WEBP"),
    "lossless WebP": (saved(form="WEBP", lossless=True), "WEBP"),
    "colours": (saved(MAP.convert("RGB")), "RGB"),
    "colours of a palette": (saved(palette().convert("RGB")), "RGB"),
    "colours and alpha": (saved(MAP.convert("RGBA")), "RGBA"),
    "grey and alpha": (saved(MAP.convert("LA")), "LA"),
    "16 bits": (saved(Image.fromarray(LABELS.astype(np.uint16))), "I;16"),
    "black and white": (saved(MAP.convert("1")), "mode 1"),
    "grey of 2 bits": (grey(2), "2 bits"),
    "grey of 4 bits": (grey(4), "4 bits"),
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
        TEXT.encode("utf-8-sig"),
        f"{TEXT}\n".encode(),
        f"{TEXT}\n\n \n".encode("utf-8-sig"),
        f"{TEXT}\n".replace("\n", "\r\n").encode(),
        f"{TEXT}\n".replace("\n", "\r\n").encode("utf-8-sig"),
        f"{TEXT}\n".replace("\n", "\r").encode(),
        f"{TEXT}\n".replace("\n", "  \n").encode(),
        f"\t{TEXT}".encode(),
        f"{TEXT}\n".replace("\n", "\r\r\n").replace("\r\r", "\r").encode(),
    ],
)
def test_classes_in_utf_8(tmp_path, content):
    write_pair(tmp_path)
    assert AdePairs(name_classes(tmp_path, content), "train").classes == NAMES


@pytest.mark.parametrize(
    "content",
    [
        *(TEXT.encode(name) for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "gb18030")),
        *("ciel\nforêt\n".encode(name) for name in ("latin-1", "cp1252", "cp437", "mac-roman")),
        "sky\nroad".encode("utf-16-le"),
        b"sky\nro\0ad\n",
        b"sky\n\xff\n",
    ],
)
@pytest.mark.parametrize("file", ["classes.txt", "objectInfo3.txt"])
def test_classes_in_another_encoding_are_one_line(tmp_path, content, file):
    write_pair(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{file}: .*UTF-8") as caught:
        AdePairs(tmp_path, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["images", "annotations"])
@pytest.mark.parametrize("other", ["a.jpeg", "a.JPG", "a.bmp", "a.webp", "a.JPEG", "a.PNG"])
def test_two_pictures_of_one_stem_are_an_error_that_names_both(tmp_path, part, other):
    write_pair(name_classes(tmp_path))
    (first,) = (tmp_path / part / "training").iterdir()
    (first.parent / other).write_bytes(first.read_bytes())
    with pytest.raises(UserError) as caught:
        AdePairs(tmp_path, "train")
    assert first.name in str(caught.value) and other in str(caught.value)


@pytest.mark.parametrize("orientation", range(1, 9))
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


def check(root, *values, names=b"sky\nroad\ncar\n"):
    """The lines and warnings of a check of two splits whose label maps have these values, a row of each."""
    for split in ("training", "validation"):
        write_pair(root, np.array(values, np.uint8).repeat(32).reshape(-1, 32), size=(32, len(values)), split=split)
    lines, errors, _ = findings(check_ade20k, name_classes(root, names))
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
        ((0, 0, 1, 2), True),
        ((0, 1, 1, 1, 1, 2), True),
        ((0, *[1] * 12, *[2] * 12), True),
        ((0, 0, 0, 1), True),
        ((0, *[1] * 5, *[2] * 5, *[3] * 5), False),
        ((0, *[1] * 12, *[2] * 12, 3), False),
        ((1, 2, 3), False),
        ((1, 1, 2), False),
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


def test_the_share_of_the_objects_of_each_class_is_said_by_name(tmp_path):
    rows = [annotation(number, 1, category, [number, 1, 9, 9]) for number, category in enumerate((3, 3, 3, 8), 1)]
    categories = [{"id": 8, "name": "door"}, {"id": 3, "name": "lamp"}, {"id": 9, "name": "sink"}]
    for split in ("train", "val"):
        write_coco(tmp_path, {"images": [image(1)], "annotations": rows, "categories": categories}, split)
    lines, errors, _ = findings(check_coco, tmp_path)
    listed = [line for line in lines if "lamp" in line]
    assert errors == 0 and len(listed) == 2
    assert all(words in line for line in listed for words in ("lamp 75.0%", "door 25.0%", "sink 0.0%"))
