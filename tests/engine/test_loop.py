"""The loop on a small real task: what it computes, and that a stopped run ends where an uninterrupted one does."""

import csv
import math
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from repro.core.errors import Interrupted, RunError, UserError
from repro.engine.checkpoint import Checkpointer
from repro.engine.loop import fit, write_curve
from repro.engine.optim import build_optimizer, build_schedule
from repro.engine.params import OptimParams


class Regression:
    """Fits noisy lines. Dropout and a NumPy draw per step make the result depend on every generator the engine must restore."""

    batch_size, steps_per_epoch = 8, 5

    def __init__(self, before_step=lambda number: None):
        torch.manual_seed(3)
        np.random.seed(3)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.before_step, self.number = before_step, 0

    def batches(self, epoch, start):
        for i in range(start, self.steps_per_epoch):
            generator = torch.Generator().manual_seed(100 * epoch + i)
            x = torch.randn(self.batch_size, 4, generator=generator)
            yield x, x.sum(dim=1, keepdim=True)

    def loss(self, batch):
        self.before_step(self.number)
        self.number += 1
        x, y = batch
        noise = float(np.random.rand())
        return {"loss": (self.model(x) - y - 0.1 * noise).square().mean(), "noise": torch.tensor(noise)}

    def evaluate(self):
        assert not self.model.training
        with torch.no_grad():
            return {"val_loss": float(self.model(torch.ones(1, 4)).square())}


OPTIM = OptimParams(lr=0.02, lr_batch_size=8, warmup_epochs=1, weight_decay=0.1)


def train(folder, task=None, *, epochs=3, save_every=2, snapshots=None, log=lambda line: None, optim=OPTIM):
    task = task or Regression()
    curve = fit(
        task,
        optim,
        epochs=epochs,
        evaluate_every=2,
        device=torch.device("cpu"),
        precision="fp32",
        checkpointer=Checkpointer(folder, log),
        save_every_steps=save_every,
        log_every_steps=100,
        snapshot=(snapshots if snapshots is not None else []).append,
        log=lambda line: None,
    )
    return task.model.state_dict(), curve


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


def kill_at(step):
    def before(number):
        if number == step:
            raise Killed

    return before


@pytest.mark.parametrize("step", [0, 1, 4, 5, 6, 9, 10, 14])
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, step):
    expected, expected_curve = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "cut", Regression(kill_at(step)))
    weights, curve = train(tmp_path / "cut")
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    assert curve == expected_curve


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [2, 4, 14])
def test_a_signal_finishes_the_step_saves_and_says_so(tmp_path, number, step):
    expected, expected_curve = train(tmp_path / "whole", save_every=100)
    handler = signal.getsignal(number)
    task = Regression(lambda n: os.kill(os.getpid(), number) if n == step else None)
    with pytest.raises(Interrupted, match=f"after step {step + 1} is saved") as stopped:
        train(tmp_path / "cut", task, save_every=100)
    assert stopped.value.exit_code == 128 + number
    assert task.number == step + 1
    weights, curve = train(tmp_path / "cut", save_every=100)
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    assert curve == expected_curve
    assert signal.getsignal(number) is handler


def test_two_generations_are_kept_and_a_damaged_newest_is_passed_over(tmp_path):
    expected, _ = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "cut", Regression(kill_at(13)))
    files = sorted((tmp_path / "cut").iterdir())
    assert [f.name[:14] for f in files] == ["step_000000010", "step_000000012"]
    files[1].write_bytes(files[1].read_bytes()[:-100])
    lines = []
    weights, _ = train(tmp_path / "cut", log=lines.append)
    assert "damaged" in lines[0] and "after step 10" in lines[1]
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_only_damaged_states_are_an_error(tmp_path):
    with pytest.raises(Killed):
        train(tmp_path, Regression(kill_at(7)))
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no undamaged training state"):
        train(tmp_path)


def test_a_non_finite_loss_stops_and_keeps_the_state_before_it(tmp_path):
    class Diverging(Regression):
        def loss(self, batch):
            losses = super().loss(batch)
            return {"loss": losses["loss"] * (math.nan if self.number == 7 else 1)}

    with pytest.raises(RunError, match="step 7: loss is nan"):
        train(tmp_path, Diverging())
    saved = Checkpointer(tmp_path, lambda line: None).restore()
    assert saved["run"]["step"] == 6
    assert all(torch.isfinite(value).all() for value in saved["model"].values())


def test_curve_means_snapshots_and_evaluations(tmp_path):
    snapshots, noises = [], []
    task = Regression()
    inner = task.loss
    task.loss = lambda batch: noises.append(float(inner(batch)["noise"])) or {"loss": task.model(batch[0]).mean(), "noise": torch.tensor(noises[-1])}
    _, curve = train(tmp_path, task, snapshots=snapshots)
    assert snapshots == [0, 1, 2, 3]
    assert [row["epoch"] for row in curve] == [1, 2, 3] and [row["step"] for row in curve] == [5, 10, 15]
    assert ["val_loss" in row for row in curve] == [False, True, True]
    assert curve[1]["train_noise"] == pytest.approx(np.mean(noises[5:10]), rel=1e-5)
    write_curve(tmp_path / "curve.csv", curve)
    rows = list(csv.DictReader(open(tmp_path / "curve.csv")))
    assert rows[0]["val_loss"] == "" and float(rows[2]["lr"]) == pytest.approx(curve[2]["lr"], rel=1e-5)


def test_schedule_is_linear_warm_up_then_cosine():
    """Against the formula: rate(s) = min + (peak - min)(1 + cos(pi (s - w)/(S - w)))/2 after w warm-up steps, all scaled by batch/1024."""
    params = OptimParams(lr=1e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=2, lr_batch_size=1024)
    optimizer = build_optimizer(nn.Linear(2, 2), params, batch_size=512)
    schedule = build_schedule(optimizer, params, 512, epochs=10, steps_per_epoch=7)
    for step in range(71):
        schedule.step_update(step)
        if step < 14:
            expected = 1e-6 + (1e-3 - 1e-6) * step / 14
        else:
            expected = 1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * (step - 14) / 56)) / 2
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(expected / 2, rel=1e-9), step


def test_weight_decay_groups():
    model = Regression().model
    decayed = {id(p) for group in build_optimizer(model, OPTIM, 8).param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(model[0].weight), id(model[3].weight)}


def test_clipping_bounds_the_first_update(tmp_path):
    """AdamW hides the norm's size, so look at the gradient itself: after the step it lies on the clipped sphere."""
    task = Regression()
    train(tmp_path, task, epochs=1, optim=OptimParams(lr=1e-9, clip_grad_norm=0.01, warmup_epochs=0))
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in task.model.parameters()))
    assert norm == pytest.approx(0.01, rel=1e-3)
