"""Decoding against OpenCV, which the libraries of the published recipes use."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image, ImageFile

from repro.core.errors import UserError
from repro.data import pixels
from repro.data.classification import read_rgb
from repro.data.pixels import UNREADABLE, read_labels, read_pixels
from repro.data.tree import ImageBytes

RNG = np.random.default_rng(0)
GREY = RNG.integers(256, size=(5, 7), dtype=np.uint8)
COLOUR = RNG.integers(256, size=(5, 7, 3), dtype=np.uint8)
DEEP = RNG.integers(2**16, size=(5, 7), dtype=np.uint16)
MODES = {"grey": Image.fromarray(GREY), "black and white": Image.fromarray(GREY > 100)}
MODES |= {"16 bits": Image.fromarray(DEEP), "palette": Image.fromarray(COLOUR).quantize(16)}
MODES |= {"grey with alpha": Image.fromarray(np.dstack([GREY, GREY[::-1]]), "LA"), "colour": Image.fromarray(COLOUR)}
MODES["colour with alpha"] = Image.fromarray(np.dstack([COLOUR, GREY]), "RGBA")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_as_opencv(tmp_path, mode):
    MODES[mode].save(tmp_path / "image.png")
    theirs = cv2.imread(str(tmp_path / "image.png"), cv2.IMREAD_COLOR)[..., ::-1]
    ours = read_pixels(tmp_path / "image.png")
    assert ours.shape == (5, 7, 3) and ours.dtype == np.uint8 and np.array_equal(ours, theirs)


@pytest.mark.parametrize("orientation", [1, 4, 6])
def test_exif_turns_the_image_as_opencv(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    ramp = np.add.outer(np.arange(24), 8 * np.arange(16)).astype(np.uint8)
    Image.fromarray(ramp).save(tmp_path / "image.jpg", exif=exif, quality=100)
    theirs = cv2.imread(str(tmp_path / "image.jpg"), cv2.IMREAD_COLOR)
    ours = read_pixels(tmp_path / "image.jpg")
    assert ours.shape == theirs.shape == ((24, 16, 3) if orientation <= 4 else (16, 24, 3))
    assert np.abs(ours.astype(int) - theirs).max() <= 2


def test_odd_exif_data_do_not_hinder_the_turn(tmp_path):
    """The maker is a number instead of a text; each entry has a tag, a type, a count, and a value or its place."""
    maker, turn = b"\x01\x0f\0\x05\0\0\0\x01\0\0\0\x26", b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + maker + turn + bytes(4) + b"\0\0\0\x01\0\0\0\x01"
    Image.new("RGB", (24, 16)).save(tmp_path / "image.jpg", exif=exif)
    assert read_pixels(tmp_path / "image.jpg").shape == (24, 16, 3)


def as_bytes(form: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(COLOUR).save(stream, form)
    return stream.getvalue()


UNREAD = {"another format": as_bytes("TIFF"), "cut": as_bytes("PNG")[:60], "text": b"not an image"}
UNREAD |= {"empty": b"", "missing": None}


@pytest.mark.parametrize("name", UNREAD)
def test_damage_and_what_other_decoders_read_is_one_line(tmp_path, name):
    path, content = tmp_path / "image.png", UNREAD[name]
    if content is not None:
        path.write_bytes(content)
    why = ".*" if name in ("cut", "empty", "missing") else "not in any image format.*"
    with pytest.raises(UserError, match=rf"image\.png: unreadable image \({why}\); get it again") as caught:
        read_pixels(path)
    assert "\n" not in str(caught.value) and " at 0x" not in str(caught.value)


def test_a_large_or_oblong_image_is_refused_by_its_header(tmp_path, monkeypatch):
    path = tmp_path / "image.png"
    Image.new("1", (100, 2)).save(path)
    read_pixels(path)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("was decoded"))
    huge = "13000×13000 .*runtime.max_pixels.* 80,000,000.*raise that setting"
    for size, message in (((13000, 13000), huge), ((102, 2), "102×2 .*50 times")):
        Image.new("1", size).save(path)
        with pytest.raises(UserError, match=message) as caught:
            read_pixels(path)
        assert "again" not in str(caught.value)


def test_the_limit_of_a_call_is_its_own_and_pillows_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "image.png"
    Image.fromarray(COLOUR).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # Pillow itself then refuses more than 20
    with pytest.raises(UserError, match="more than runtime.max_pixels: 34"):
        read_pixels(path, 34)
    assert read_pixels(path, 35).shape == COLOUR.shape and Image.MAX_IMAGE_PIXELS == 10
    with pytest.raises(Image.DecompressionBombError):
        Image.open(path)


def test_the_first_frame_of_an_animation_is_read_and_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pixels, "_animated", [])
    frames = [Image.new("RGB", (8, 8), (value,) * 3) for value in (10, 200)]
    for name in ("one", "two"):
        frames[0].save(tmp_path / f"{name}.webp", save_all=True, append_images=frames[1:], lossless=True)
        assert (read_pixels(tmp_path / f"{name}.webp") == 10).all()
    assert caplog.text.count("animation") == 1 and "one.webp" in caplog.text


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp"])
def test_flipped_bytes_are_read_or_are_one_line(tmp_path, suffix):
    rng, path, other = np.random.default_rng(0), tmp_path / f"image.{suffix}", io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOUR).save(other, {"jpg": "JPEG"}.get(suffix, suffix), exif=exif)
    for _ in range(100):
        content = np.frombuffer(other.getvalue(), dtype=np.uint8).copy()
        content[rng.integers(len(content), size=2)] = rng.integers(256, size=2)
        path.write_bytes(content.tobytes())
        for read in (read_pixels, read_labels, lambda file: read_rgb(ImageBytes(str(file)))):
            try:
                read(path)
            except UserError as error:
                assert str(path) in str(error) and "\n" not in str(error)
            except UNREADABLE as error:
                assert read not in (read_pixels, read_labels) and "\n" not in str(error)
