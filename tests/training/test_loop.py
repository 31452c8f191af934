"""The loop on a small real task: what it computes, and that a stopped run ends where an uninterrupted one does."""

import dataclasses
import math
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from repro.core.errors import Diverged, Interrupted, RunError, UserError
from repro.core.ranks import Ranks
from repro.training.checkpoint import Checkpointer
from repro.training.guard import find_fault
from repro.training.loop import RunState, Task, fit
from repro.training.optim import build_optimizer, build_schedule
from repro.training.params import OptimParams, TrainParams
from repro.training.watch import Watch
from tests.training.conftest import limit_files


class Regression(Task):
    """Fits noisy lines; dropout and a NumPy draw per step depend on every generator that must be restored."""

    batch_size, steps_per_epoch, device, ranks = 8, 5, torch.device("cpu"), Ranks()
    curve_split = reported_split = "val"

    def __init__(self, before_step=lambda number: None, factor=1):
        torch.manual_seed(3)
        np.random.seed(3)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.before_step, self.number, self.noises, self.snapshots = before_step, 0, [], []
        self.factor = factor  # of the loss

    def batches(self, epoch, start):
        for i in range(start, self.steps_per_epoch):
            generator = torch.Generator().manual_seed(100 * epoch + i)
            x = torch.randn(self.batch_size, 4, generator=generator)
            yield x, x.sum(dim=1, keepdim=True)

    def loss(self, network, batch):
        self.before_step(self.number)
        self.number += 1
        x, y = batch
        noise = float(np.random.rand())
        self.noises.append(noise)
        return {"loss": self.factor * (network(x) - y - 0.1 * noise).square().mean(), "noise": torch.tensor(noise)}

    def evaluate(self, model, split):
        assert not model.training
        with torch.no_grad():
            return {"held_out_loss": float(model(torch.ones(1, 4)).square())}

    def describe(self, epoch, number):
        return [f"{epoch}/{number}/{i}" for i in range(self.batch_size)]


OPTIM = OptimParams(lr=0.02, lr_batch_size=8, warmup_epochs=1, weight_decay=0.1)


def settings(kind=TrainParams, **changes):
    return kind(model="", data="", batch_size=8, drop_path=0.0, **{"optim": OPTIM} | changes)


def train(folder, task=None, *, epochs=3, save_every=2, accumulate=1, **more):
    """The weights of a run and its state."""
    task = task or Regression()
    watch = Watch(folder, device="cpu", jsonl=False, tensorboard=False, every=100)
    how = {"accumulate": accumulate, "save_every_steps": save_every, "watch": watch}
    how |= {"checkpointer": Checkpointer(folder), "snapshot": lambda epoch, model: task.snapshots.append(epoch)}
    state, evaluated = fit(task, settings(epochs=epochs, evaluate_every=2, **more), **how)
    return evaluated.state_dict(), state


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stops."""
    return train(tmp_path_factory.mktemp("whole"))


def assert_same(run, other):
    """The same weights, bit for bit, and the same curve."""
    assert all(torch.equal(weights, other[0][name]) for name, weights in run[0].items())
    assert run[1].curve == other[1].curve


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


def kill():
    raise Killed


def kill_at(step):
    return lambda number: kill() if number == step else None


@pytest.mark.parametrize("step", [0, 1, 4, 5, 10, 14])
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, whole, step):
    with pytest.raises(Killed):
        train(tmp_path, Regression(kill_at(step)))
    assert_same(train(tmp_path), whole)


def test_a_resumed_run_knows_the_unreadable_samples_of_earlier_calls(tmp_path):
    task, again = Regression(kill_at(6)), Regression()
    task.marks, again.marks = torch.tensor([0, 1, 0, 1], dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(Killed):
        train(tmp_path, task)
    train(tmp_path, again)
    assert again.marks.tolist() == [0, 1, 0, 1]


class Tuned(Regression):
    """Has a split for the curve and one that is reported, notes which it evaluates, and may be stopped in one of these."""

    curve_split, reported_split = "tune", "test"

    def __init__(self, stop=lambda: None, at=None):
        super().__init__()
        self.evaluated, self.stop, self.at = [], stop, at

    def evaluate(self, model, split):
        self.evaluated.append((self.number, split))
        if self.evaluated[-1] == self.at:
            self.stop()
        return {name: value + (split == "test") for name, value in super().evaluate(model, split).items()}


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGTERM, 2), (signal.SIGTERM, 9), (signal.SIGTERM, 14), (signal.SIGINT, 4)]
)
def test_a_signal_finishes_the_step_saves_and_says_so(tmp_path, whole, number, step):
    """After the last step of an epoch it does not wait for the evaluation."""
    handler, task = signal.getsignal(number), Tuned()
    task.before_step = lambda n: os.kill(os.getpid(), number) if n == step else None
    with pytest.raises(Interrupted, match=f"after step {step + 1} is saved") as stopped:
        train(tmp_path, task, save_every=100)
    assert stopped.value.exit_code == 128 + number
    assert task.number == step + 1 and task.evaluated == [(10, "tune")] * (step > 9)
    assert_same(train(tmp_path, save_every=100), whole)
    assert signal.getsignal(number) is handler


def test_the_reported_split_is_evaluated_once_and_by_the_final_model(tmp_path, whole):
    task = Tuned()
    _, state = train(tmp_path, task)
    assert task.evaluated == [(10, "tune"), (15, "tune"), (15, "test")]
    assert state.scores == {"held_out_loss": state.curve[-1]["held_out_loss"] + 1}
    assert whole[1].scores == {"held_out_loss": whole[1].curve[-1]["held_out_loss"]}


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


LAST = [(0, "tune"), (0, "test")]


@pytest.mark.parametrize(
    ("stop", "error", "at", "evaluated"),
    [
        (kill, Killed, (10, "tune"), [(0, "tune"), (5, "tune"), (5, "test")]),
        (kill, Killed, (15, "tune"), LAST),
        (kill, Killed, (15, "test"), LAST),
        (terminate, Interrupted, (15, "test"), LAST),
    ],
)
def test_stopped_while_it_evaluates(tmp_path, whole, stop, error, at, evaluated):
    """The epoch's steps are saved before its evaluation, which is then all that is done again."""
    with pytest.raises(error):
        train(tmp_path, Tuned(stop, at), save_every=100)
    task = Tuned()
    resumed = train(tmp_path, task, save_every=100)
    assert_same(resumed, whole)
    assert task.evaluated == evaluated
    assert resumed[1].scores == {"held_out_loss": whole[1].curve[-1]["held_out_loss"] + 1}


