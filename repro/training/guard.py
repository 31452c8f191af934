"""Too many steps whose loss or gradient is not finite end a run, as do weights that are not; the last step is
explained.

The dump holds what is needed to run the step again (weights, random states, the batch's place) and what was seen:
statistics of every layer's output and every parameter's gradient, and what the task adds, like the inner losses of TTT
layers.
"""

import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import Diverged, UserError
from ..core.hashing import require_intact_zip
from ..core.record import atomic
from .checkpoint import set_rng_state

_KEYS = {"step", "epoch", "number", "world_size", "accumulate", "scale", "model", "ranks"}


def find_fault(run: Any, training: Any, steps: int) -> str | None:
    """Why a training, before its last evaluation, has no result: most of the last epoch's steps or any weight not
    finite; None if it has.

    Args:
        run, training: the `RunState` and `TrainingState` of `repro.training.loop`, after the last step.
        steps: of an epoch.
    """
    if 2 * run.epoch_steps < steps:
        return f"loss or gradient not finite in {steps - run.epoch_steps} of the last epoch's {steps} steps"
    for what, model in (("weight", training.model), ("moving average", training.evaluated)):
        for name, value in model.state_dict().items():
            if not value.isfinite().all():
                return f"{what} {name} not finite"
    return None


def dump_bad_step(
    folder: Path, task: Any, training: Any, step: int, place: tuple[int, int], batch: Any, rng: Any, why: str
) -> None:
    """Write `bad_step_<step>.pt` and end the run.

    Args:
        folder: where the dump goes.
        task, training: the `Task` and `TrainingState` of `repro.training.loop`, after the step.
        step, place: the step's number in the run, and its epoch and number in the epoch, which count from 0.
        batch: this rank's batch of the step.
        rng: the random states before the step.
        why: the run ends, for the message.

    Raises:
        Diverged: always.
    """
    (epoch, number), scale = place, training.scaler.get_scale()
    set_rng_state(rng)
    statistics = diagnose(task, batch, training.autocast, training.accumulate, scale)
    seen = task.ranks.gather({"rng": rng, "batch": task.describe(epoch, number), "statistics": statistics})
    path = folder / f"bad_step_{step:09d}.pt"
    if task.ranks.first:
        content = {"step": step, "epoch": epoch, "number": number, "world_size": task.ranks.world_size}
        content |= {"accumulate": training.accumulate, "scale": scale, "model": task.model.state_dict(), "ranks": seen}
        if task.teacher is not None:
            content["teacher"] = task.teacher.state_dict()
        with atomic(path) as temporary:
            torch.save(content, temporary)
    first = statistics["first_not_finite"]
    raise Diverged(
        step,
        f"step {step}: {why}{f'; the first output that is not: {first}' if first else ''}; the last step is in {path}; "
        "`repro pretrain --replay-bad-step FILE` runs that of a classifier again",
    )


def load_dump(path: Path) -> dict[str, Any]:
    """Read what `dump_bad_step` wrote.

    Raises:
        UserError: no such file, a damaged one, or not a dump.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        require_intact_zip(path)
        with warnings.catch_warnings(action="ignore"):  # about pickles that PyTorch did not write
            dump = torch.load(path, map_location="cpu", weights_only=True)
    # unpickling a damaged file may raise anything; PyTorch's advice for other objects is to trust them
    except Exception as error:
        why = (
            "no pickle of plain data"
            if isinstance(error, pickle.UnpicklingError)
            else " ".join(str(error).split())[:200]
        )
        raise UserError(f"{path}: not a dump of a bad step: {why}") from None
    if not isinstance(dump, dict) or not dump.keys() >= _KEYS:
        raise UserError(f"{path}: not a dump of a bad step")
    return dump


def diagnose(
    task: Any, batch: Any, autocast: Callable[[], Any], accumulate: int = 1, scale: float = 1.0
) -> dict[str, Any]:
    """Run a batch forward and backward on the model, cut and scaled as in training, and report every layer's output in
    order.

    Returns:
        For the first part that is not finite, else for the last one: {part, loss, outputs {module: {absmax, mean,
            not_finite}},
        gradients {parameter: the same}, first_not_finite, own}: absmax and mean over the finite elements, `own`
        is what `task.inspect(batch)` returns. The weights stay as they are.
    """
    for part, piece in enumerate(task.split(batch, accumulate), 1):
        found = {"part": part, **_diagnose_part(task, piece, autocast, scale / accumulate)}
        bad_gradient = any(seen["not_finite"] for seen in found["gradients"].values())
        if bad_gradient or not math.isfinite(found["loss"]):
            break
    return {**found, "own": task.inspect(piece)}


def _diagnose_part(task: Any, piece: Any, autocast: Callable[[], Any], scale: float) -> dict[str, Any]:
    outputs: dict[str, dict[str, float]] = {}
    names = {module: name or "model" for name, module in task.model.named_modules()}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            outputs.setdefault(names[module], summary(tensor))

    parameters = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    hooks = [module.register_forward_hook(note) for module in names]
    try:
        # code that torch.compile made before the hooks were there does not call them
        with torch.compiler.set_stance("force_eager"):
            with autocast():
                # not its parallel wrapper: the other ranks may be elsewhere
                loss = task.loss(task.model, piece)["loss"]
            gradients = torch.autograd.grad(loss * scale, [*parameters.values()], allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "loss": float(loss.detach()),
        "outputs": outputs,
        "gradients": {name: summary(g) for name, g in zip(parameters, gradients, strict=True) if g is not None},
        "first_not_finite": next((name for name, seen in outputs.items() if seen["not_finite"]), None),
    }


def summary(x: Tensor) -> dict[str, float]:
    """The largest magnitude and the mean of the finite elements, and the number of the others."""
    x = x.detach().double()
    finite = x[x.isfinite()]
    many = finite.numel()
    return {
        "absmax": float(finite.abs().max()) if many else math.nan,
        "mean": float(finite.mean()) if many else math.nan,
        "not_finite": x.numel() - many,
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
