"""scenes against pycocotools and counts by hand, as hard ones and as calm ones."""

import dataclasses
import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from scipy.ndimage import binary_erosion

from repro.core.config import load_section
from repro.data.embedded import scenes
from repro.data.embedded.digits import load_scans, write_digits
from repro.data.embedded.scenes import CATEGORY_IDS, CLASSES, write_scenes
from repro.data.kinds import PrepareData
from repro.data.settings import DigitsSettings, ScenesSettings
from tests.conftest import ROOT
from tests.data_sets.conftest import hash_files

HARD, CALM = (
    dataclasses.replace(
        load_section(PrepareData, ROOT / f"profiles/{profile}.yaml", "prepare_data", cell).draw,
        train=24,
        tune=4,
        test=10,
    )
    for profile, cell in (("paper", "scenes_hard"), ("mini", "scenes"))
)
# fewest, most and least mean number of instances in an image; grey level of ink over mid-grey
EXPECTED = {256: ((2, 8, 4.0), (1.4, 2.0)), 128: ((2, 4, 2.9), (1.7, 2.0))}


@pytest.fixture(scope="module", params=[HARD, CALM], ids=["hard", "calm"])
def settings(request) -> ScenesSettings:
    return request.param


@pytest.fixture(scope="module")
def root(settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, settings)
    return folder


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.mode == "L"
        return np.asarray(image)


def pairs(root: Path, split: str):
    """(annotations by pycocotools, image id, pixels, labels) of each image."""
    folder, ade = f"{split}2017", {"train": "training", "tune": "tuning", "test": "testing"}[split]
    coco = COCO(root / f"coco/annotations/instances_{folder}.json")
    for number, image_id in enumerate(sorted(coco.imgs), start=1):
        pixels = read(root / "coco" / folder / coco.imgs[image_id]["file_name"])
        stem = f"ADE_{split}_{number:08d}"
        assert np.array_equal(pixels, read(root / "ade20k/images" / ade / f"{stem}.png"))
        yield coco, image_id, pixels, read(root / "ade20k/annotations" / ade / f"{stem}.png")


@pytest.mark.parametrize("settings", [HARD], indirect=True, ids=["hard"])
def test_hard_scenes_are_those_of_the_first_version(root):
    """The hash is of the files that the module wrote when its settings were constants of the code (commit 70c7940)."""
    written = sorted(hash_files(root).items())
    lines = "".join(f"{digest}  {name}\n" for name, digest in written if name != "generated.json")
    digest = hashlib.sha256(lines.encode()).hexdigest()
    assert digest == "65bf26e55868505b03aaaf0ba57c4f75e0ecd4828931fba3d4e6aa9ea961d470"


def test_sizes_do_not_depend_on_a_compressor(root, settings):
    """An uncompressed PNG of 256 rows of 256 grey levels has 65,792 bytes of pixels, and little else."""
    sizes, side = {path.stat().st_size for path in root.rglob("*.png")}, settings.image_size
    assert len(sizes) == 1 and side * (side + 1) < sizes.pop() < side * (side + 1) + 200


@pytest.mark.parametrize("split", ["train", "tune", "test"])
def test_boxes_areas_and_masks_by_hand(root, settings, split):
    counts = []
    for coco, image_id, pixels, labels in pairs(root, split):
        annotations = coco.imgToAnns[image_id]
        counts.append(len(annotations))
        expected, together = np.zeros_like(labels), np.zeros(labels.shape, dtype=int)
        for annotation in annotations:
            mask = coco.annToMask(annotation).astype(bool)
            y, x = np.nonzero(mask)
            assert annotation["area"] == mask.sum() >= 20
            assert annotation["bbox"] == [x.min(), y.min(), x.max() - x.min() + 1, y.max() - y.min() + 1]
            assert annotation["iscrowd"] == 0
            expected[mask] = CATEGORY_IDS.index(annotation["category_id"]) + 1
            together += mask
        assert together.max() <= 1, "what is visible of one digit is not visible of another"
        assert np.array_equal(np.where(labels <= 10, labels, 0), expected)
        assert len(set(np.unique(labels)) - {*range(11)}) == 2, "two textures"
        assert labels.max() <= len(CLASSES) and 0 < (labels == 0).mean() < 0.2
    (fewest, most, mean), _ = EXPECTED[settings.image_size]
    assert fewest <= min(counts) and max(counts) <= most and np.mean(counts) > mean
    assert len(counts) == getattr(settings, split)