def test_states_that_are_all_damaged_are_an_error(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {})
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no undamaged training state among 2 files"):
        checkpointer.restore()


def test_a_full_disk_leaves_the_earlier_state(tmp_path):
    """It is one line, the old state loads, and nothing is left over."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": torch.zeros(10)})
    message = "the state after step 2 cannot be written.*the state after step 1 is intact"
    with pytest.raises(RunError, match=message) as caught, limit_files(20_000):
        checkpointer.save(2, {"x": torch.zeros(100_000)})
    assert "\n" not in str(caught.value)
    assert checkpointer.restore()["x"].shape == (10,)
    assert len(list(tmp_path.iterdir())) == 1


class Diverging(Regression):
    """One target of the batches of these steps, counted from 1, is not finite."""

    def __init__(self, bad, value=math.nan):
        super().__init__()
        self.bad, self.value = bad, value

    def batches(self, epoch, start):
        for number, (x, y) in enumerate(super().batches(epoch, start), epoch * self.steps_per_epoch + start + 1):
            if number in self.bad:
                y[0] = self.value
            yield x, y


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_steps_that_are_not_finite_are_skipped_and_counted_apart(tmp_path, value):
    """Weights: those of a run whose optimiser never saw these steps. Means: over the finite ones."""
    weights, state = train(tmp_path, Diverging({3, 8, 9}, value), epochs=2)
    assert state.bad_steps == 3 and all(torch.isfinite(x).all() for x in weights.values())

    by_hand = Regression()
    optimizer = build_optimizer(by_hand.model, OPTIM, 8)
    schedule = build_schedule(optimizer, OPTIM, 8, 2, 5)
    means = []
    for epoch in range(2):
        losses = []
        for number, batch in enumerate(by_hand.batches(epoch, 0)):
            optimizer.zero_grad()
            loss = by_hand.loss(by_hand.model, batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(by_hand.model.parameters(), 5.0)
            if 5 * epoch + number + 1 not in {3, 8, 9}:
                optimizer.step()
                losses.append(loss.item())
            schedule.step_update(5 * epoch + number + 1)
        means.append(np.mean(losses))
    assert all(torch.equal(weights[name], value) for name, value in by_hand.model.state_dict().items())
    assert [row["train_loss"] for row in state.curve] == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize(
    ("bad", "most", "step", "place"),
    [
        ({1}, 1, 1, "0/0"),
        ({15}, 1, 15, "2/4"),
        ({5, 6}, 2, 6, "1/0"),
        ({2, 3, 6, 7, 8}, 3, 8, "1/2"),
        ({9, 10, 11, 12, 13}, 5, 13, "2/2"),
    ],
)
def test_too_many_bad_steps_stop_with_the_files_of_the_last_batch(tmp_path, bad, most, step, place):
    """The line says the step, what was not finite, and every file; the last state is from before."""
    with pytest.raises(Diverged, match=rf"^step {step}: loss, grad_norm not finite.* 8 files") as stopped:
        train(tmp_path, Diverging(bad), max_bad_steps=most)
    named = ", ".join(f"{place}/{i}" for i in range(8))
    assert str(stopped.value).endswith(f": {named}") and stopped.value.step == step
    for file in tmp_path.glob("step_*.pt"):
        assert all(torch.isfinite(value).all() for value in torch.load(file, weights_only=True)["model"].values())


@pytest.mark.parametrize("killed", [None, 7])
def test_bad_steps_that_outnumber_the_others_stop_a_run_also_when_it_was_killed(tmp_path, killed):
    """Two of three are bad; three more bad than good are reached at step 8, and never three in a row."""
    task = Diverging({1, 2, 4, 5, 7, 8, 10, 11})
    if killed is not None:
        task.before_step = kill_at(killed)
        with pytest.raises(Killed):
            train(tmp_path, task, max_bad_steps=4)
        task = Diverging(task.bad)
    with pytest.raises(Diverged) as stopped:
        train(tmp_path, task, max_bad_steps=4)
    assert stopped.value.step == 8


def test_half_of_the_steps_may_be_bad(tmp_path):
    assert train(tmp_path, Diverging(set(range(2, 16, 2))), max_bad_steps=2)[1].bad_steps == 7


ABSURD = {"optim": OptimParams(lr=1e30, lr_batch_size=8, warmup_epochs=0, clip_grad_norm=None), "max_bad_steps": 20}


@pytest.mark.parametrize("killed", [None, 4])
def test_a_run_with_hardly_a_step_that_counts_diverged(tmp_path, killed):
    """One of five steps counts, after which the loss is not finite; a run of five steps never has `max_bad_steps` bad ones."""
    if killed is not None:
        with pytest.raises(Killed):
            train(tmp_path, Regression(kill_at(killed)), epochs=1, **ABSURD)
    with pytest.raises(Diverged, match=r"4 of the last epoch's 5 steps.* 0/4/0, 0/4/1"):
        train(tmp_path, epochs=1, **ABSURD)


class Spoilt(Regression):
    """A weight is not finite after the last step, though every loss and gradient was."""

    def batches(self, epoch, start):
        yield from super().batches(epoch, start)
        if epoch == 2:
            self.model[1].weight.data[3] = math.inf


def test_weights_that_are_not_finite_at_the_end_are_no_result(tmp_path):
    task = Spoilt()
    with pytest.raises(Diverged, match=r"weight 1\.weight.* 2/4/0"):
        train(tmp_path, task)
    assert task.number == 15 and task.snapshots == [0, 1, 2], "nothing was evaluated"


def test_a_moving_average_that_is_not_finite_at_the_end_is_no_result():
    training = SimpleNamespace(model=nn.Linear(2, 1), evaluated=nn.Linear(2, 1))
    assert find_fault(RunState(epoch_steps=5), training, 5) is None
    training.evaluated.bias.data.fill_(math.nan)
    assert "average bias" in find_fault(RunState(epoch_steps=5), training, 5)


@pytest.mark.parametrize("split", ["tune", "test"])
def test_a_final_score_that_is_not_finite_is_no_result_and_an_earlier_one_is(tmp_path, split):
    class Unsound(Tuned):
        broken_at = 15

        def evaluate(self, model, evaluated):
            found = super().evaluate(model, evaluated)
            return {"held_out_loss": math.nan} if self.number == self.broken_at and evaluated == split else found

    with pytest.raises(Diverged, match=r"held_out_loss is nan.* 2/4/0"):
        train(tmp_path / "last", Unsound())
    Unsound.broken_at = 10
    _, earlier, last = [row.get("held_out_loss") for row in train(tmp_path / "earlier", Unsound())[1].curve]
    assert math.isnan(earlier) == (split == "tune") and math.isfinite(last)


def test_accumulation_is_the_whole_batch(tmp_path):
    """Without dropout and noise: 1, 2 and 4 parts give the same gradients up to rounding, in fp64."""

    class Plain(Regression):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1)).double()

        def loss(self, network, batch):
            x, y = (t.double() for t in batch)
            return {"loss": (network(x) - y).square().mean()}

        def evaluate(self, model, split):
            return {}

    runs = [train(tmp_path / str(parts), Plain(), accumulate=parts)[0] for parts in (1, 2, 4)]
    for other in runs[1:]:
        assert all((runs[0][name] - other[name]).abs().max() < 1e-12 for name in other)


class Taught(Regression):
    """Adds the distance from the teacher's answer, and notes in which steps there was a teacher, and its weights."""

    def __init__(self, before_step=lambda number: None):
        super().__init__(before_step)
        self.asked = {}

    def loss(self, network, batch):
        losses = super().loss(network, batch)
        if self.teacher is None:
            return losses
        assert not self.teacher.training
        self.asked[self.number] = [p.detach().clone() for p in self.teacher.parameters()]
        with torch.no_grad():
            answer = self.teacher(batch[0])
        distance = (network(batch[0]) - answer).square().mean()
        return {**losses, "loss": losses["loss"] + distance, "loss_mesa": distance}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithTeacher(TrainParams):
    start: float = 0.0

    @property
    def teacher_from(self):
        return self.start


