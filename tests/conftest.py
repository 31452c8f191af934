"""Fixtures and helpers for the tests of all folders."""

import hashlib
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def keep_determinism():
    """Restore PyTorch's settings of determinism after each test, because a training in this process changes them."""
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, tuned = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(asked, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, tuned


def run_main() -> int:
    """Run `repro` with the arguments in sys.argv in this process, and return its exit code."""
    from repro.cli import main

    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


class CommandLine:
    """The command line, run in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Run `repro ARGS` and return (exit code, stdout, stderr)."""
        self._monkeypatch.setattr(sys, "argv", ["repro", *args])
        self._capsys.readouterr()
        return run_main(), *self._capsys.readouterr()

    def run(self, *args: str, silent: bool = False) -> str:
        """Run `repro ARGS`, which must succeed, and return its output; if `silent`, stderr must be empty."""
        code, out, err = self(*args)
        assert code == 0 and not (silent and err), err
        return out

    def refuse(self, *args: str, code: int = 2) -> str:
        """Run `repro ARGS`, which must end with this exit code and one line of error, and return the line."""
        ended, out, err = self(*args)
        assert ended == code and err.startswith("repro: ") and err.count("\n") == 1, err or out
        return err


@pytest.fixture
def repro_cli(monkeypatch, capsys) -> CommandLine:
    """Return the command line: `repro_cli("pretrain", "--cell", "nano")`, or its methods `.run` and `.refuse`."""
    return CommandLine(monkeypatch, capsys)


def run_python(*args: str, cwd: Path | str = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in a new process with changes to the environment, and capture its output as text."""
    command = [sys.executable, *args]
    changed = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=cwd, env=changed, capture_output=True, text=True, timeout=1800)


def link_code(root: Path) -> None:
    """Link this project's code and profiles into a work tree."""
    for name in ("kernels", "repro", "stages", "profiles"):
        (root / name).symlink_to(ROOT / name)


@pytest.fixture
def bare_checkout(tmp_path, monkeypatch):
    """Make a work tree with this code and neither stages nor data, and enter it."""
    link_code(tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text("runtime: {data_roots: {}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


class Python2Pickler(pickle._Pickler):
    """A pickler that writes text and bytes as Python 2's strings, like the files of CIFAR-10 and CIFAR-100."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text):
        content = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string


@pytest.fixture
def cifar_files(tmp_path, monkeypatch):
    """Write small files of CIFAR-10 and CIFAR-100 with two classes, and set torchvision's MD5 sums to theirs.

    Training image i has class i % 2 and the grey value i; test image i has class i % 2 and the grey value 255 - i.
    """
    from torchvision.datasets import CIFAR10, CIFAR100

    source = tmp_path / "downloads"
    names = {"label_names": ["apple", "fish"], "num_cases_per_batch": 6, "num_vis": 3072}
    fine = {"fine_label_names": ["apple", "fish"], "coarse_label_names": ["fruit", "animal"]}
    both = {
        CIFAR10: (names, {"data_batch_1": np.arange(6), "data_batch_2": np.arange(6, 12)}, "test_batch", "labels"),
        CIFAR100: (fine, {"train": np.arange(12)}, "test", "fine_labels"),
    }
    for reader, (meta, batches, last, key) in both.items():
        folder = source / reader.base_folder
        folder.mkdir(parents=True)
        contents = {reader.meta["filename"]: meta}
        for name, greys in (batches | {last: 255 - np.arange(4)}).items():
            contents[name] = {
                "filenames": [f"{grey}.png" for grey in greys.tolist()],
                "batch_label": f"{name} 1 of 1",
                key: (np.arange(len(greys)) % 2).tolist(),
                "data": np.repeat(greys.astype(np.uint8)[:, None], 3 * 32 * 32, axis=1),
            }
        sums = {}
        for name, content in contents.items():
            with open(folder / name, "wb") as stream:
                Python2Pickler(stream, protocol=2).dump(content)
            sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
        monkeypatch.setattr(reader, "train_list", [[name, sums[name]] for name in batches])
        monkeypatch.setattr(reader, "test_list", [[last, sums[last]]])
        monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": sums[reader.meta["filename"]]})
    return source
