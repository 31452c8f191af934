import platform
import subprocess
import sys
from pathlib import Path

import pytest

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.record import read_json
from repro.core.runtime import Runtime
from repro.data.cells import open_cell
from repro.data.kinds import PrepareData
from repro.data.manifest import read_manifest
from repro.data.prepare import prepare
from stages import environment

DIGITS = {
    "kind": "digits",
    "expected": {"classes": 10, "train": 1079, "tune": 359, "test": 359},
    "generate": {"image_size": 16},
}


def params(**changes):
    return build(PrepareData, {**DIGITS, **changes}, "prepare_data.digits")


def test_digits_end_to_end_and_again(tmp_path):
    paths, runtime = Paths(tmp_path), Runtime(data_roots={"digits": "data/digits"})
    folder = paths.cell("prepare_data", "digits")
    contents = []
    for _ in range(2):
        prepare(params(), paths, runtime, "digits")
        contents.append([(folder / name).read_bytes() for name in ("manifest.json", "metrics.json")])
    assert contents[0] == contents[1]
    metrics = read_json(folder / "metrics.json")["metrics"]
    assert (metrics["classes"], metrics["train_images"], metrics["tune_images"], metrics["test_images"]) == (
        10,
        1079,
        359,
        359,
    )
    assert metrics["departures"] == 0
    manifest = read_manifest(folder / "manifest.json")
    assert manifest.classes == {f"digit_{i}": i for i in range(10)}
    assert open_cell(paths, runtime, "digits").open_tree().classes == tuple(manifest.classes)


def test_counts_that_were_not_expected_write_no_manifest(tmp_path):
    wrong = params(expected={"classes": 10, "train": 1078, "tune": 360, "test": 359})
    with pytest.raises(UserError, match=r"prepare_data\.mine\.expected\.train: 1,078 expected, .* holds 1,079"):
        prepare(wrong, Paths(tmp_path), Runtime(data_roots={"digits": "data/digits"}), "mine")
    assert not (tmp_path / "results").exists()


def test_imagenet_is_prepared_where_it_lies(root, tmp_path):
    for split in ("train", "val"):
        for name, wnid in {"ant": "n01440764", "bee": "n01443537", "cat": "n15075141"}.items():
            (root / split / name).rename(root / split / wnid)
    cell = build(PrepareData, {"kind": "imagenet", "expected": {"classes": 3, "train": 20, "val": 20}}, "x")
    before = sorted(root.rglob("*"))
    prepare(cell, Paths(tmp_path), Runtime(data_roots={"imagenet": str(root)}), "subset")
    manifest = read_manifest(tmp_path / "results/prepare_data/subset/manifest.json")
    assert len(manifest.departures) == 3 and manifest.generated is None
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generate": None}, "generate: needed for kind digits"),
        ({"kind": "imagenet"}, "generate: needed for kind digits, and for no other"),
        (
            {"kind": "imagnet"},
            "is not one of digits, digits_wild, imagenet, latents, folder, connect, scenes, coco, ade20k; did you mean 'imagenet'",
        ),
        (
            {"expected": {"classes": 10, "train": 1079, "tune": 359}},
            r"expected\.test: missing; digits has train, tune, test",
        ),
        (
            {"expected": {"classes": 10, "train": 1079, "val": 359}},
            r"expected\.test: missing; digits has train, tune, test",
        ),
        ({"expected": DIGITS["expected"] | {"val": 1}}, r"expected\.val: no such split; digits has train, tune, test"),
        (
            {"generate": {"tune_fraction": 0.5, "test_fraction": 0.45}},
            r"generate: test_fraction: 0\.45 and tune_fraction 0\.5 leave less",
        ),
        ({"expected": None}, "expected: missing; say how many classes and images digits must have"),
        ({"expected": {"classes": 10, "train": 0, "tune": 1, "test": 1}}, r"expected\.train: 0 is out of range"),
    ],
)
def test_bad_params(changes, message):
    with pytest.raises(UserError, match=message):
        params(**changes)


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
