"""Several gloo processes under torchrun: what they compute is what one computes, and what they agree on."""

from pathlib import Path

import pytest
import torch

from repro.core.errors import UserError
from repro.core.ranks import Ranks, joined, require_gpus
from tests.conftest import ROOT, run_python
from tests.training import program

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def start(command):
    return run_python(*command, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks found in their trainings, after they had exchanged and averaged values as they should."""
    folder = tmp_path_factory.mktemp("ranks")
    done = start([*TORCHRUN, "--nproc-per-node=2", str(Path(program.__file__)), str(folder)])
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


def test_two_ranks_compute_what_one_does(two_ranks, tmp_path):
    """2 × batch 4 against 1 × batch 8 in fp64: the averaged gradients of the first step and the losses of all steps."""
    two, one = two_ranks[program.VITTT, None], program.train(tmp_path, Ranks(), program.VITTT, None)
    assert len(one["losses"]) == 6 and one["losses"] == pytest.approx(two["losses"], abs=1e-10)
    assert one["scores"] == pytest.approx(two["scores"], abs=1e-10)
    for parameter, gradient in one["gradients"].items():
        assert (gradient - two["gradients"][parameter]).abs().max() < 1e-10, parameter
        assert gradient.abs().max() > 0, parameter


@pytest.mark.parametrize("ema_decay", [None, 0.5])
def test_the_score_is_that_of_the_saved_weights(two_ranks, ema_decay):
    """Of each epoch's weights, evaluated alone; each rank has them, and the norms saw the images of both."""
    found, model = two_ranks[program.NORMED, ema_decay], program.build(program.NORMED).eval()
    states = [found["snapshots"][epoch] for epoch in (1, 2, 2)]
    for state, score in zip(states, found["scores"], strict=True):
        model.load_state_dict(state)
        assert program.find_loss(model, range(program.HELD_OUT)) / program.HELD_OUT == pytest.approx(score, rel=1e-5)
    first, second = found["states"]
    assert all(torch.equal(first[key], second[key]) and torch.equal(first[key], states[-1][key]) for key in first)
    means = [key for key in first if key.endswith("running_mean")]
    assert means and all(not torch.equal(first[key], found["snapshots"][0][key]) for key in means)


FAIL = """
import sys
from repro.core.ranks import joined
with joined("cpu") as ranks:
    if ranks.rank == 1:
        sys.exit(3)
    ranks.sum([0.0])
"""


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path):
    """The other one waits in an exchange that will never come."""
    (tmp_path / "fail.py").write_text(FAIL)
    done = start([*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "fail.py")])
    assert done.returncode == 1, done.stderr[-3000:]


@pytest.mark.slow
def test_torchrun_tells_that_a_rank_was_killed(tmp_path):
    program = "import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)"
    (tmp_path / "die.py").write_text(program)
    wrapped = ["-m", "repro.core.children", *TORCHRUN[1:]]
    assert start([*wrapped, "--nproc-per-node=2", str(tmp_path / "die.py")]).returncode == 128 + 9


def test_more_processes_than_gpus_are_refused_unless_they_are_for_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device in ("auto", "cuda"):
        require_gpus(2, device)
        with pytest.raises(UserError, match="--gpus 3: .* 2 .*device: cpu"):
            require_gpus(3, device)
    require_gpus(3, "cpu")


def test_alone_everything_is_the_plain_thing():
    with joined("cpu") as ranks:
        assert ranks == Ranks() and ranks.first
    assert ranks.any(True, False) == [True, False] and ranks.sum([2.5]) == [2.5]
    assert ranks.gather("x") == ["x"] and ranks.from_first("x") == "x"


def test_a_batch_that_does_not_divide():
    with pytest.raises(UserError, match="pretrain.a.batch_size: 64 is not divisible by 3 processes"):
        Ranks(world_size=3).share(64, "pretrain.a.batch_size")


def test_half_of_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="RANK.* missing; start with --gpus N or torchrun"), joined("cpu"):
        pass


def test_every_rank_knows_what_any_found_unreadable(two_ranks):
    assert [found["marks"] for found in two_ranks.values()] == [[[1, 1, 1, 0]] * 2] * len(program.TRAININGS)
