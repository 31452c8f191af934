"""Too many steps in a row whose loss or gradient is not finite end a run, and the last one is explained.

The dump holds what is needed to run the step again (weights, random states, the batch's place) and what was seen: statistics of
every layer's output and every parameter's gradient, and what the task adds, like the inner losses of TTT layers.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import Diverged, UserError
from ..core.record import atomic
from .checkpoint import set_rng_state

_KEYS = {"step", "epoch", "number", "world_size", "accumulate", "scale", "model", "ranks"}


def dump_bad_step(folder: Path, task: Any, training: Any, run: Any, batch: Any, number: int, rng: dict[str, Any]) -> None:
    """Write `bad_step_<step>.pt` and end the run.

    Args:
        folder: where the dump goes.
        task, training, run: the `Task`, `TrainingState` and `RunState` of `repro.training.loop`, after the step.
        batch, number: this rank's batch of the step, and its number in the epoch.
        rng: the random states before the step.

    Raises:
        Diverged: always.
    """
    step, epoch, scale = run.step, len(run.curve), training.scaler.get_scale()
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
    raise Diverged(
        step,
        f"step {step}: loss or gradient not finite, {run.bad_in_a_row} steps in a row; the last one is in {path}: "
        f"for a classifier, `repro pretrain --replay-bad-step {path}` runs it again",
    )


def load_dump(path: Path) -> dict[str, Any]:
    """Read what `dump_bad_step` wrote.

    Raises:
        UserError: no such file, or not a dump.
    """
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # unpickling a damaged file may raise anything
        raise UserError(f"{path}: not a dump of a bad step: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(dump, dict) or not dump.keys() >= _KEYS:
        raise UserError(f"{path}: not a dump of a bad step")
    return dump


def diagnose(task: Any, batch: Any, autocast: Callable[[], Any], accumulate: int = 1, scale: float = 1.0) -> dict[str, Any]:
    """Run a batch forward and backward on the model, cut and scaled as in training, and report every layer's output in order.

    Returns:
        For the first part that is not finite, else for the last one: {part, loss, outputs {module: {absmax, mean, not_finite}},
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
                loss = task.loss(task.model, piece)["loss"]  # not its parallel wrapper: the other ranks may be elsewhere
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
