"""Decoding against OpenCV, which the libraries of the published recipes use."""

import cv2
import numpy as np
import pytest
from PIL import Image

from repro.core.errors import UserError
from repro.data.pixels import read_labels, read_pixels

RNG = np.random.default_rng(0)
GREY = RNG.integers(256, size=(5, 7), dtype=np.uint8)
COLOUR = RNG.integers(256, size=(5, 7, 3), dtype=np.uint8)
DEEP = RNG.integers(2**16, size=(5, 7), dtype=np.uint16)


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(GREY),
        Image.fromarray(GREY > 100),
        Image.fromarray(np.dstack([GREY, GREY[::-1]]), "LA"),
        Image.fromarray(COLOUR),
        Image.fromarray(np.dstack([COLOUR, GREY]), "RGBA"),
        Image.fromarray(DEEP),
        Image.fromarray(COLOUR).quantize(16),
    ],
    ids=["grey", "black and white", "grey with alpha", "colour", "colour with alpha", "16 bits", "palette"],
)
def test_every_mode_as_opencv(tmp_path, image):
    image.save(tmp_path / "image.png")
    theirs = cv2.imread(str(tmp_path / "image.png"), cv2.IMREAD_COLOR)[..., ::-1]
    ours = read_pixels(tmp_path / "image.png")
    assert ours.shape == (5, 7, 3) and ours.dtype == np.uint8
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_image_as_opencv(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    ramp = np.add.outer(np.arange(24), 8 * np.arange(16)).astype(np.uint8)
    Image.fromarray(ramp).save(tmp_path / "image.jpg", exif=exif, quality=100)
    theirs = cv2.imread(str(tmp_path / "image.jpg"), cv2.IMREAD_COLOR)
    ours = read_pixels(tmp_path / "image.jpg")
    assert ours.shape == theirs.shape == ((24, 16, 3) if orientation <= 4 else (16, 24, 3))
    assert np.abs(ours.astype(int) - theirs).max() <= 2


def test_cmyk_becomes_rgb(tmp_path):
    Image.new("RGB", (16, 16), (200, 60, 20)).convert("CMYK").save(tmp_path / "image.jpg", quality=100)
    assert np.abs(read_pixels(tmp_path / "image.jpg").mean(axis=(0, 1)) - (200, 60, 20)).max() < 4


@pytest.mark.parametrize(("image", "name"), [(Image.new("F", (4, 4)), "image.tiff"), (Image.new("I", (4, 4)), "image.tiff")])
def test_values_without_a_range_are_refused(tmp_path, image, name):
    image.save(tmp_path / name)
    with pytest.raises(
        UserError, match=rf"{name}: unreadable image \(mode {image.mode} has no known range of values, 8 or 16 bits expected\)"
    ):
        read_pixels(tmp_path / name)


@pytest.mark.parametrize("damage", ["gone", "empty", "text", "cut"])
def test_damage_is_one_line(tmp_path, damage):
    path = tmp_path / "image.png"
    Image.fromarray(COLOUR).save(path)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "text": b"not an image", "cut": path.read_bytes()[:60]}[damage])
    with pytest.raises(UserError, match=r"image\.png: unreadable image \(.*\); get it again") as caught:
        read_pixels(path)
    assert "\n" not in str(caught.value) and " at 0x" not in str(caught.value)


@pytest.mark.parametrize("image", [Image.fromarray(COLOUR), Image.fromarray(DEEP), Image.fromarray(COLOUR).quantize(8)])
def test_label_maps_have_eight_bits(tmp_path, image):
    image.save(tmp_path / "label.png")
    with pytest.raises(UserError, match=rf"label\.png: label map of mode {image.mode}, one channel of 8 bits expected"):
        read_labels(tmp_path / "label.png")
    Image.fromarray(GREY).save(tmp_path / "label.png")
    assert np.array_equal(read_labels(tmp_path / "label.png"), GREY)
