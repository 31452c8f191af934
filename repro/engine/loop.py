"""The training loop: one readable screen (`fit`) that calls objects."""

import contextlib
import csv
import dataclasses
import functools
import io
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..core.errors import Interrupted, UserError
from ..core.ranks import Ranks
from ..core.record import write_text
from .checkpoint import Checkpointer, rng_state, set_rng_state
from .guard import Guard
from .optim import build_optimizer, build_schedule
from .params import LoopParams, OptimParams
from .progress import Progress
from .watch import Watch

LOSS_SCALE = 512.0  # at the start of fp16, mmsegmentation's; it doubles every 2,000 good steps


class Task(Protocol):
    """What the engine trains.

    `network` is what `loss` calls: the engine puts the parallel wrapper of `model` there. `batches(epoch, start)` yields this rank's
    batches of an epoch from batch number `start` on, the same ones in the same order every time; `split(batch, parts)` cuts one into
    equal parts; `loss(batch)` returns scalar tensors, of which `loss` is minimised and all are logged; `evaluate(model)` returns
    numbers that are of all ranks together. `describe(epoch, number)` names the samples of a batch, `inspect(batch)` says what the
    task knows of one that went wrong; both in types that `torch.load(weights_only=True)` allows.
    """

    model: nn.Module
    network: nn.Module
    batch_size: int
    steps_per_epoch: int

    def batches(self, epoch: int, start: int) -> Iterator[Any]: ...

    def split(self, batch: Any, parts: int) -> Sequence[Any]: ...

    def loss(self, batch: Any) -> dict[str, Tensor]: ...

    def evaluate(self, model: nn.Module) -> dict[str, float]: ...

    def describe(self, epoch: int, number: int) -> list[str]: ...

    def inspect(self, batch: Any) -> dict[str, Any]: ...


@dataclasses.dataclass(kw_only=True)
class RunState:
    """Where a run stands: finished steps and the sums of the running epoch, beside what the optimiser holds."""

    step: int = 0
    epoch_sums: dict[str, float] = dataclasses.field(default_factory=dict)
    epoch_steps: int = 0  # finite ones, of which the sums are
    bad_in_a_row: int = 0
    bad_steps: int = 0
    curve: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def count(self, numbers: dict[str, float], *, finite: bool) -> None:
        """One more step: its numbers go into the sums if it was finite, else it is counted apart."""
        self.step += 1
        self.bad_in_a_row = 0 if finite else self.bad_in_a_row + 1
        self.bad_steps += not finite
        if finite:
            self.epoch_steps += 1
            for name, value in numbers.items():
                self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value


