"""The training loop: one readable screen (`fit`) that calls objects."""

import contextlib
import csv
import dataclasses
import io
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.errors import Interrupted, RunError, UserError
from ..core.record import write_text
from .checkpoint import Checkpointer, rng_state, set_rng_state
from .optim import build_optimizer, build_schedule
from .params import OptimParams
from .progress import Progress


class Task(Protocol):
    """What the engine trains.

    `batches(epoch, start)` yields the batches of an epoch from batch number `start` on, the same ones in the same order every
    time; `loss(batch)` returns scalar tensors, of which `loss` is minimised and all are logged; `evaluate()` returns numbers.
    """

    model: nn.Module
    batch_size: int
    steps_per_epoch: int

    def batches(self, epoch: int, start: int) -> Iterator[Any]: ...

    def loss(self, batch: Any) -> dict[str, Tensor]: ...

    def evaluate(self) -> dict[str, float]: ...


@dataclasses.dataclass(kw_only=True)
class RunState:
    """Where a run stands: finished steps and the sums of the running epoch, beside what the optimiser holds."""

    step: int = 0
    epoch_sums: dict[str, float] = dataclasses.field(default_factory=dict)
    curve: list[dict[str, float]] = dataclasses.field(default_factory=list)


def fit(
    task: Task,
    optim: OptimParams,
    *,
    epochs: int,
    evaluate_every: int,
    device: torch.device,
    precision: str,
    checkpointer: Checkpointer,
    save_every_steps: int,
    log_every_steps: int,
    snapshot: Callable[[int], None],
    log: Callable[[str], None] = print,
) -> list[dict[str, float]]:
    """Train from the start or from where an earlier call stopped.

    Args:
        task: model, batches, loss and evaluation.
        optim: optimiser and schedule.
        epochs: passes over the training data.
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        device: where the model lies.
        precision: `fp32`, or `bf16` for autocast.
        checkpointer: where state is kept between steps.
        save_every_steps, log_every_steps: cadence.
        snapshot: called with the number of finished epochs, 0 before the first step.
        log: takes plain lines.

    Returns:
        The curve: one row per epoch with the means of the training numbers and, where evaluated, the validation numbers.

    Raises:
        Interrupted: SIGINT or SIGTERM came; the running step was finished and the state saved.
        RunError: the loss is not finite.
    """
    optimizer = build_optimizer(task.model, optim, task.batch_size)
    schedule = build_schedule(optimizer, optim, task.batch_size, epochs, task.steps_per_epoch)
    state = _restore(checkpointer, task.model, optimizer)
    schedule.step_update(state.step)
    if state.step == 0:
        snapshot(0)
    with catch_signals() as received, Progress(epochs * task.steps_per_epoch, state.step, log_every_steps, log) as progress:
        while state.step < epochs * task.steps_per_epoch:
            epoch, start = divmod(state.step, task.steps_per_epoch)
            task.model.train()
            for batch in task.batches(epoch, start):
                numbers = train_step(task, optimizer, batch, optim.clip_grad_norm, device, precision)
                _accumulate(state.epoch_sums, numbers, state.step)
                state.step += 1
                schedule.step_update(state.step)
                progress.update(state.step, numbers["loss"], task.batch_size)
                # the last step of an epoch is saved once its evaluation is in the curve
                if state.step % task.steps_per_epoch and (received or state.step % save_every_steps == 0):
                    _save(checkpointer, state, task.model, optimizer)
                    _stop_if(received, state.step)
            _end_epoch(task, state, optimizer, epoch + 1, evaluate=(epoch + 1) % evaluate_every == 0 or epoch + 1 == epochs)
            snapshot(epoch + 1)
            progress.report(state.curve[-1])
            _save(checkpointer, state, task.model, optimizer)
            _stop_if(received, state.step)
    return state.curve


def train_step(
    task: Task, optimizer: torch.optim.Optimizer, batch: Any, clip_grad_norm: float | None, device: torch.device, precision: str
) -> dict[str, Tensor]:
    """Forward, backward, clip, step. Returns detached scalars: what the task's loss returned, and the gradient norm before clipping."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        losses = task.loss(batch)
    optimizer.zero_grad(set_to_none=True)
    losses["loss"].backward()
    norm = torch.nn.utils.clip_grad_norm_(task.model.parameters(), clip_grad_norm or math.inf)
    optimizer.step()
    return {**{name: value.detach() for name, value in losses.items()}, "grad_norm": norm.detach()}


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the yielded list instead of dying from them; a second one is not held back."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        for each in signals:
            signal.signal(each, before[each])

    for number in signals:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number in signals:
            signal.signal(number, before[number])


def write_curve(path: Path, curve: list[dict[str, float]]) -> None:
    """curve.csv: a row per epoch; cells of epochs without evaluation are empty."""
    columns = list(dict.fromkeys(name for row in curve for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: f"{value:.8g}" for name, value in row.items()} for row in curve)
    write_text(path, text.getvalue())


def _stop_if(received: list[int], step: int) -> None:
    if received:
        raise Interrupted(received[0], f"the state after step {step} is saved")


def _accumulate(sums: dict[str, float], numbers: dict[str, Tensor], step: int) -> None:
    for name, value in numbers.items():
        number = float(value)
        if not math.isfinite(number):
            raise RunError(f"step {step + 1}: {name} is {number}; lower the learning rate or clip harder (the last saved state is before this step)")
        sums[name] = sums.get(name, 0.0) + number


def _end_epoch(task: Task, state: RunState, optimizer: torch.optim.Optimizer, epoch: int, evaluate: bool) -> None:
    means = {f"train_{name}": total / task.steps_per_epoch for name, total in state.epoch_sums.items()}
    task.model.eval()
    validation = task.evaluate() if evaluate else {}
    state.curve.append({"epoch": epoch, "step": state.step, "lr": optimizer.param_groups[0]["lr"], **means, **validation})
    state.epoch_sums = {}


def _save(checkpointer: Checkpointer, state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # the schedule needs no entry: its rate is a function of the step alone
    saved = {"run": dataclasses.asdict(state), "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
    checkpointer.save(state.step, saved)


def _restore(checkpointer: Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer) -> RunState:
    saved = checkpointer.restore()
    if saved is None:
        return RunState()
    try:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    except (RuntimeError, ValueError):
        raise UserError(f"{checkpointer.folder}: holds the state of another model; remove the folder to start anew") from None
    set_rng_state(saved["rng"])
    return RunState(**saved["run"])