def train_taught(folder, task, start, **more):
    return train(folder, task, kind=WithTeacher, epochs=4, ema_decay=0.9, start=start, **more)


@pytest.mark.parametrize(("start", "first"), [(0.0, 0), (0.3, 2), (1.0, 4)])
def test_a_teacher_is_the_moving_average_before_the_step_from_an_epoch_on(tmp_path, start, first):
    """The run returns the average after its last step: w ← 0.9·w + 0.1·model after each, from the start's weights."""
    seen = []
    task = Taught(lambda number: seen.append([p.detach().clone() for p in task.model.parameters()]))
    averaged, state = train_taught(tmp_path, task, start)
    assert sorted(task.asked) == list(range(5 * first + 1, 21))
    assert [row["epoch"] for row in state.curve if "train_loss_mesa" in row] == list(range(first + 1, 5))
    average, task.asked[21] = seen[0], averaged.values()
    for step, weights in enumerate([*seen, task.model.parameters()], 1):
        average = [0.9 * a + 0.1 * w.detach() for a, w in zip(average, weights, strict=True)] if step > 1 else average
        for mine, expected in zip(task.asked.get(step, average), average, strict=True):
            torch.testing.assert_close(mine, expected)


def test_a_killed_run_with_a_teacher_ends_like_an_uninterrupted_one(tmp_path):
    more = {"accumulate": 2}
    expected = train_taught(tmp_path / "whole", Taught(), 0.5, **more)
    with pytest.raises(Killed):
        train_taught(tmp_path / "cut", Taught(kill_at(22)), 0.5, **more)
    assert_same(train_taught(tmp_path / "cut", Taught(), 0.5, **more), expected)
    untaught, _ = train_taught(tmp_path / "untaught", Taught(), 1.0, **more)
    assert not torch.equal(untaught["0.weight"], expected[0]["0.weight"])


