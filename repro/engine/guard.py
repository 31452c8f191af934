"""What becomes of a step whose loss or gradient is not finite: skipped, counted, and after too many in a row explained.

The dump holds what is needed to run the step again (weights, generators, which batch) and what was seen: statistics of every
layer's output and every parameter's gradient, and what the task has to say of its own, like the inner losses of TTT layers.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import RunError, UserError
from ..core.ranks import Ranks
from ..core.record import atomic
from .checkpoint import rng_state, set_rng_state


@dataclasses.dataclass(kw_only=True)
class Guard:
    """Counts steps that are not finite.

    Args:
        folder: where a dump is written.
        limit: how many in a row end the run.
        in_a_row, total: of them so far; part of the training state.
    """

    folder: Path
    limit: int
    in_a_row: int = 0
    total: int = 0

    def remember(self) -> None:
        """Before a step: the generators' states, with which it could be run again."""
        self._rng = rng_state()

    def judge(self, finite: bool) -> bool:
        """After a step: count it; whether the run must end."""
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.total += not finite
        return self.in_a_row >= self.limit

    def dump(self, task: Any, batch: Any, *, step: int, epoch: int, number: int, autocast: Any, ranks: Ranks) -> None:
        """Write `bad_step_<step>.pt` and end the run.

        Args:
            task: see `repro.engine.loop.Task`.
            batch: this rank's, of the step.
            step: finished steps before it. epoch, number: of the batch within the epoch.
            autocast: a context manager, as in training.

        Raises:
            RunError: always.
        """
        set_rng_state(self._rng)
        seen = ranks.gather({"rng": self._rng, "batch": task.describe(epoch, number), "statistics": diagnose(task, batch, autocast)})
        path = self.folder / f"bad_step_{step + 1:09d}.pt"
        if ranks.first:
            content = {"step": step, "epoch": epoch, "number": number, "world_size": ranks.world_size}
            with atomic(path) as temporary:
                torch.save({**content, "model": task.model.state_dict(), "ranks": seen}, temporary)
        raise RunError(
            f"step {step + 1}: loss or gradient not finite, {self.limit} steps in a row; the last is in {path}: "
            f"`repro pretrain --replay-bad-step {path}` runs it again"
        )


def load_dump(path: Path) -> dict[str, Any]:
    """What `Guard.dump` wrote.

    Raises:
        UserError: no such file, or not one of these.
    """
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # whatever unpickling a damaged file may raise
        raise UserError(f"{path}: is no dump of a bad step: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(dump, dict) or not {"step", "epoch", "number", "world_size", "model", "ranks"} <= dump.keys():
        raise UserError(f"{path}: is no dump of a bad step")
    return dump


def diagnose(task: Any, batch: Any, autocast: Any) -> dict[str, Any]:
    """Run a batch forward and backward on the bare model and say what every layer gave, in order.

    Returns:
        {loss, outputs {module: {absmax, mean, not_finite}}, gradients {parameter: the same}, first_not_finite, own}: absmax and
        mean over the finite elements, `own` what `task.inspect(batch)` returns. The weights are left as they are.
    """
    outputs: dict[str, dict[str, float]] = {}
    names = {module: name or "model" for name, module in task.model.named_modules()}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            outputs.setdefault(names[module], summary(tensor))

    hooks = [module.register_forward_hook(note) for module in names]
    network, task.network = task.network, task.model  # not the parallel one: the other ranks may be elsewhere
    try:
        with autocast:
            loss = task.loss(batch)["loss"]
        gradients = torch.autograd.grad(loss, list(task.model.parameters()), allow_unused=True)
    finally:
        task.network = network
        for hook in hooks:
            hook.remove()
    parameters = [name for name, _ in task.model.named_parameters()]
    return {
        "loss": float(loss.detach()),
        "outputs": outputs,
        "gradients": {name: summary(g) for name, g in zip(parameters, gradients, strict=True) if g is not None},
        "first_not_finite": next((name for name, seen in outputs.items() if seen["not_finite"]), None),
        "own": task.inspect(batch),
    }


def summary(x: Tensor) -> dict[str, float]:
    """The largest magnitude and the mean of the finite elements, and how many are not."""
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
