"""A folder of one's own pictures, from files as cameras and programs write them to the batches of training."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.cells import open_cell
from repro.data.classification import ImageFolder, eval_transform, train_transform
from repro.data.kinds import PrepareData
from repro.data.loader import EvalLoader, TrainLoader
from repro.data.prepare import prepare
from repro.data.settings import TransformSettings

RAMP = np.add.outer(np.arange(24), 8 * np.arange(16)).astype(np.uint8)  # 24 high, 16 wide, brighter to the right
COLOUR = np.dstack([RAMP, RAMP[::-1], RAMP[:, ::-1]])


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three classes with every sort of picture in train, and one picture each in val."""
    root = tmp_path / "pets"
    for name in ("cat", "dog", "guinea pig"):
        folder = root / "train" / name
        folder.mkdir(parents=True)
        Image.fromarray(COLOUR).save(folder / "colour.jpg", quality=100)
        Image.fromarray(COLOUR).save(folder / "colour.png")
        Image.fromarray(RAMP).save(folder / "grey.JPG", quality=100)
        Image.fromarray(RAMP.astype(np.uint16) << 8).save(folder / "deep.png")
        Image.fromarray(COLOUR).quantize(64).save(folder / "palette.png")
        Image.fromarray(np.dstack([COLOUR, RAMP])).save(folder / "transparent.png")
        Image.fromarray(COLOUR).convert("CMYK").save(folder / "print.jpeg", quality=100)
        for orientation in (3, 6, 8):
            exif = Image.Exif()
            exif[0x0112] = orientation
            Image.fromarray(RAMP).save(folder / f"phone_{orientation}.jpg", exif=exif, quality=100)
        (root / "val" / name).mkdir(parents=True)
        shutil.copy(folder / "colour.png", root / "val" / name)
    return root


def prepared(tmp_path: Path, cells: dict[str, Path]):
    paths, runtime = Paths(tmp_path), Runtime(data_roots={name: str(root) for name, root in cells.items()})
    for name in cells:
        prepare(build(PrepareData, {"kind": "folder"}, f"prepare_data.{name}"), paths, runtime, name)
    return [open_cell(paths, runtime, name) for name in cells]


def test_every_sort_of_picture_is_read_as_opencv_reads_it(pets, tmp_path):
    (cell,) = prepared(tmp_path, {"pets": pets})
    tree = cell.open_tree()
    dataset = ImageFolder(tree, "train", lambda image: torch.from_numpy(np.array(image)))
    assert tree.classes == ("cat", "dog", "guinea pig") and len(dataset) == 30
    shapes = set()
    for index in range(10):
        path = tree.path("train", index)
        ours, target = dataset[(0, index)]
        theirs = cv2.imread(str(path), cv2.IMREAD_COLOR)[..., ::-1]
        assert target == 0 and tuple(ours.shape) == theirs.shape, path.name
        # decoders of JPEG round differently, and convert CMYK without a colour profile differently
        limit = {"print.jpeg": 12}.get(path.name, 2 if path.suffix.lower() == ".jpg" else 0)
        assert np.abs(ours.numpy().astype(int) - theirs).max() <= limit, path.name
        shapes.add(theirs.shape)
    assert shapes == {(24, 16, 3), (16, 24, 3)}, "two pictures are turned by 90 degrees"


def test_batches_of_training_and_of_evaluation(pets, tmp_path):
    (cell,) = prepared(tmp_path, {"pets": pets})
    tree, settings = cell.open_tree(), TransformSettings(image_size=16)
    assert cell.groups(tree) is None
    train = TrainLoader(ImageFolder(tree, "train", train_transform(settings)), batch_size=10, seed=0)
    seen = [(tuple(images.shape), images.dtype, targets.tolist()) for images, targets in train.batches(0)]
    assert [row[:2] for row in seen] == [((10, 3, 16, 16), torch.uint8)] * 3
    assert sorted(target for _, _, targets in seen for target in targets) == [0] * 10 + [1] * 10 + [2] * 10
    ((_, targets),) = EvalLoader(ImageFolder(tree, "val", eval_transform(settings)), batch_size=4)
    assert targets.tolist() == [0, 1, 2]


def test_the_manifest_takes_the_folder_as_it_is(pets, tmp_path):
    (cell,) = prepared(tmp_path, {"pets": pets})
    manifest = cell.manifest
    assert (manifest.kind, manifest.departures, manifest.generated) == ("folder", (), None)
    assert manifest.classes == {"cat": 0, "dog": 1, "guinea pig": 2}
    assert [split.images for split in manifest.splits.values()] == [30, 3]
    (pets / "train/dog/colour.png").unlink()
    with pytest.raises(UserError, match="train/dog: 9 images, the manifest has 10 .*run `repro prepare-data` to"):
        cell.open_tree()


def test_each_cell_may_have_a_root_of_its_own(pets, tmp_path):
    birds = tmp_path / "birds"
    for split in ("train", "val"):
        for name in ("owl", "wren"):
            (birds / split / name).mkdir(parents=True)
            Image.fromarray(COLOUR).save(birds / split / name / "1.png")
    first, second = prepared(tmp_path, {"pets": pets, "birds": birds})
    assert (first.root, second.root) == (pets, birds) and second.open_tree().classes == ("owl", "wren")


def test_the_root_of_the_kind_serves_where_the_cell_has_none(pets, tmp_path):
    runtime = Runtime(data_roots={"folder": str(pets)})
    prepare(build(PrepareData, {"kind": "folder"}, "x"), Paths(tmp_path), runtime, "pets")
    assert open_cell(Paths(tmp_path), runtime, "pets").root == pets
    with pytest.raises(UserError, match=r"runtime\.data_roots: has neither pets nor folder; .*did you mean 'pet'"):
        open_cell(Paths(tmp_path), Runtime(data_roots={"pet": str(pets)}), "pets")
