import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.record import read_json
from repro.core.runtime import Runtime
from repro.data.cells import open_cell
from repro.data.classification import ImageFolder
from repro.data.kinds import PrepareData
from repro.data.manifest import read_manifest
from repro.data.prepare import prepare
from stages import environment

DIGITS = {"kind": "digits", "expected": {"classes": 10, "train": 1079, "tune": 359, "test": 359}}
DIGITS["generate"] = {"image_size": 16}
COUNTS = {"train": 6, "tune": 2, "test": 3}
SCENES = {"kind": "scenes", "expected": {"classes": 13, **COUNTS}, "draw": COUNTS}
CELLS = [pytest.param(cell, id=cell["kind"]) for cell in (DIGITS, SCENES)]


def run(folder: Path, cell: dict, name: str) -> tuple[Paths, Runtime]:
    paths, runtime = Paths(folder), Runtime(data_roots={cell["kind"]: "data/set"})
    prepare(build(PrepareData, cell, f"prepare_data.{name}"), paths, runtime, name)
    return paths, runtime


@pytest.mark.parametrize("cell", CELLS)
def test_an_embedded_set_is_prepared_twice_with_the_same_bytes_and_opened(tmp_path, cell):
    contents, folder = [], tmp_path / "results/prepare_data/mine"
    for _ in range(2):
        paths, runtime = run(tmp_path, cell, "mine")
        contents.append([(folder / name).read_bytes() for name in ("manifest.json", "metrics.json")])
    assert contents[0] == contents[1] and str(tmp_path).encode() not in contents[0][0]
    metrics, manifest = read_json(folder / "metrics.json")["metrics"], read_manifest(folder / "manifest.json")
    found = {name.removesuffix("_images"): metrics[name] for name in metrics if name.endswith(("classes", "_images"))}
    assert found == cell["expected"] and metrics["departures"] == 0
    assert manifest.generated == build(PrepareData, cell, "x").settings and len(manifest.classes) == found["classes"]
    shutil.rmtree(tmp_path / "data/set")  # opening writes it again
    prepared = open_cell(paths, runtime, "mine")
    if cell is DIGITS:
        assert prepared.open_tree().classes == tuple(f"digit_{i}" for i in range(10)) == tuple(manifest.classes)
    else:
        assert prepared.open_instances("train").folder == tmp_path / "data/set/coco/train2017"
        assert len(prepared.open_instances("train").names) == 6 and len(prepared.open_pairs("test")) == 3
        folders = "ade20k/annotations/training ade20k/images/training coco/annotations/instances_train2017.json coco/train2017"
        assert list(manifest.splits["train"].folders) == folders.split()


@pytest.mark.parametrize("cell", CELLS)
def test_counts_that_were_not_expected_write_no_manifest(tmp_path, cell):
    for name, count in cell["expected"].items():
        wrong = {**cell, "expected": cell["expected"] | {name: count - 1}}
        message = rf"prepare_data\.mine\.expected\.{name}: {count - 1:,} expected, .* holds {count:,};"
        with pytest.raises(UserError, match=message):
            run(tmp_path, wrong, "mine")
    assert not (tmp_path / "results").exists()


def test_folders_are_prepared_as_they_are_and_each_cell_may_have_a_root_of_its_own(root, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # 16 wide and 24 high, from a camera that was turned by 90 degrees
    Image.new("RGB", (16, 24)).save(root / "train/ant/000.png", exif=exif)
    birds = shutil.copytree(root, tmp_path / "birds")
    for split in ("train", "val"):
        (birds / split / "cat").rename(birds / split / "wren")
    paths, runtime = Paths(tmp_path), Runtime(data_roots={"folder": str(root), "birds": str(birds)})
    for name in ("pets", "birds"):
        prepare(build(PrepareData, {"kind": "folder"}, "x"), paths, runtime, name)
    first, second = (open_cell(paths, runtime, name) for name in ("pets", "birds"))
    assert first.root == root, "the root of the kind serves where the cell has none"
    assert second.root == birds and second.open_tree().classes == ("ant", "bee", "wren")
    manifest = first.manifest
    assert (manifest.kind, manifest.departures, manifest.generated) == ("folder", (), None)
    assert manifest.classes == {"ant": 0, "bee": 1, "cat": 2}
    assert [split.images for split in manifest.splits.values()] == [20, 20]
    pixels, _ = ImageFolder(first.open_tree(), "train", lambda image: torch.from_numpy(np.array(image)))[(0, 0)]
    assert pixels.shape == (16, 24, 3), "not turned upright"
    Image.new("L", (4, 4)).save(root / "train/bee/2.png")
    with pytest.raises(UserError, match="train/bee: 10 images, the manifest has 9 .*run `repro prepare-data` to"):
        first.open_tree()
    with pytest.raises(UserError, match=r"runtime\.data_roots: has neither pets nor folder; .*did you mean 'pet'"):
        open_cell(paths, Runtime(data_roots={"pet": str(root)}), "pets")


@pytest.mark.parametrize(
    ("cell", "changes", "message"),
    [
        (DIGITS, {"generate": None}, "generate: needed for kind digits"),
        (DIGITS, {"kind": "imagenet"}, "generate: needed for kind digits"),
        (DIGITS, {"kind": "imagnet"}, "did you mean 'imagenet'"),
        (DIGITS, {"expected": {"classes": 10, "train": 1079, "tune": 359}}, r"expected\.test: missing"),
        (DIGITS, {"expected": {"classes": 10, "train": 1079, "val": 359}}, r"expected\.test: missing"),
        (DIGITS, {"expected": DIGITS["expected"] | {"val": 1}}, r"expected\.val: no such split"),
        (DIGITS, {"generate": {"tune_fraction": 0.5, "test_fraction": 0.45}}, r"generate: test_fraction: 0\.45"),
        (DIGITS, {"expected": None}, "expected: missing"),
        (DIGITS, {"expected": DIGITS["expected"] | {"train": 0}}, r"expected\.train: 0 is out of range"),
        (SCENES, {"draw": None}, "draw: needed for kind scenes"),
        (SCENES, {"kind": "coco"}, "draw: needed for kind scenes"),
        (SCENES, {"generate": {}}, "generate: needed for kind digits"),
        (SCENES, {"draw": {"image_size": 64}}, r"draw\.image_size: 64 is out of range"),
    ],
)
def test_bad_params(cell, changes, message):
    with pytest.raises(UserError, match=message):
        build(PrepareData, {**cell, **changes}, "prepare_data.mine")


def test_environment_repeats_itself_without_torch(tmp_path, monkeypatch):
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code = "import sys; from stages import environment; environment.command(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    path = tmp_path / "results/environment/metrics.json"
    first = path.read_bytes()
    environment.command()
    assert path.read_bytes() == first
    record = read_json(path)
    assert record["identity"]["versions"]["python"] == platform.python_version()
    assert record["metrics"]["cores"] >= record["metrics"]["usable_cores"] >= 1
    assert sorted(p.name for p in tmp_path.rglob("*.json")) == ["metrics.json"], "run.json holds a date and a host"
