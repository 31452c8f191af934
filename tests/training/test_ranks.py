"""Several gloo processes under torchrun: what they compute is what one computes, and what they agree on."""

from pathlib import Path

import pytest
import torch

from repro.core.errors import UserError
from repro.core.ranks import Ranks, joined, require_gpus
from tests.conftest import ROOT, run_python
from tests.slow import slow
from tests.training import norms

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def start(command):
    return run_python(*command, PYTHONPATH=str(ROOT))


def test_two_ranks_compute_what_one_does(tmp_path):
    """2 × batch 32 against 1 × batch 64 in fp64: the averaged gradients of the first step and the losses of five steps."""
    program = str(Path(__file__).parent / "program.py")
    seen = []
    for name, command in (("one", []), ("two", [*TORCHRUN, "--nproc-per-node=2"])):
        (tmp_path / name).mkdir()
        done = start([*command, program, str(tmp_path / name)])
        assert done.returncode == 0, done.stderr[-3000:]
        seen.append(torch.load(tmp_path / name / "seen.pt"))
    one, two = seen
    assert len(one["losses"]) == 5 and one["losses"] == pytest.approx(two["losses"], abs=1e-10)
    for parameter, gradient in one["gradients"].items():
        assert (gradient - two["gradients"][parameter]).abs().max() < 1e-10, parameter
        assert gradient.abs().max() > 0, parameter


NORMED = "resnet_nano", "mambavision_nano_144"


@pytest.fixture(scope="module")
def normed(tmp_path_factory):
    """What two ranks found that trained models with batch norms."""
    folder = tmp_path_factory.mktemp("normed")
    done = start([*TORCHRUN, "--nproc-per-node=2", str(Path(norms.__file__)), str(folder), *NORMED])
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("ema_decay", [None, 0.5])
@pytest.mark.parametrize("name", NORMED)
def test_the_score_is_that_of_the_saved_weights(normed, name, ema_decay):
    """Of each epoch's weights, evaluated alone; each rank has them, and the norms saw the images of both."""
    found, model = normed[name, ema_decay], norms.build(name).eval()
    states = [found["snapshots"][epoch] for epoch in (1, 2, 2)]
    for state, score in zip(states, found["scores"], strict=True):
        model.load_state_dict(state)
        assert norms.find_loss(model, range(norms.HELD_OUT)) / norms.HELD_OUT == pytest.approx(score, rel=1e-5)
    first, second = found["states"]
    assert all(torch.equal(first[key], second[key]) and torch.equal(first[key], states[-1][key]) for key in first)
    means = [key for key in first if key.endswith("running_mean")]
    assert means and all(not torch.equal(first[key], found["snapshots"][0][key]) for key in means)


AVERAGE = """
import torch
from repro.core.ranks import joined
with joined("cpu") as ranks:
    one = float(1 + 2 * ranks.rank)
    values = [torch.full((2, 3), one), torch.tensor(one, dtype=torch.bfloat16), torch.full((2,), one).double()]
    values += [torch.tensor(int(one)), torch.full((4, 2), one).T, torch.zeros(0), torch.full((), one).half()]
    kept = values[3].clone()
    ranks.average(values)
    assert all((x == 2).all() for i, x in enumerate(values) if i != 3) and values[3] == kept
    same = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    copy = same.clone()
    ranks.average([copy])
    assert torch.equal(copy, same)  # what is equal stays so to the bit
    ranks.average([])
"""


def test_ranks_average_tensors(tmp_path):
    (tmp_path / "average.py").write_text(AVERAGE)
    done = start([*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "average.py")])
    assert done.returncode == 0, done.stderr[-3000:]


AGREE = """
import sys
from repro.core.ranks import joined
with joined("cpu") as ranks:
    assert ranks.any(ranks.rank == 1, False) == [True, False]
    assert ranks.sum([1.0, ranks.rank]) == [2.0, 1.0]
    assert ranks.gather(ranks.rank * 10) == ([0, 10] if ranks.first else [])
    assert ranks.from_first({"rank": ranks.rank}) == {"rank": 0}
    if sys.argv[1] == "fail" and ranks.rank == 1:
        sys.exit(3)
    ranks.sum([0.0])
"""


@pytest.mark.parametrize(("end", "code"), [("finish", 0), slow("fail", 1)])
def test_ranks_agree_and_one_that_fails_ends_all(tmp_path, end, code):
    """The other one waits in an exchange that will never come."""
    (tmp_path / "agree.py").write_text(AGREE)
    done = start([*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "agree.py"), end])
    assert done.returncode == code, done.stderr[-3000:]


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