def test_fp16_lowers_its_scale_where_gradients_overflow(tmp_path):
    """A gradient, scaled by 2¹⁶, is no fp16 number: steps are skipped until the scale fits; a stopped run keeps its scale."""
    how = {"precision": "fp16", "epochs": 4}
    whole = train(tmp_path / "a", Regression(factor=30), **how)
    with pytest.raises(Killed):
        train(tmp_path / "b", Regression(kill_at(11), factor=30), **how)
    saved = Checkpointer(tmp_path / "b").restore()
    assert 0 < saved["run"]["bad_steps"] < 10 and saved["scaler"]["scale"] < 2.0**16
    assert_same(train(tmp_path / "b", Regression(factor=30), **how), whole)
    assert all(torch.isfinite(x).all() for x in whole[0].values())


def test_curve_means_snapshots_and_evaluations(tmp_path):
    task = Regression()
    curve = train(tmp_path, task)[1].curve
    assert task.snapshots == [0, 1, 2, 3]
    assert [row["epoch"] for row in curve] == [1, 2, 3] and [row["step"] for row in curve] == [5, 10, 15]
    assert ["held_out_loss" in row for row in curve] == [False, True, True]
    assert curve[1]["train_noise"] == pytest.approx(np.mean(task.noises[5:10]), rel=1e-5)