def fit(
    task: Task,
    optim: OptimParams,
    settings: LoopParams,
    *,
    device: torch.device,
    ranks: Ranks,
    checkpointer: Checkpointer,
    snapshot: Callable[[int, nn.Module], None],
    watch: Callable[[int], Watch],
    log: Callable[[str], None] = print,
) -> tuple[RunState, nn.Module]:
    """Train from the start or from where an earlier call stopped.

    Args:
        task: model, batches, loss and evaluation.
        optim: optimiser and schedule.
        settings: epochs, precision, accumulation and cadences.
        device: where the model lies.
        ranks: the processes that train together; rank 0 writes.
        checkpointer: where state is kept between steps.
        snapshot: called on rank 0 with the number of finished epochs, 0 before the first step, and the model that is evaluated.
        watch: makes what watches the steps, from the number of steps that an earlier process finished.
        log: takes plain lines.

    Returns:
        The final state, and the model whose weights count. The state's curve has one row per epoch: the means of the training
        numbers over the finite steps and all ranks, and, where evaluated, the validation numbers.

    Raises:
        Interrupted: SIGINT or SIGTERM came to any rank; the running step was finished and the state saved.
        RunError: `settings.max_bad_steps` steps in a row were not finite.
    """
    parts = Parts.build(task, optim, settings, device, ranks)
    steps = task.steps_per_epoch
    schedule = build_schedule(parts.optimizer, optim, task.batch_size, settings.epochs, steps)
    state = _restore(checkpointer, parts, ranks)
    guard = Guard(folder=checkpointer.folder)
    schedule.step_update(state.step)
    if state.step == 0 and ranks.first:
        snapshot(0, parts.evaluated)
    signals = catch_signals(all_of_them=ranks.world_size > 1)
    with (
        signals as received,
        Progress(settings.epochs * steps, state.step, log, shown=ranks.first) as progress,
        watch(state.step) as watched,
    ):
        while len(state.curve) < settings.epochs:
            epoch = len(state.curve)  # one that was stopped before its evaluation has no batches left, and is evaluated
            start = state.step - epoch * steps
            task.model.train()
            for number, batch in enumerate(_waited(task.batches(epoch, start), watched), start):
                guard.remember()
                numbers = forward_backward(task, parts, batch, optim.clip_grad_norm)
                bad, stop = ranks.any(not all(map(math.isfinite, numbers.values())), bool(received))
                parts.step(apply=not bad)
                state.count(numbers, finite=not bad)
                if state.bad_in_a_row >= settings.max_bad_steps:
                    how = {"autocast": parts.autocast, "accumulate": parts.accumulate, "scale": parts.scaler.get_scale(), "ranks": ranks}
                    guard.dump(task, batch, in_a_row=state.bad_in_a_row, step=state.step, epoch=epoch, number=number, **how)
                rate = parts.optimizer.param_groups[0]["lr"]
                images = task.batch_size // ranks.world_size
                progress.update(state.step, watched.step(state.step, epoch, numbers, rate, images, skipped=bad))
                schedule.step_update(state.step)
                # before the evaluation, which may take longer than whoever sends a signal waits
                if stop or number + 1 == steps or state.step % settings.save_every_steps == 0:
                    with watched.paused():
                        _save(checkpointer, state, parts, ranks)
                    _stop_if(stop, received, state.step)
            with watched.paused():
                evaluate = (epoch + 1) % settings.evaluate_every == 0 or epoch + 1 == settings.epochs
                _end_epoch(task, state, parts, ranks, epoch + 1, evaluate)
                if ranks.first:
                    snapshot(epoch + 1, parts.evaluated)
                progress.report(state.curve[-1])
            _stop_if(ranks.any(bool(received))[0], received, state.step)
    return state, parts.evaluated


@dataclasses.dataclass(kw_only=True)
class Parts:
    """What a run trains with. `evaluated` is the model whose weights count: the moving average where there is one."""

    model: nn.Module
    network: nn.Module
    evaluated: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None
    autocast: Callable[[], contextlib.AbstractContextManager]
    accumulate: int

    @classmethod
    def build(cls, task: Task, optim: OptimParams, settings: LoopParams, device: torch.device, ranks: Ranks) -> "Parts":
        """The optimiser and its company for a task; sets `task.network`."""
        optimizer = build_optimizer(task.model, optim, task.batch_size)
        if ranks.world_size > 1:
            own = [device.index] if device.type == "cuda" else None
            task.network = DistributedDataParallel(
                task.network, device_ids=own, gradient_as_bucket_view=True, broadcast_buffers=False
            )  # buffers, a frozen W0, never change
        ema = ModelEmaV3(task.model, decay=settings.ema_decay) if settings.ema_decay else None
        return cls(
            model=task.model,
            network=task.network,
            evaluated=ema.module if ema else task.model,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, enabled=settings.precision == "fp16"),
            ema=ema,
            autocast=functools.partial(settings.autocast, device.type),
            accumulate=settings.accumulate,
        )

    def step(self, *, apply: bool) -> None:
        """The optimiser's step, left out where `apply` is False."""
        if apply:
            self.scaler.step(self.optimizer)
            if self.ema is not None:
                self.ema.update(self.model)
        self.scaler.update()  # lowers the scale of fp16 where it made gradients overflow

    def state(self) -> dict[str, Any]:
        """What is saved; the schedule needs no entry, since its rate is a function of the step alone."""
        named = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in (named | ({"ema": self.ema.module} if self.ema else {})).items()}

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `state`; raises what PyTorch raises where it belongs to another model."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        if self.ema is not None:
            self.ema.module.load_state_dict(saved["ema"])


