"""A small checkout to run stages in: this project's code, small images, short runs."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.stages.helpers import prepare_cell, train_nano

PARAMS = """
runtime: {workers: 0, save_every_steps: 3, log_every_steps: 5, data_roots: {digits: data/digits, imagenet: data/imagenet}}
prepare_data:
  digits:
    kind: digits
    expected: {classes: 10, train: 1079, tune: 359, test: 359}
    generate: {image_size: 32, tune_fraction: 0.2, test_fraction: 0.2, seed: 0}
  imagenet:
    kind: imagenet
    expected: {classes: 1000, train: 1281167, val: 50000}
pretrain:
  nano:
    model: vittt_nano_patch16_144
    options: {depth: 1}
    data: digits
    seeds: [0]
    epochs: 2
    batch_size: 128
    drop_path: 0.1
    snapshot_epochs: [0, 2]
    optim: {lr: 0.003, lr_batch_size: 128, warmup_epochs: 0}
    mix: {mixup: 0.8, cutmix: 1.0, label_smoothing: 0.1}
    transform: {image_size: 32, hflip: 0.0, crop_pct: 1.0, re_prob: 0.25}
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A checkout whose data set is written and whose cell `nano` is not trained; do not change it, copy it.

    A module may put its own in its place.
    """
    root = tmp_path_factory.mktemp("prepared")
    (root / "params.yaml").write_text(PARAMS)
    (root / "dvc.yaml").write_text("stages: {}\n")
    for package in ("repro", "kernels", "stages", "profiles"):
        (root / package).symlink_to(ROOT / package)
    prepare_cell(root, "digits")
    return root


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> Callable[[str], Path]:
    """`trained("pretrain")` -> a checkout whose cell `nano` of this stage was trained without interruption."""
    root = tmp_path_factory.mktemp("trained") / "checkout"
    shutil.copytree(prepared, root, symlinks=True)

    @functools.cache
    def train(stage: str) -> Path:
        train_nano(root, stage)
        return root

    return train


@pytest.fixture
def checkout(prepared, tmp_path, monkeypatch) -> Path:
    """A checkout of one's own, as the working directory."""
    root = tmp_path / "checkout"
    shutil.copytree(prepared, root, symlinks=True)
    monkeypatch.chdir(root)
    return root
