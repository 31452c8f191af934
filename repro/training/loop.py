"""The training loop: `fit` is short and calls the objects that do the work."""

import abc
import contextlib
import dataclasses
import functools
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..core.children import catch_signals
from ..core.errors import Interrupted, UserError
from ..core.ranks import Ranks
from ..core.ui import Progress
from .checkpoint import Checkpointer, rng_state, set_rng_state
from .guard import find_fault, require_sound
from .optim import build_optimizer, build_schedule
from .params import OptimParams, TrainParams
from .watch import Watch, format_window

LOSS_SCALE = 512.0  # initial loss scale of fp16, as in mmsegmentation; it doubles every 2,000 finite steps


class Task(abc.ABC):
    """A model with its data, loss and evaluation, for the loop.

    Args:
        model: the model, on its device.
        train: this rank's training batches.
        held_out: split -> this rank's batches, every sample once. Curves are measured on the first split, and reported
            scores on the last; a single split serves for both.
        batch_size: images per step, over all ranks together.
        device: the device of the model.
        ranks: the processes that train together.

    `teacher` is the moving average of the weights in eval mode, in epochs whose loss needs it
    (`TrainParams.teacher_from`), else None. `marks` has a flag for each training sample that was found unreadable, for
    data sets that replace such samples: `fit` shares them among the ranks, and keeps them in the state.
    """

    teacher: nn.Module | None = None
    marks: Tensor | None = None

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        held_out: Mapping[str, Any],
        *,
        batch_size: int,
        device: torch.device,
        ranks: Ranks = Ranks(),
    ):
        self.model, self.train, self.held_out = model, train, held_out
        self.curve_split, self.reported_split = (tuple(held_out)[place] for place in (0, -1))
        self.device, self.ranks = device, ranks
        self.marks = getattr(getattr(train, "dataset", None), "marks", None)
        self.batch_size, self.steps_per_epoch = batch_size, len(train)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Return the batches of an epoch from number `start` on, the same ones in the same order every time."""
        return self.train.batches(epoch, start)

    def split(self, batch: Any, parts: int) -> Sequence[Any]:
        """Split a batch, which is a tuple of tensors or lists, into equal parts.

        `parts` must divide its size, as `runs.job.split_batch` ensures: images of a remainder would be left out.
        """
        size = len(batch[0]) // parts
        return [tuple(column[start : start + size] for column in batch) for start in range(0, size * parts, size)]

    def describe(self, epoch: int, number: int) -> list[str]:
        """Return the files of a batch."""
        return self.train.files(epoch, number)

    def build_optimizer(self, params: OptimParams) -> torch.optim.Optimizer:
        """Build the model's optimiser."""
        return build_optimizer(self.model, params, self.batch_size)

    @abc.abstractmethod
    def loss(self, network: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute scalars by name: all are logged, and `loss` is minimised.

        `network` is the model or its parallel wrapper, which alone averages the gradients over the ranks: do not call
        `self.model`. Every step of an epoch needs the same names in the same order, on every rank: the sums of an epoch
        are added over the ranks by position, and divided by the number of steps. A step is skipped if any of its
        numbers is not finite, even one that is only logged.
        """

    @abc.abstractmethod
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Compute scores over the samples of a held-out split, of all ranks, by a model in eval mode.

        Every rank must return the same numbers, since each decides by them whether the run ends. They must be Python's
        own: the state that is saved next holds them, and loading it with `weights_only` refuses those of NumPy. Golden
        files hold the names of the scores: a further or renamed one makes all trainings of the task out of date.
        """


@dataclasses.dataclass(kw_only=True)
class RunState:
    """The progress of a run: finished steps, sums over the running epoch, and the results of the last evaluation.

    Saved states hold the fields by name: after a field is renamed or removed, no earlier state can be continued.
    """

    step: int = 0
    epoch_sums: dict[str, float] = dataclasses.field(default_factory=dict)
    epoch_steps: int = 0  # finite steps of the epoch, whose numbers are in the sums
    # CUSUM of non-finite steps: +1 for a non-finite one, −1, but not below 0, for a finite one
    bad_excess: int = 0
    bad_steps: int = 0
    curve: list[dict[str, float]] = dataclasses.field(default_factory=list)
    scores: dict[str, float] = dataclasses.field(default_factory=dict)

    def count(self, numbers: dict[str, float], *, finite: bool) -> None:
        """Count one more step; only the numbers of a finite step go into the sums."""
        self.step += 1
        self.bad_excess = max(0, self.bad_excess - 1) if finite else self.bad_excess + 1
        self.bad_steps += not finite
        if finite:
            self.epoch_steps += 1
            for name, value in numbers.items():
                self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value


def fit(
    task: Task,
    params: TrainParams,
    *,
    accumulate: int = 1,
    save_every_steps: int,
    checkpointer: Checkpointer,
    snapshot: Callable[[int, nn.Module], None],
    watch: Watch,
) -> tuple[RunState, nn.Module]:
    """Train from the start, or from where an earlier call stopped.

    Args:
        task: model, batches, loss and evaluation, and the processes that train together; only rank 0 writes.
        params: epochs, precision, cadences, optimiser and schedule.
        accumulate: number of parts of each batch of a rank; they run one after the other and their gradients are
            averaged.
        save_every_steps: steps between two states saved within an epoch.
        checkpointer: saves and restores the training state.
        snapshot: called on rank 0 with the number of finished epochs, 0 before the first step, and the evaluated model.
        watch: logs and times the steps.

    Returns:
        The final state, and the model whose weights are the result. The state's curve has one row per epoch: the means
        of the training numbers over the finite steps and all ranks, and, where evaluated, the scores on the curve's
        split. The state's scores are those of that model on the reported split, on which no other model is evaluated.

    Raises:
        Interrupted: SIGINT or SIGTERM reached any rank; the running step was finished and the state saved.
        Diverged: too many non-finite steps, see `params.max_bad_steps`; or most steps of the last epoch, a final weight
            or a final score is not finite.
    """
    training, ranks, steps = TrainingState(task, params, accumulate), task.ranks, task.steps_per_epoch
    schedule = build_schedule(training.optimizer, params.optim, task.batch_size, params.epochs, steps)
    run = _restore(checkpointer, training, ranks)
    schedule.step_update(run.step)  # the rate of the next step
    if run.step == 0 and ranks.first:
        snapshot(0, training.evaluated)
    progress = Progress("step", params.epochs * steps, done=run.step, every_update=True, shown=ranks.first)
    with catch_signals(twice=ranks.world_size > 1) as received, progress, watch.follow(run.step):
        while len(run.curve) < params.epochs:
            # an epoch that was stopped before its evaluation has no batches left, and goes straight to it
            epoch = len(run.curve)
            start = run.step - epoch * steps  # batches of this epoch that are done
            task.model.train()
            if params.teacher_from is not None and epoch >= params.teacher_from * params.epochs:
                task.teacher = training.ema.module
            for number, batch in enumerate(watch.time_waiting(task.batches(epoch, start)), start):
                numbers = forward_backward(task, training, batch, params.optim.clip_grad_norm)
                not_finite = [name for name, value in numbers.items() if not math.isfinite(value)]
                # the ranks must agree: one that skipped a step or stopped alone would leave the others waiting
                bad, stop = ranks.any(bool(not_finite), bool(received))
                training.step(apply=not bad)
                run.count(numbers, finite=not bad)
                if run.bad_excess >= params.max_bad_steps:
                    names = ", ".join(dict.fromkeys(ranks.join(not_finite)))
                    fault = f"{names} not finite, and of late {run.bad_excess} more such steps than others"
                    require_sound(task, run.step, fault)
                rate = training.optimizer.param_groups[0]["lr"]
                images = task.batch_size // ranks.world_size
                if window := watch.step(run.step, epoch, numbers, rate, images, skipped=bad):
                    progress.update(run.step, format_window(window))
                schedule.step_update(run.step)
                # saved before the evaluation, which may take longer than the sender of a signal waits for this process
                # to end
                if stop or number + 1 == steps or run.step % save_every_steps == 0:
                    with watch.paused():
                        _save(checkpointer, run, training, ranks)
                    _stop_if(stop, received, run.step)
            if epoch + 1 == params.epochs:
                require_sound(task, run.step, find_fault(run, training, steps))
            with watch.paused():
                evaluate = (epoch + 1) % params.evaluate_every == 0 or epoch + 1 == params.epochs
                _end_epoch(task, run, training, evaluate)
                if ranks.first:
                    snapshot(epoch + 1, training.evaluated)
                progress.print(", ".join(f"{name} {value:.4g}" for name, value in run.curve[-1].items()))
            _stop_if(ranks.any(bool(received))[0], received, run.step)
        require_sound(task, run.step, _find_bad_score(run))
        # a call that is stopped here evaluates the last epoch again when it resumes
        if task.reported_split != task.curve_split:
            with watch.paused():
                run.scores = task.evaluate(training.evaluated, task.reported_split)
            progress.print(
                f"{task.reported_split}: " + ", ".join(f"{name} {value:.4g}" for name, value in run.scores.items())
            )
            require_sound(task, run.step, _find_bad_score(run))
            _stop_if(ranks.any(bool(received))[0], received, run.step)
    return run, training.evaluated


class TrainingState:
    """Everything that a step changes.

    `network` is the model or its parallel wrapper; `evaluated` is the moving average if there is one, else the model.
    """

    def __init__(self, task: Task, params: TrainParams, accumulate: int):
        self.model = self.network = self.evaluated = task.model
        self.marks = task.marks
        self.optimizer = task.build_optimizer(params.optim)
        if task.ranks.world_size > 1:
            own = [task.device.index] if task.device.type == "cuda" else None
            # each rank keeps its own batch-norm statistics during an epoch; `share_buffers` averages them before they
            # are used
            self.network = DistributedDataParallel(
                task.model, device_ids=own, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        self.ema = ModelEmaV3(task.model, decay=params.ema_decay) if params.ema_decay else None
        if self.ema is not None:
            self.evaluated = self.ema.module
        scaled = params.resolve_precision(task.device) == "fp16"
        self.scaler = torch.amp.GradScaler(task.device.type, init_scale=LOSS_SCALE, enabled=scaled)
        self.autocast = functools.partial(params.autocast, task.device)
        self.accumulate = accumulate

    def step(self, *, apply: bool) -> None:
        """Take the optimiser's step, unless `apply` is False."""
        if apply:
            self.scaler.step(self.optimizer)
            if self.ema is not None:
                self.ema.update(self.model)
        self.scaler.update()  # lowers the fp16 scale after an overflow, also for a skipped step

    @torch.no_grad()
    def share_buffers(self, ranks: Ranks) -> None:
        """Average the buffers over all ranks, and those of the moving average."""
        ranks.average([*self.model.buffers(), *(self.ema.module.buffers() if self.ema is not None else ())])

    def share_marks(self, ranks: Ranks) -> list[int]:
        """Mark on every rank what any rank has marked, and return the marked places."""
        if self.marks is None:
            return []
        self.marks[ranks.join(self.marks.nonzero().flatten().tolist())] = 1
        return self.marks.nonzero().flatten().tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save; the schedule needs no entry, since its rate is a function of the step alone."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load `state_dict`; raises PyTorch's own error where the state belongs to another model."""
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])

    def _parts(self) -> dict[str, Any]:
        """Return the parts of the state by their names in a saved file."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return parts | ({"ema": self.ema.module} if self.ema is not None else {})


def forward_backward(task: Task, training: TrainingState, batch: Any, clip_grad_norm: float | None) -> dict[str, float]:
    """Run a batch in parts, average the gradients over parts and ranks, and clip them.

    Returns:
        The numbers of the task's loss, averaged over the parts, and `grad_norm`, the gradients' norm before clipping.
        `runs.golden` compares it and `loss`, by these names.
    """
    training.optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {}
    parts = task.split(batch, training.accumulate)
    for i, part in enumerate(parts, 1):
        # the ranks reduce gradients once, with the last part
        waits = i < len(parts) and isinstance(training.network, DistributedDataParallel)
        with training.network.no_sync() if waits else contextlib.nullcontext():
            with training.autocast():
                losses = task.loss(training.network, part)
            training.scaler.scale(losses["loss"] / len(parts)).backward()
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value.detach() / len(parts)
    training.scaler.unscale_(training.optimizer)
    # with an infinite bound the norm is only measured
    sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(training.model.parameters(), clip_grad_norm or math.inf)
    # one transfer from the device for all values
    values = torch.stack([value.double() for value in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))


def _stop_if(stop: bool, received: list[int], step: int) -> None:
    """Raise `Interrupted` if any rank got a signal (`received` has this rank's); the state is already saved."""
    if stop:  # if received is empty, the signal came to another rank
        raise Interrupted(received[0] if received else signal.SIGTERM, f"the state after step {step} is saved")


def _end_epoch(task: Task, run: RunState, training: TrainingState, evaluate: bool) -> None:
    """Append the epoch's row to the curve, with scores if `evaluate`; `lr` is that of the first group of parameters.

    The length of the curve is the number of the running epoch: each epoch must append exactly one row. `runs.golden`
    takes every key of a row for a score, except for `epoch`, `step`, `lr` and those that begin with `train_`.
    """
    # every rank counts the same finite steps; without one there are no sums either
    steps = max(1, run.epoch_steps) * task.ranks.world_size
    means = {
        f"train_{name}": total / steps
        for name, total in zip(run.epoch_sums, task.ranks.sum([*run.epoch_sums.values()]))
    }
    training.evaluated.eval()
    run.scores = task.evaluate(training.evaluated, task.curve_split) if evaluate else {}
    rate = training.optimizer.param_groups[0]["lr"]
    run.curve.append({"epoch": len(run.curve) + 1, "step": run.step, "lr": rate, **means, **run.scores})
    run.epoch_sums, run.epoch_steps = {}, 0


def _find_bad_score(run: RunState) -> str | None:
    """Return which score of the last evaluation is not finite, as a fault of the run; None if all are finite."""
    return next(
        (f"the final {name} is {value}" for name, value in run.scores.items() if not math.isfinite(value)), None
    )


def _save(checkpointer: Checkpointer, run: RunState, training: TrainingState, ranks: Ranks) -> None:
    """Save the state of all ranks on rank 0, after averaging the buffers over the ranks; every rank must call it.

    Every evaluation follows a save at an epoch's end: the buffers that are scored are those that are saved.
    """
    training.share_buffers(ranks)
    marked = training.share_marks(ranks)
    # each rank's own, by rank; all the rest is equal on every rank
    everyone = ranks.gather({"rng": rng_state(), "sums": run.epoch_sums})
    if ranks.first:
        saved = {"run": dataclasses.asdict(run), "ranks": everyone, "accumulate": training.accumulate, "marked": marked}
        checkpointer.save(run.step, saved | training.state_dict())


def _restore(checkpointer: Checkpointer, training: TrainingState, ranks: Ranks) -> RunState:
    """Load the saved state and the random generators, or return a new state.

    Nothing may draw a random number between this call and the first batch: the resumed run would differ from an
    uninterrupted one.
    """
    saved = checkpointer.restore() if ranks.first else None
    saved = ranks.from_first(saved)
    if saved is None:
        return RunState()
    try:
        everyone = saved["ranks"]
        training.load_state_dict(saved)
        run = RunState(**{**saved["run"], "epoch_sums": everyone[ranks.rank]["sums"]})
    except torch.OutOfMemoryError:  # a RuntimeError, but the state may be good
        raise
    except (RuntimeError, ValueError, KeyError, TypeError):
        what = "the state of another model, or of other code"
        raise UserError(f"{checkpointer.folder}: holds {what}; remove the folder to start again") from None
    if saved["accumulate"] != training.accumulate:
        raise UserError(
            f"{checkpointer.folder}: the run was stopped with its batches cut into {saved['accumulate']} part(s), and now they are cut into "
            f"{training.accumulate}; set the same runtime.micro_batch, or remove the folder to start again"
        )
    if training.marks is not None:
        training.marks[saved.get("marked", [])] = 1  # older states lack it
    set_rng_state(everyone[ranks.rank]["rng"])
    return run
