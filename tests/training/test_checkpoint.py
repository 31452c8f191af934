"""Training state on disk: damage is noticed wherever it is, and a disk that is full leaves the earlier state."""

import random
import subprocess
import sys

import pytest
import torch

from repro.core.errors import UserError
from repro.training.checkpoint import Checkpointer
from tests.conftest import ROOT


def test_one_flipped_byte_anywhere_is_noticed(tmp_path):
    """100 positions: the damaged newest state is never loaded, the one before is."""
    checkpointer = Checkpointer(tmp_path, lambda line: None)
    for step in (1, 2):
        checkpointer.save(step, {"run": {"step": step}, "x": torch.full((50,), float(step))})
    newest = max(tmp_path.iterdir())
    content = newest.read_bytes()
    random_ = random.Random(0)
    for position in random_.sample(range(len(content)), 100):
        flipped = bytearray(content)
        flipped[position] ^= 1 << random_.randrange(8)
        newest.write_bytes(flipped)
        assert checkpointer.restore()["run"]["step"] == 1, position
        assert not newest.exists()
    newest.write_bytes(content)
    assert checkpointer.restore()["run"]["step"] == 2


def test_both_damaged_is_an_error(tmp_path):
    checkpointer = Checkpointer(tmp_path, lambda line: None)
    for step in (1, 2):
        checkpointer.save(step, {"step": step})
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="no undamaged training state among 2 files"):
        checkpointer.restore()


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from repro.training.checkpoint import Checkpointer
checkpointer = Checkpointer(Path(sys.argv[1]))
checkpointer.save(1, {"x": torch.zeros(10)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
checkpointer.save(2, {"x": torch.zeros(100_000)})
"""


def test_a_full_disk_leaves_the_earlier_state(tmp_path):
    """A file may not grow beyond 20 kB, as on a full disk: one line, the old state loads, nothing is left over."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    words = "RunError", "the state after step 2 cannot be written", "the state after step 1 is intact"
    assert all(word in last for word in words)
    assert Checkpointer(tmp_path, lambda line: None).restore()["x"].shape == (10,)
    assert len(list(tmp_path.iterdir())) == 1
