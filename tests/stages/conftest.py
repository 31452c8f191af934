"""A small checkout to run stages in: this project's code, small images, short runs."""

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import link_code, run_main
from tests.stages.helpers import PARAMS, prepare_cell


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A checkout whose data set is written and whose cell `nano` is not trained; do not change it, copy it.

    A module may put its own in its place.
    """
    root = tmp_path_factory.mktemp("prepared")
    (root / "params.yaml").write_text(PARAMS)
    (root / "dvc.yaml").write_text("stages: {}\n")
    link_code(root)
    prepare_cell(root, "digits")
    return root


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> Callable[[str], Path]:
    """`trained("pretrain")` -> a checkout whose cell `nano` of this stage was trained without interruption."""
    root = tmp_path_factory.mktemp("trained") / "checkout"
    shutil.copytree(prepared, root, symlinks=True)

    @functools.cache
    def train(stage: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(root)
            patch.setattr(sys, "argv", ["repro", stage, "--cell", "nano"])
            assert run_main() == 0
        return root

    return train


@pytest.fixture
def checkout(prepared, tmp_path, monkeypatch) -> Path:
    """A checkout of one's own, as the working directory."""
    root = tmp_path / "checkout"
    shutil.copytree(prepared, root, symlinks=True)
    monkeypatch.chdir(root)
    return root
