"""Data sets as `repro prepare-data` prepares and opens them, also those that are written from published files."""

import functools
import hashlib
import http.server
import pickle
import platform
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision.datasets import CIFAR100

from repro.core.config import build
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths
from repro.core.record import read_json
from repro.core.runtime import Runtime
from repro.data.cells import open_cell
from repro.data.check.run import run_check
from repro.data.classification import ImageFolder
from repro.data.embedded import cifar
from repro.data.imagenet100 import WNIDS
from repro.data.kinds import KINDS, PrepareData, list_wnids
from repro.data.manifest import read_manifest
from repro.data.prepare import prepare
from stages import environment
from tests.conftest import ROOT, run_python
from tests.data_sets.conftest import FULL

DIGITS = {"kind": "digits", "expected": {"classes": 10, "train": 1079, "tune": 359, "test": 359}}
DIGITS["generate"] = {"image_size": 16}
COUNTS = {"train": 6, "tune": 2, "test": 3}
SCENES = {"kind": "scenes", "expected": {"classes": 13, **COUNTS}, "draw": COUNTS}
CONNECT = {"kind": "connect", "expected": {"classes": 2, "train": 12, "tune": 4, "test": 8}}
CONNECT["curves"] = {"image_size": 96, "train_pairs": 6, "tune_pairs": 2, "test_pairs": 4, "dashes": [1, 2]}
CIFAR = {"kind": "cifar100", "expected": {"classes": 2, "train": 8, "tune": 4, "test": 4}}
CIFAR["tune_split"] = {"images_per_class": 2, "seed": 0}
CIFAR10 = CIFAR | {"kind": "cifar10"}
CIFARS = [pytest.param(cell, id=cell["kind"]) for cell in (CIFAR10, CIFAR)]
IMAGENET = {"kind": "imagenet100", "expected": {"classes": 100, "train": 200, "tune": 100, "test": 100}}
IMAGENET["tune_split"] = {"images_per_class": 1, "seed": 0}
CELLS = [pytest.param(cell, id=cell["kind"]) for cell in (DIGITS, SCENES, CONNECT, CIFAR10, CIFAR, IMAGENET)]


def runtime_of(roots: dict[str, Path]) -> Runtime:
    return Runtime(data_roots={"small": "written", **{key: str(root) for key, root in roots.items()}})


def prepared(tmp_path: Path, content: dict, **roots: Path):
    """The cell `small` of these params, prepared at tmp_path/written."""
    prepare(build(PrepareData, content, "prepare_data.small"), Paths(tmp_path), runtime_of(roots), "small")
    return open_cell(Paths(tmp_path), runtime_of(roots), "small")


@pytest.fixture
def roots(request, cell) -> dict[str, Path]:
    """The files that a cell's set is written from, as `prepared` takes them."""
    return request.getfixturevalue("published_files") if KINDS[cell["kind"]].source else {}


@pytest.mark.parametrize("cell", CELLS)
def test_a_set_is_prepared_twice_with_the_same_bytes_and_written_again_when_opened(tmp_path, cell, roots):
    contents, folder = [], tmp_path / "results/prepare_data/small"
    for _ in range(2):
        prepared(tmp_path, cell, **roots)
        contents.append([(folder / name).read_bytes() for name in ("manifest.json", "metrics.json")])
    assert contents[0] == contents[1] and str(tmp_path).encode() not in contents[0][0]
    metrics, manifest = read_json(folder / "metrics.json")["metrics"], read_manifest(folder / "manifest.json")
    counts = {name.removesuffix("_images"): metrics[name] for name in metrics if name.endswith(("classes", "_images"))}
    assert counts == cell["expected"] and metrics["departures"] == len(manifest.departures)
    assert manifest.generated == build(PrepareData, cell, "x").settings and len(manifest.classes) == counts["classes"]
    shutil.rmtree(tmp_path / "written")
    found = open_cell(Paths(tmp_path), runtime_of(roots), "small")
    if cell is SCENES:
        assert found.open_instances("train").folder == tmp_path / "written/coco/train2017"
        assert len(found.open_instances("train").names) == 6 and len(found.open_pairs("test")) == 3
    else:
        tree = found.open_tree()
        assert tree.classes == tuple(manifest.classes) and len(tree.splits["train"].names) == counts["train"]


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
        (DIGITS, {"generate": {"tune_fraction": 0.5, "test_fraction": 0.45}}, r"generate\.test_fraction: 0\.45"),
        (DIGITS, {"expected": None}, "expected: missing"),
        (DIGITS, {"expected": DIGITS["expected"] | {"train": 0}}, r"expected\.train: .* 1, got int 0"),
    ],
)
def test_bad_params(cell, changes, message):
    with pytest.raises(UserError, match=message):
        build(PrepareData, {**cell, **changes}, "prepare_data.mine")


