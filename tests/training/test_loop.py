"""The loop on a small real task: what it computes, and that a stopped run ends where an uninterrupted one does."""

import contextlib
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
from repro.data.settings import TransformSettings
from repro.models.registry import build_model
from repro.tasks.classification.params import MesaParams, MixParams
from repro.tasks.classification.task import Classification
from repro.training.checkpoint import Checkpointer, rng_state, set_rng_state
from repro.training.guard import diagnose, dump_bad_step, find_fault, load_dump
from repro.training.loop import RunState, Task, TrainingState, fit, forward_backward
from repro.training.optim import build_optimizer, build_schedule
from repro.training.params import OptimParams, TrainParams
from repro.training.watch import Watch
from tests.slow import first
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

    def inspect(self, batch):
        return {"largest": float(batch[0].abs().max())}


OPTIM = OptimParams(lr=0.02, lr_batch_size=8, warmup_epochs=1, weight_decay=0.1)


def settings(kind=TrainParams, **changes):
    return kind(model="", data="", batch_size=8, drop_path=0.0, **{"optim": OPTIM} | changes)


def train(folder, task=None, *, epochs=3, save_every=2, log=print, accumulate=1, **more):
    """The weights of a run and its state."""
    task = task or Regression()
    watch = Watch(folder, device="cpu", jsonl=False, tensorboard=False, every=100)
    how = {"accumulate": accumulate, "save_every_steps": save_every, "watch": watch}
    how |= {"checkpointer": Checkpointer(folder, log), "snapshot": lambda epoch, model: task.snapshots.append(epoch)}
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


@pytest.mark.parametrize("step", [0, 1, 4, 5, 6, 9, 10, 14])
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, whole, step):
    with pytest.raises(Killed):
        train(tmp_path, Regression(kill_at(step)))
    assert_same(train(tmp_path), whole)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [2, 4, 9, 14])
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
    checkpointer = Checkpointer(tmp_path, lambda line: None)
    for step in (1, 2):
        checkpointer.save(step, {})
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no undamaged training state among 2 files"):
        checkpointer.restore()


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


def test_too_many_in_a_row_stop_with_a_dump_that_runs_again(tmp_path):
    with pytest.raises(RunError, match=r"step 8: loss or gradient not finite.*--replay-bad-step"):
        train(tmp_path, Diverging({2, 3, 6, 7, 8}), max_bad_steps=3)
    saved = Checkpointer(tmp_path, lambda line: None).restore()
    assert saved["run"]["step"] == 6 and saved["run"]["bad_excess"] == 1
    assert all(torch.isfinite(value).all() for value in saved["model"].values())

    dump = load_dump(tmp_path / "bad_step_000000008.pt")
    (seen,) = dump["ranks"]
    assert (dump["step"], dump["epoch"], dump["number"], dump["world_size"]) == (8, 1, 2, 1)
    assert seen["batch"][0] == "1/2/0" and math.isnan(seen["statistics"]["loss"])
    again = Diverging({8})
    again.model.load_state_dict(dump["model"])
    again.model.train()
    set_rng_state(seen["rng"])
    found = diagnose(again, next(again.batches(1, 2)), contextlib.nullcontext)
    assert found["outputs"] == seen["statistics"]["outputs"]
    assert found["own"] == {"largest": seen["statistics"]["own"]["largest"]}
    assert set(found["gradients"]) == {name for name, _ in again.model.named_parameters()}


@pytest.mark.parametrize("killed", [None, 3, 8])
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
    with pytest.raises(Diverged, match=r"4 of the last epoch's 5 steps.*bad_step_000000005.pt"):
        train(tmp_path, epochs=1, **ABSURD)
    (seen,) = load_dump(tmp_path / "bad_step_000000005.pt")["ranks"]
    assert seen["batch"][0] == "0/4/0" and not math.isfinite(seen["statistics"]["loss"])


class Spoilt(Regression):
    """A weight is not finite after the last step, though every loss and gradient was."""

    def batches(self, epoch, start):
        yield from super().batches(epoch, start)
        if epoch == 2:
            self.model[1].weight.data[3] = math.inf


def test_weights_that_are_not_finite_at_the_end_are_no_result(tmp_path):
    task = Spoilt()
    with pytest.raises(Diverged, match=r"weight 1\.weight.*output.*: 1;"):
        train(tmp_path, task)
    assert task.number == 16  # of which the last one is for the dump: nothing was evaluated


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

    with pytest.raises(Diverged, match=r"held_out_loss is nan.*bad_step_000000015\.pt"):
        train(tmp_path / "last", Unsound())
    Unsound.broken_at = 10
    _, earlier, last = [row.get("held_out_loss") for row in train(tmp_path / "earlier", Unsound())[1].curve]
    assert math.isnan(earlier) == (split == "tune") and math.isfinite(last)


def test_diagnosis_names_the_layer_by_hand():
    task = Regression()
    with torch.no_grad():
        task.model[0].weight.fill_(1.0)
        task.model[0].bias.fill_(0.5)
        task.model[1].weight[3] = math.inf
    task.model.eval()
    found = diagnose(task, (torch.ones(2, 4), torch.zeros(2, 1)), contextlib.nullcontext)
    assert found["outputs"]["0"] == {"absmax": 4.5, "mean": 4.5, "not_finite": 0}
    assert found["first_not_finite"] == "1" and found["outputs"]["1"]["not_finite"] == 2
    assert found["gradients"]["3.weight"]["not_finite"] > 0


