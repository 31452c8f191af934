"""What all sets that this project draws have in common; digits and digits_wild against scikit-learn's scans."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from repro.core.config import build
from repro.core.errors import UserError
from repro.data.cells import write_embedded
from repro.data.embedded import digits, digits_wild
from repro.data.embedded.connect import write_connect
from repro.data.embedded.digits import write_digits
from repro.data.embedded.digits_wild import draw_image, write_digits_wild
from repro.data.embedded.scenes import write_scenes
from repro.data.kinds import KINDS
from repro.data.settings import ConnectSettings, DigitsSettings, ScenesSettings, WildDigitsSettings
from tests.data_sets.conftest import hash_files

SMALL = WildDigitsSettings(image_size=48, side_px=(24, 32), angle_degrees=15.0, train_copies=2)
CURVES = {"image_size": 96, "train_pairs": 6, "tune_pairs": 2, "test_pairs": 4, "dashes": [1, 2]}


@pytest.fixture(scope="module", autouse=True)
def few_scans():
    """Take the first 200 of the 1,797 scans."""
    scans, targets = digits.load_scans()
    with pytest.MonkeyPatch.context() as patch:
        for module in (digits, digits_wild):
            patch.setattr(module, "load_scans", lambda: (scans[:200], targets[:200]))
        yield


def list_scans(root: Path) -> list[tuple[int, str, Path]]:
    """(number, class, file) of each image of digits."""
    return sorted((int(path.stem.removeprefix("scan_")), path.parent.name, path) for path in root.rglob("*.png"))


def test_digits_has_every_scan_once_with_its_label_and_tune_is_what_the_recipe_was_chosen_on(tmp_path):
    """That was once called val: the first fifth of a permutation of each class, drawn with seed 0, digit by digit."""
    write_digits(tmp_path, DigitsSettings(image_size=144, test_fraction=0.1))
    truth, rng, first_fifth = load_digits(), np.random.Generator(np.random.PCG64(0)), set()
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(truth.target[:200] == digit))
        first_fifth |= set(members[: round(0.2 * len(members))].tolist())
        held_out = len(list((tmp_path / f"test/digit_{digit}").iterdir()))
        assert abs(held_out - 0.1 * len(members)) <= 0.5
    assert {number for number, *_ in list_scans(tmp_path / "tune")} == first_fifth
    for place, (number, label, path) in enumerate(list_scans(tmp_path)):
        assert (number, label) == (place, f"digit_{truth.target[place]}")
        scan, pixels = truth.images[number] * 255 / 16, np.asarray(Image.open(path), dtype=float)
        blocks = pixels.reshape(8, 18, 8, 18).mean(axis=(1, 3))
        assert np.corrcoef(blocks.ravel(), scan.ravel())[0, 1] > 0.97 and abs(pixels.mean() - scan.mean()) < 8
    assert number == 199


def test_each_scan_is_in_the_split_that_digits_has_it_in(tmp_path):
    write_digits(tmp_path / "digits", DigitsSettings(image_size=8))
    write_digits_wild(tmp_path / "wild", SMALL)
    for split, copies in (("train", 2), ("tune", 1), ("test", 1)):
        scans = sorted(f"{path.parent.name}/{path.stem}" for path in (tmp_path / "digits" / split).rglob("*.png"))
        drawn = sorted(f"{path.parent.name}/{path.stem}" for path in (tmp_path / "wild" / split).rglob("*.png"))
        assert drawn == sorted(f"{scan}_{copy}" for scan in scans for copy in range(copies))


# what writes a set, its settings, and those with which it is larger
SETS = {
    "digits": (write_digits, DigitsSettings(image_size=16), {}),
    "digits_wild": (write_digits_wild, SMALL, {"train_copies": 3}),
    "connect": (write_connect, build(ConnectSettings, CURVES, "curves"), {"train_pairs": 7}),
    "scenes": (write_scenes, ScenesSettings(train=2, tune=1, test=1, image_size=128), {"train": 3}),
}


@pytest.mark.parametrize("name", SETS)
def test_bytes_depend_on_the_settings_alone_and_a_larger_set_has_the_same_images(tmp_path, name):
    write, settings, larger = SETS[name]
    write(tmp_path / "set", dataclasses.replace(settings, seed=1))
    other = hash_files(tmp_path / "set")
    for folder, changes in (("set", {}), ("again", {}), ("more", larger)):  # the first one over another tree
        write(tmp_path / folder, dataclasses.replace(settings, **changes))
    first, again, more = (hash_files(tmp_path / folder) for folder in ("set", "again", "more"))
    assert first == again and set(os.listdir(tmp_path)) == {"set", "again", "more"}
    images = {name: digest for name, digest in first.items() if name.endswith(".png")}
    assert set(images.values()) <= set(more.values()) and (len(more) > len(first)) == bool(larger)
    if name == "digits":
        assert set(first) != set(other), "the seed divides the scans"
    else:
        assert not set(images.values()) & set(other.values())


def test_an_image_shows_its_scan_rather_than_another(tmp_path):
    """On a ground without texture: cut out at its ink and made as small, a digit is most like its own scan."""
    write_digits_wild(tmp_path / "flat", dataclasses.replace(SMALL, texture_contrast=(0.0, 0.0), train_copies=1))
    truth, ahead = load_digits(), 0
    chosen = sorted((tmp_path / "flat/test").rglob("*.png"))
    for path in chosen:
        with Image.open(path) as image:
            assert image.size == (48, 48) and image.mode == "L"
            seen = cut_out(np.asarray(image, dtype=float) - 127.5)
        number = int(path.stem.split("_")[1])
        assert path.parent.name == f"digit_{truth.target[number]}"
        other = next(n for n in range(number, number + 1797) if truth.target[n % 1797] != truth.target[number]) % 1797
        own, wrong = (np.corrcoef(seen, cut_out(truth.images[n] * 8))[0, 1] for n in (number, other))
        ahead += own > wrong
    assert ahead >= 0.9 * len(chosen), "half of them by chance"


def cut_out(pixels: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(pixels > 40)
    inside = pixels[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].clip(0, 255)
    return np.asarray(Image.fromarray(inside.astype(np.uint8)).resize((8, 8)), dtype=float).ravel()


def test_the_digit_lies_wholly_inside_and_has_the_contrast_of_the_settings():
    """On a ground without texture, what differs from mid-grey by more than the noise is the digit."""
    settings = dataclasses.replace(SMALL, texture_contrast=(0.0, 0.0), contrast=(0.7, 0.9))
    scan = np.zeros((8, 8), dtype=np.uint8)
    scan[1:7, 2:6] = 255
    places = set()
    for seed in range(60):
        image = draw_image(np.random.Generator(np.random.PCG64(seed)), scan, settings).astype(float)
        rows, columns = np.nonzero(abs(image - 127.5) > 30)
        height, width = (np.ptp(axis) + 1 for axis in (rows, columns))
        # six and four eighths of 24 to 32 pixels, turned by up to 15 degrees, with the soft rim of the strokes
        assert 17 <= height <= 33 and 11 <= width <= 28
        places.add((rows.min(), columns.min()))
        assert 0.65 < np.median(image[abs(image - 127.5) > 60]) / 127.5 - 1 < 0.95
    assert len(places) > 40


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (WildDigitsSettings, {"image_size": 48, "side_px": [24, 48], "angle_degrees": 15.0}, "by 15 degrees, needs 61"),
        (WildDigitsSettings, {"test_fraction": 0.6, "tune_fraction": 0.6}, "leave less than a tenth for training"),
        (ScenesSettings, {"side_px": [96, 24]}, r"side_px: expected \[smallest, largest\]"),
        (ScenesSettings, {"image_size": 64}, "image_size: .* 128, got int 64"),
        (ScenesSettings, {"overlap": 0.1, "side_px": [24, 120]}, "120, turned by 30 degrees, needs 166 pixels of"),
        (ConnectSettings, {"image_size": 100}, "image_size: expected a multiple of 16, got 100"),
        (ConnectSettings, {"dashes": [0, 2]}, r"dashes\[0\]: .* 1, got int 0"),
        (ConnectSettings, {"gap_px": 2}, "gap_px: dashes touch, expected at least thickness_px"),
        (ConnectSettings, {"clearance_px": 9}, "clearance_px: expected marker_px"),
        (ConnectSettings, {"curvature": 0.2}, "curvature: expected at most 1 / clearance_px = 0.143, got 0.2"),
    ],
)
def test_settings_that_cannot_be_drawn_are_refused(settings, changes, message):
    needed = {WildDigitsSettings: {}, ScenesSettings: {"image_size": 128}, ConnectSettings: CURVES}
    with pytest.raises(UserError, match=message):
        build(settings, needed[settings] | changes, "settings")


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"did not write; .*runtime\.data_roots\.digits"):
        write_embedded(KINDS["digits"], tmp_path, DigitsSettings(), None)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_stopped_while_writing_leaves_no_tree(tmp_path, monkeypatch):
    target, save, calls = tmp_path / "digits", Image.Image.save, []

    def strike(image, path, **options):
        calls.append(path)
        save(image, path, **options)
        if len(calls) == 100:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Image.Image, "save", strike)
        write_digits(target, DigitsSettings(image_size=16))
    assert len(calls) == 100 and not target.exists()
    write_digits(target, DigitsSettings(image_size=16))
    assert len(list_scans(target)) == 200
