"""What tests of every folder share."""

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
    """Leave PyTorch's choice of algorithms as the test found it: a training in this process asks for repeatable ones."""
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, tuned = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(asked, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, tuned


def run_main() -> int:
    """Run `repro` with the arguments in sys.argv, in this process; its exit code."""
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
        """Exit code, stdout and stderr of `repro ARGS`."""
        self._monkeypatch.setattr(sys, "argv", ["repro", *args])
        self._capsys.readouterr()
        return run_main(), *self._capsys.readouterr()

    def run(self, *args: str, silent: bool = False) -> str:
        """What `repro ARGS` prints; it must succeed, and if it is to be `silent`, with nothing on stderr."""
        code, out, err = self(*args)
        assert code == 0 and not (silent and err), err
        return out

    def refuse(self, *args: str, code: int = 2) -> str:
        """The line of error with which `repro ARGS` ends, with this exit code."""
        ended, out, err = self(*args)
        assert ended == code and err.startswith("repro: ") and err.count("\n") == 1, err or out
        return err


@pytest.fixture
def repro_cli(monkeypatch, capsys) -> CommandLine:
    """`repro_cli("pretrain", "--cell", "nano")` -> (exit code, stdout, stderr); or `.run` or `.refuse` for one of them."""
    return CommandLine(monkeypatch, capsys)


def run_python(*args: str, cwd: Path | str = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Python in a process of its own, with changes to the environment; its output is kept as text."""
    command = [sys.executable, *args]
    changed = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=cwd, env=changed, capture_output=True, text=True, timeout=1800)


def link_code(root: Path) -> None:
    """Give a checkout this project's code and profiles."""
    for name in ("kernels", "repro", "stages", "profiles"):
        (root / name).symlink_to(ROOT / name)


@pytest.fixture
def bare_checkout(tmp_path, monkeypatch):
    """A folder with this code and neither stages nor data, as the working directory."""
    link_code(tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text("runtime: {data_roots: {}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2 wrote its strings, as the files of CIFAR-10 and CIFAR-100 have them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text):
        content = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string


@pytest.fixture
def cifar_files(tmp_path, monkeypatch):
    """A folder with the files of CIFAR-10 and CIFAR-100, two classes in each, and torchvision's MD5 sums set to theirs.

    Training image i is of class i % 2 and has the grey value i; test image i, of class i % 2, has 255 - i.
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