def test_a_damaged_dump_and_what_is_none_are_one_line(tmp_path):
    weights, path = torch.arange(1000, 1064, dtype=torch.float32), tmp_path / "dump.pt"
    with pytest.raises(UserError, match="no such file"):
        load_dump(path)
    rest = dict.fromkeys(["step", "epoch", "number", "world_size", "accumulate", "scale", "ranks"], 1)
    torch.save(rest | {"model": {"x": weights}}, path)
    assert torch.equal(load_dump(path)["model"]["x"], weights)
    content = path.read_bytes()
    for place in range(start := content.index(weights.numpy().tobytes()), start + 256, 31):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"dump\.pt: not a dump.*checksum"):
            load_dump(path)
    torch.save({"model": np.random.default_rng(0)}, path)
    for other in (path.read_bytes(), b"", b"torn"):
        path.write_bytes(other)
        with pytest.raises(UserError, match=r"dump\.pt: not a dump of a bad step") as caught:
            load_dump(path)
        assert "weights_only" not in str(caught.value) and "\n" not in str(caught.value)


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


@pytest.mark.parametrize(("start", "first"), [(0.0, 0), (0.25, 1), (0.3, 2), (0.75, 3), (1.0, 4)])
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


def test_a_teacher_that_never_comes_changes_nothing(tmp_path):
    assert_same(train_taught(tmp_path / "a", Taught(), 1.0), train(tmp_path / "b", ema_decay=0.9, epochs=4))


@pytest.mark.parametrize("step", first([11, 9, 13, 18]))
@pytest.mark.parametrize("accumulate", first([2, 1]))
def test_a_killed_run_with_a_teacher_ends_like_an_uninterrupted_one(tmp_path, step, accumulate):
    more = {"accumulate": accumulate}
    expected = train_taught(tmp_path / "whole", Taught(), 0.5, **more)
    with pytest.raises(Killed):
        train_taught(tmp_path / "cut", Taught(kill_at(step * accumulate)), 0.5, **more)
    assert_same(train_taught(tmp_path / "cut", Taught(), 0.5, **more), expected)
    untaught, _ = train_taught(tmp_path / "untaught", Taught(), 1.0, **more)
    assert not torch.equal(untaught["0.weight"], expected[0]["0.weight"])


def test_fp16_lowers_its_scale_where_gradients_overflow(tmp_path):
    """A gradient, scaled by 2¹⁶, is no fp16 number: steps are skipped until the scale fits; a stopped run keeps its scale."""
    how = {"precision": "fp16", "epochs": 4}
    whole = train(tmp_path / "a", Regression(factor=30), **how)
    with pytest.raises(Killed):
        train(tmp_path / "b", Regression(kill_at(11), factor=30), **how)
    saved = Checkpointer(tmp_path / "b", lambda line: None).restore()
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


@pytest.mark.parametrize(("accumulate", "mesa"), [(1, None), (2, None), (2, 1.5)])
def test_a_dump_repeats_the_step_to_the_bit(tmp_path, accumulate, mesa):
    """With erasing, mixup, stochastic depth and parts of a batch: the loss of training, dump and replay is one."""
    torch.manual_seed(0)
    model = build_model("vittt_nano_patch16_144", img_size=32, num_classes=10, depth=2, drop_path_rate=0.5).train()
    made_of = {"transform": TransformSettings(image_size=32, re_prob=0.5), "mix": MixParams(mixup=0.8, cutmix=1.0)}
    made_of |= {"mesa": MesaParams(weight=mesa or 1.0), "num_classes": 10}
    task = Classification(model, [0], {"val": None}, batch_size=8, device=torch.device("cpu"), **made_of)
    task.describe = lambda epoch, number: ["a.png"]
    params = settings(epochs=1, optim=OptimParams(lr=1e-3), ema_decay=0.9 if mesa else None)
    parts = TrainingState(task, params, accumulate)
    if mesa:
        task.teacher = parts.ema.module
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    seen, inner = [], task.loss
    task.loss = lambda network, batch: (losses := inner(network, batch), seen.append(losses["loss"].item()))[0]
    batch = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8)
    before = batch[0].clone()
    rng = rng_state()
    numbers = forward_backward(task, parts, batch, 5.0)
    trained = list(seen)
    assert len(trained) == accumulate and torch.equal(batch[0], before)
    assert numbers["loss"] == pytest.approx(np.mean(trained))
    with pytest.raises(RunError, match="bad_step_000000006.pt"):
        dump_bad_step(tmp_path, task, parts, 6, (0, 0), batch, rng, "not finite")
    dump = load_dump(tmp_path / "bad_step_000000006.pt")
    (of_the_dump,) = dump["ranks"]
    assert of_the_dump["statistics"]["loss"] == trained[-1] and of_the_dump["statistics"]["part"] == accumulate
    assert list(of_the_dump["statistics"]["own"]["inner_losses"]) == ["blocks.0.mixer", "blocks.1.mixer"]
    set_rng_state(of_the_dump["rng"])
    assert ("teacher" in dump) == bool(mesa)
    if mesa:
        task.teacher.load_state_dict(dump["teacher"])
    again = diagnose(task, batch, parts.autocast, dump["accumulate"], dump["scale"])
    assert again["loss"] == trained[-1] and again["outputs"] == of_the_dump["statistics"]["outputs"]