def test_environment_repeats_itself_without_torch(tmp_path, monkeypatch):
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    code = "import sys; from stages import environment; environment.command(); sys.exit('torch' in sys.modules)"
    assert run_python("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).returncode == 0
    path = tmp_path / "results/environment/metrics.json"
    first = path.read_bytes()
    environment.command()
    assert path.read_bytes() == first
    record = read_json(path)
    assert record["identity"]["versions"]["python"] == platform.python_version()
    assert record["metrics"]["cores"] >= record["metrics"]["usable_cores"] >= 1
    assert sorted(p.name for p in tmp_path.rglob("*.json")) == ["metrics.json"], "run.json holds a date and a host"


def read_greys(tree, split: str) -> dict[int, int]:
    """Grey value -> class of the images of a split."""
    dataset = ImageFolder(tree, split, lambda image: torch.from_numpy(np.array(image)))
    found = {}
    for index in range(len(dataset)):
        pixels, target = dataset[(0, index)]
        assert tuple(pixels.shape) == (32, 32, 3) and len(pixels.unique()) == 1
        found[int(pixels[0, 0, 0])] = target
    return found


@pytest.mark.parametrize("cell", CIFARS)
def test_a_cifar_has_every_image_once_with_its_class(tmp_path, cifar_files, cell):
    tree = prepared(tmp_path, cell, torchvision=cifar_files).open_tree()
    assert tree.classes == ("apple", "fish")
    train, tune, test = (read_greys(tree, split) for split in ("train", "tune", "test"))
    assert test == {255 - i: i % 2 for i in range(4)}
    assert train | tune == {i: i % 2 for i in range(12)}
    assert sorted(tune.values()) == [0, 0, 1, 1] and len(train) == 8


def test_rows_and_columns_of_cifar100_are_not_mixed_up(tmp_path, cifar_files, monkeypatch):
    """A file holds the red plane, then the green, then the blue, each row by row."""
    pixels = np.zeros((12, 3, 32, 32), dtype=np.uint8)
    pixels[:, 1, 5, 20] = 200
    train = cifar_files / "cifar-100-python" / "train"
    content = pickle.loads(train.read_bytes(), encoding="latin1") | {"data": pixels.reshape(12, -1)}
    train.write_bytes(pickle.dumps(content, protocol=2))
    monkeypatch.setattr(CIFAR100, "train_list", [["train", None]])
    tree = prepared(tmp_path, CIFAR, torchvision=cifar_files).open_tree()
    image = np.array(Image.open(tree.path("train", 0)))
    assert np.argwhere(image).tolist() == [[5, 20, 1]] and image[5, 20, 1] == 200


@pytest.mark.parametrize(
    ("cell", "file"),
    [
        (CIFAR, "cifar-100-python/train"),
        (CIFAR, "cifar-100-python/meta"),
        (CIFAR10, "cifar-10-batches-py/data_batch_2"),
        (CIFAR10, "cifar-10-batches-py/test_batch"),
    ],
)
def test_a_foreign_file_is_refused_before_it_is_unpickled(tmp_path, cifar_files, cell, file):
    trace = tmp_path / "trace"
    # unpickling it calls os.mkdir(trace)
    (cifar_files / file).write_text(f"cos\nmkdir\n(V{trace}\ntR.")
    with pytest.raises(UserError, match=rf"{Path(file).parent}: is not the published {cell['kind'].upper()} ") as error:
        prepared(tmp_path, cell, torchvision=cifar_files)
    assert not trace.exists() and not (tmp_path / "written").exists() and "\n" not in str(error.value)


def test_missing_sets_are_one_line(tmp_path, cifar_files, imagenet_folder):
    with pytest.raises(UserError, match=r"nowhere/cifar-100-python: no such folder; .*--download"):
        prepared(tmp_path, CIFAR, torchvision=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"nowhere: no such folder; .*docs/data\.md"):
        prepared(tmp_path, IMAGENET, imagenet=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"runtime\.data_roots\.torchvision: missing"):
        prepared(tmp_path, CIFAR)
    for split in ("train", "val"):
        shutil.rmtree(imagenet_folder / split / "n02869837")
    with pytest.raises(UserError, match=r"lacks 1 of the classes of ImageNet-100, .*n02869837"):
        prepared(tmp_path, IMAGENET, imagenet=imagenet_folder)
    assert not (tmp_path / "written").exists()


def test_imagenet100_links_its_classes_alone(tmp_path, imagenet_folder):
    tree = prepared(tmp_path, IMAGENET, imagenet=imagenet_folder).open_tree()
    assert len(tree.classes) == 100 and set(tree.classes) <= set(list_wnids())
    seen = set()
    for split, whole in (("train", "train"), ("tune", "train"), ("test", "val")):
        files = tree.splits[split]
        for index, target in enumerate(files.targets.tolist()):
            path = tree.path(split, index)
            original = path.resolve()
            assert path.is_symlink() and original.parent == imagenet_folder / whole / tree.classes[target]
            seen.add(original)
        assert np.bincount(files.targets).tolist() == [{"train": 2}.get(split, 1)] * 100
    assert len(seen) == 400, "no image is in two splits"


def test_images_in_archives_are_copied(tmp_path, imagenet_folder):
    for folder in sorted(imagenet_folder.glob("*/*")):
        shutil.make_archive(str(folder), "tar", folder.parent, folder.name)
        shutil.rmtree(folder)
    tree = prepared(tmp_path, IMAGENET, imagenet=imagenet_folder).open_tree()
    assert Image.open(tree.path("tune", 0)).size == (4, 4) and len(tree.splits["train"].names) == 200


def test_the_check_of_imagenet100(tmp_path, imagenet_folder):
    lines = []
    root = prepared(tmp_path, IMAGENET, imagenet=imagenet_folder).root
    run_check("imagenet100", root, FULL, emit=lines.append)
    assert "no errors" in lines[-1]
    next((root / "tune" / WNIDS[0]).iterdir()).resolve().write_bytes(b"cut short")
    with pytest.raises(RunError, match="1 error"):
        run_check("imagenet100", root, FULL, emit=lines.append)


def test_download_serves_what_is_free(tmp_path, cifar_files, imagenet_folder, repro_cli, monkeypatch):
    """What is there is not fetched again; a fetch that fails, and a set that needs an account, are one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dvc.yaml").write_text("")
    roots = {"cifar100": "written", "torchvision": str(cifar_files), "imagenet": str(imagenet_folder)}
    params = {"runtime": {"data_roots": roots | {"imagenet100": "links"}}}
    params["prepare_data"] = {"cifar100": CIFAR, "imagenet100": IMAGENET}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    monkeypatch.setattr(CIFAR100, "url", (tmp_path / "nothing.tar.gz").as_uri())
    assert repro_cli("prepare-data", "--download")[0] == 0
    code, _, err = repro_cli("prepare-data", "--cell", "imagenet100", "--download")
    assert code == 2 and "serves cifar10, cifar100 alone" in err
    shutil.rmtree(cifar_files)
    code, _, err = repro_cli("prepare-data", "--cell", "cifar100", "--download")
    assert code == 2 and "could not be downloaded" in err.splitlines()[-1]


@pytest.mark.parametrize("cell", CIFARS)
def test_a_download_is_unpacked_and_its_checksums_compared(tmp_path, cifar_files, monkeypatch, cell):
    reader, download = cifar._READERS[cell["kind"]], getattr(cifar, f"download_{cell['kind']}")
    archive = Path(shutil.make_archive(str(tmp_path / "cifar"), "gztar", cifar_files, reader.base_folder))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=archive.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(reader, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
        with pytest.raises(UserError, match="could not be downloaded"):
            download(tmp_path / "new")
        monkeypatch.setattr(reader, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
        with pytest.raises(UserError, match=rf"{reader.filename}: has SHA-256 .*, expected [0-9a-f]{{64}}; get the"):
            download(tmp_path / "other")
        monkeypatch.setitem(cifar._SHA256, cell["kind"], hashlib.sha256(archive.read_bytes()).hexdigest())
        download(tmp_path / "newer")
        server.shutdown()
    assert len(prepared(tmp_path, cell, torchvision=tmp_path / "newer").open_tree().splits["train"].names) == 8