def test_masks_lie_on_the_digits(root, settings):
    """Inside a stroke the pixels have the digit's level, with noise of 8 grey levels: half of them spread by 8."""
    levels = []
    for coco, image_id, pixels, _ in pairs(root, "train"):
        for annotation in coco.imgToAnns[image_id]:
            inside = pixels[binary_erosion(coco.annToMask(annotation), iterations=3)].astype(float)
            if len(inside) >= 30:
                assert np.percentile(inside, 75) - np.percentile(inside, 25) < 2 * 8
                levels.append(np.median(inside) / 127.5)
    _, (darkest, brightest) = EXPECTED[settings.image_size]
    assert len(levels) > 40 and darkest - 0.05 < min(levels) < darkest + 0.2
    assert brightest - 0.2 < max(levels) <= brightest


def test_calm_digits_lie_inside_and_hardly_on_one_another():
    """A box covers at most 15 % of what can be seen of a digit, and pixels of anti-aliasing."""
    scans, targets = load_scans()
    lost = 0
    for seed in range(40):
        _, instances, _ = scenes.draw_image(np.random.default_rng(seed), scans, targets, CALM)
        corners = [(*np.argwhere(mask).min(axis=0), *np.argwhere(mask).max(axis=0) + 1) for _, mask in instances]
        for (top, left, bottom, right), (above, before, below, behind) in itertools.combinations(corners, 2):
            both = max(min(bottom, below) - max(top, above), 0) * max(min(right, behind) - max(left, before), 0)
            smaller = min((bottom - top) * (right - left), (below - above) * (behind - before))
            assert both <= 0.15 * smaller * 1.25
        lost += len(instances) < 3
    assert lost < 10, "for some there is no room"


def test_what_shows_too_little_to_be_annotated_is_unlabelled():
    scans, targets = load_scans()
    for seed in range(60):  # small images, in which much is hidden
        _, instances, labels = scenes.draw_image(
            np.random.default_rng(seed), scans, targets, ScenesSettings(image_size=128)
        )
        digits = np.zeros_like(labels)
        for digit, mask in instances:
            assert mask.sum() >= 20
            digits[mask] = digit + 1
        assert np.array_equal(np.where(labels <= 10, labels, 0), digits)


def test_ids(root):
    splits = [COCO(root / f"coco/annotations/instances_{split}2017.json") for split in ("train", "tune", "test")]
    annotations = [number for of in splits for number in of.anns]
    assert sorted(number for of in splits for number in of.imgs) == list(range(1, 39))
    assert len(set(annotations)) == len(annotations) and min(annotations) > 0
    named = dict(zip(CATEGORY_IDS, (f"digit {digit}" for digit in range(10))))
    assert all({number: row["name"] for number, row in of.cats.items()} == named for of in splits)
    assert sorted(named) == list(CATEGORY_IDS) != list(range(1, 11))


def test_each_split_shows_the_digits_that_pretraining_has_there(tmp_path, monkeypatch):
    write_digits(tmp_path / "digits", DigitsSettings(image_size=8))  # as small as the scans
    seen, draw = [], scenes.draw_image

    def note(rng, scans, targets, settings):
        seen.append(sorted((int(digit), scan.tobytes()) for digit, scan in zip(targets, scans)))
        return draw(rng, scans, targets, settings)

    monkeypatch.setattr(scenes, "draw_image", note)
    write_scenes(tmp_path / "scenes", ScenesSettings(train=1, tune=1, test=1, seed=7))
    for split, used in zip(("train", "tune", "test"), seen, strict=True):
        files = sorted((tmp_path / "digits" / split).rglob("*.png"))
        assert used == sorted((int(path.parent.name[-1]), read(path).tobytes()) for path in files)
