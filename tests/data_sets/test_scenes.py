"""scenes against pycocotools, mmseg and counts by hand."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from scipy.ndimage import binary_erosion

from repro.core.errors import UserError
from repro.data.embedded import scenes
from repro.data.embedded.digits import load_scans, write_digits
from repro.data.embedded.scenes import CATEGORY_IDS, CLASSES, write_scenes
from repro.data.settings import DigitsSettings, ScenesSettings

SMALL = ScenesSettings(train=24, tune=4, test=10)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, SMALL)
    return folder


def content(root: Path) -> dict[str, str]:
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


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


def test_files_depend_on_the_settings_alone(root, tmp_path):
    write_scenes(tmp_path / "again", ScenesSettings(train=5, tune=1, test=2, seed=1))
    write_scenes(tmp_path / "again", SMALL)  # over another tree
    assert content(tmp_path / "again") == content(root)
    write_scenes(tmp_path / "more", ScenesSettings(train=25, tune=4, test=10))
    first = "coco/train2017/000000000001.png"
    assert content(tmp_path / "more")[first] == content(root)[first]
    write_scenes(tmp_path / "other", ScenesSettings(train=24, tune=4, test=10, seed=1))
    assert content(tmp_path / "other")[first] != content(root)[first]
    assert sorted(os.listdir(tmp_path)) == ["again", "more", "other"]


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"did not write; remove them or set runtime\.data_roots\.scenes"):
        write_scenes(tmp_path, SMALL)


def test_sizes_do_not_depend_on_a_compressor(root):
    """An uncompressed PNG of 256 rows of 256 grey levels has 65,792 bytes of pixels, and little else."""
    sizes = {path.stat().st_size for path in root.rglob("*.png")}
    assert len(sizes) == 1 and 256 * 257 < sizes.pop() < 256 * 257 + 200


@pytest.mark.parametrize("split", ["train", "tune", "test"])
def test_boxes_areas_and_masks_by_hand(root, split):
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
    assert len(counts) == getattr(SMALL, split) and min(counts) >= 2 and max(counts) <= 8 and np.mean(counts) > 4


def test_masks_lie_on_the_digits(root):
    """Inside a stroke the pixels have the digit's level, 1.4 to 2.0 times mid-grey, with noise of 8 levels: that of half of them spreads by 8."""
    levels = []
    for coco, image_id, pixels, _ in pairs(root, "train"):
        for annotation in coco.imgToAnns[image_id]:
            inside = pixels[binary_erosion(coco.annToMask(annotation), iterations=3)].astype(float)
            if len(inside) >= 30:
                assert np.percentile(inside, 75) - np.percentile(inside, 25) < 2 * 8
                levels.append(np.median(inside) / 127.5)
    assert len(levels) > 40 and 1.35 < min(levels) < 1.6 and 1.8 < max(levels) <= 2


def test_what_shows_too_little_to_be_annotated_is_unlabelled():
    scans, targets = load_scans()
    for seed in range(60):  # small images, in which much is hidden
        _, instances, labels = scenes.draw(np.random.default_rng(seed), scans, targets, 128)
        digits = np.zeros_like(labels)
        for digit, mask in instances:
            assert mask.sum() >= 20
            digits[mask] = digit + 1
        assert np.array_equal(np.where(labels <= 10, labels, 0), digits)


def test_ids(root):
    train, *held_out = (COCO(root / f"coco/annotations/instances_{split}2017.json") for split in ("train", "tune", "test"))
    images, annotations = ([number for of in (train, *held_out) for number in ids(of)] for ids in (lambda of: of.imgs, lambda of: of.anns))
    assert sorted(images) == list(range(1, 39)) and len(set(annotations)) == len(annotations) and min(annotations) > 0
    assert all(sorted(of.cats) == list(CATEGORY_IDS) != list(range(1, 11)) for of in (train, *held_out))
    assert [train.cats[category_id]["name"] for category_id in CATEGORY_IDS] == [f"digit {digit}" for digit in range(10)]


def test_each_split_shows_the_digits_that_pretraining_has_there(tmp_path, monkeypatch):
    write_digits(tmp_path / "digits", DigitsSettings(image_size=8))  # as small as the scans
    seen, draw = [], scenes.draw

    def note(rng, scans, targets, size):
        seen.append(sorted((int(digit), scan.tobytes()) for digit, scan in zip(targets, scans)))
        return draw(rng, scans, targets, size)

    monkeypatch.setattr(scenes, "draw", note)
    write_scenes(tmp_path / "scenes", ScenesSettings(train=1, tune=1, test=1, seed=7))
    for split, used in zip(("train", "tune", "test"), seen, strict=True):
        files = sorted((tmp_path / "digits" / split).rglob("*.png"))
        assert used == sorted((int(path.parent.name[-1]), read(path).tobytes()) for path in files)


def test_mmseg_reads_it_as_ade20k(root):
    from mmseg.datasets import ADE20KDataset
    from mmseg.utils import register_all_modules

    register_all_modules()
    dataset = ADE20KDataset(
        img_suffix=".png",
        data_root=str(root / "ade20k"),
        data_prefix={"img_path": "images/testing", "seg_map_path": "annotations/testing"},
        pipeline=[{"type": "LoadImageFromFile"}, {"type": "LoadAnnotations"}],
    )
    assert len(dataset) == SMALL.test
    for sample, (_, _, pixels, labels) in zip((dataset[i] for i in range(len(dataset))), pairs(root, "test"), strict=True):
        assert np.array_equal(sample["img"], np.repeat(pixels[..., None], 3, axis=2))
        assert np.array_equal(sample["gt_seg_map"], np.where(labels == 0, 255, labels - 1.0))
        assert labels.max() <= len(CLASSES) and 0 < (labels == 0).mean() < 0.2
