"""Tests that need a CUDA GPU, `make test-gpu`: a small checkout with a cell for every nano model and precision."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT

DEVICE = "cuda"  # `cpu` shows how far these tests come without a GPU
PRECISIONS = ("fp16", "bf16")
SIDE = 80  # pixels: 5 × 5 tokens, which are no multiple of a chunk


def nano_models() -> list[str]:
    """The smallest model of each family of this project."""
    import timm

    import repro.models

    names = [
        name
        for name in timm.list_models("*nano*")
        if timm.model_entrypoint(name).__module__.startswith(repro.models.__name__)
    ]
    assert len(names) >= 6, names
    return names


def pytest_generate_tests(metafunc):
    if "model" in metafunc.fixturenames:
        metafunc.parametrize("model", nano_models())


def pytest_collection_modifyitems(items):
    """The hook sees the items of the whole run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def device():
    """The device; without one the test is skipped."""
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA GPU")
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A checkout with the digits and a cell `<model>_<precision>` for each nano model; do not train in it, copy it."""
    pytest.importorskip("pydantic", reason="cells are read by pydantic, which is not installed")
    from repro.core.config import load_section
    from repro.core.paths import Paths
    from repro.core.runtime import load_runtime
    from repro.data.kinds import PrepareData
    from repro.data.prepare import prepare

    def cell(model: str, precision: str) -> dict:
        lengths = {"seeds": [0], "epochs": 1, "batch_size": 128, "drop_path": 0.0, "snapshot_epochs": []}
        made = {"model": model, "data": "digits", "precision": precision, **lengths}
        made["optim"] = {"lr": 0.001, "lr_batch_size": 128, "warmup_epochs": 0}
        made["mix"] = {"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.1}
        return made | {"transform": {"image_size": SIDE, "hflip": 0.0, "crop_pct": 1.0}}

    data = {"kind": "digits", "expected": {"classes": 10, "train": 1079, "tune": 359, "test": 359}}
    data["generate"] = {"image_size": SIDE, "tune_fraction": 0.2, "test_fraction": 0.2, "seed": 0}
    pairs = [(model, precision) for model in nano_models() for precision in PRECISIONS]
    params = {"runtime": {"device": DEVICE, "data_roots": {"digits": "data/digits"}, "log_every_steps": 1}}
    params["prepare_data"] = {"digits": data}
    params["pretrain"] = {"_".join(pair): cell(*pair) for pair in pairs}
    root = tmp_path_factory.mktemp("prepared")
    (root / "params.yaml").write_text(json.dumps(params))  # JSON is YAML
    (root / "dvc.yaml").write_text("stages: {}\n")
    for package in ("repro", "kernels", "stages"):
        (root / package).symlink_to(ROOT / package)
    paths = Paths(root)
    prepare(load_section(PrepareData, paths.params, "prepare_data", "digits"), paths, load_runtime(paths), "digits")
    return root


@pytest.fixture
def checkout(prepared, tmp_path, monkeypatch) -> Path:
    """A checkout of one's own, as the working directory, with the data that all share."""
    for item in prepared.iterdir():
        if item.name != "results":
            (tmp_path / item.name).symlink_to(item)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "prepare_data").symlink_to(prepared / "results" / "prepare_data")
    monkeypatch.chdir(tmp_path)
    return tmp_path