def forward_backward(task: Task, parts: Parts, batch: Any, clip_grad_norm: float | None) -> dict[str, float]:
    """One batch in its parts: gradients averaged over them and the ranks, clipped.

    Returns:
        What the task's loss returned, averaged over the parts, and the gradients' norm before clipping.
    """
    parts.optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {}
    pieces = task.split(batch, parts.accumulate)
    for i, piece in enumerate(pieces, 1):
        # the ranks exchange gradients once, with the last part
        waits = i < len(pieces) and isinstance(parts.network, DistributedDataParallel)
        with parts.network.no_sync() if waits else contextlib.nullcontext():
            with parts.autocast():
                losses = task.loss(piece)
            parts.scaler.scale(losses["loss"] / len(pieces)).backward()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value.detach() / len(pieces)
    parts.scaler.unscale_(parts.optimizer)
    sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(parts.model.parameters(), clip_grad_norm or math.inf)
    values = torch.stack([value.double() for value in sums.values()]).tolist()  # one transfer
    return dict(zip(sums, values, strict=True))


@contextlib.contextmanager
def catch_signals(*, all_of_them: bool = False) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the yielded list instead of dying from them; a second one is not held back.

    With `all_of_them` it is: under torchrun a process is signalled twice, by whoever stops the job and by torchrun, which has SIGKILL
    for those that do not end.
    """
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        for each in () if all_of_them else signals:
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


def _waited(batches: Iterator[Any], watched: Watch) -> Iterator[Any]:
    """The batches, with the time of waiting for each counted."""
    while True:
        with watched.waiting():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _stop_if(stop: bool, received: list[int], step: int) -> None:
    if stop:  # the signal may have come to another rank
        raise Interrupted(received[0] if received else signal.SIGTERM, f"the state after step {step} is saved")


def _end_epoch(task: Task, state: RunState, parts: Parts, ranks: Ranks, epoch: int, evaluate: bool) -> None:
    steps = max(1, state.epoch_steps) * ranks.world_size
    means = {f"train_{name}": total / steps for name, total in zip(state.epoch_sums, ranks.sum([*state.epoch_sums.values()]))}
    parts.evaluated.eval()
    validation = task.evaluate(parts.evaluated) if evaluate else {}
    rate = parts.optimizer.param_groups[0]["lr"]
    state.curve.append({"epoch": epoch, "step": state.step, "lr": rate, **means, **validation})
    state.epoch_sums, state.epoch_steps = {}, 0


def _save(checkpointer: Checkpointer, state: RunState, parts: Parts, ranks: Ranks) -> None:
    everyone = ranks.gather({"rng": rng_state(), "sums": state.epoch_sums})
    if ranks.first:
        run = {"run": dataclasses.asdict(state), "ranks": everyone, "accumulate": parts.accumulate}
        checkpointer.save(state.step, run | parts.state())


def _restore(checkpointer: Checkpointer, parts: Parts, ranks: Ranks) -> RunState:
    saved = checkpointer.restore() if ranks.first else None
    saved = ranks.from_first(saved)
    if saved is None:
        return RunState()
    try:
        everyone = saved["ranks"]
        parts.load(saved)
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing against the state
        raise
    except (RuntimeError, ValueError, KeyError):
        raise UserError(f"{checkpointer.folder}: holds the state of another model; remove the folder to start anew") from None
    if saved["accumulate"] != parts.accumulate:
        raise UserError(
            f"{checkpointer.folder}: was stopped with its batches in {saved['accumulate']} part(s) and is continued with {parts.accumulate}; "
            "take the same runtime.micro_batch, or remove the folder to start anew"
        )
    own = everyone[ranks.rank]
    set_rng_state(own["rng"])
    return RunState(**{**saved["run"], "epoch_sums": own["sums"]})
