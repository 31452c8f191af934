"""Training state on disk: damage is noticed wherever it is, and a disk that is full leaves the earlier state."""

import random

import pytest
import torch

from repro.core.errors import RunError
from repro.training.checkpoint import Checkpointer
from tests.training.conftest import limit_files


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


def test_a_full_disk_leaves_the_earlier_state(tmp_path):
    """It is one line, the old state loads, and nothing is left over."""
    checkpointer = Checkpointer(tmp_path, lambda line: None)
    checkpointer.save(1, {"x": torch.zeros(10)})
    message = "the state after step 2 cannot be written.*the state after step 1 is intact"
    with pytest.raises(RunError, match=message) as caught, limit_files(20_000):
        checkpointer.save(2, {"x": torch.zeros(100_000)})
    assert "\n" not in str(caught.value)
    assert checkpointer.restore()["x"].shape == (10,)
    assert len(list(tmp_path.iterdir())) == 1
