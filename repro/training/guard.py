"""Ends of a run that diverged: too many steps with a non-finite loss or gradient, or non-finite weights."""

from typing import Any

from ..core.errors import Diverged


def find_fault(run: Any, training: Any, steps: int) -> str | None:
    """Return why a training has no result before its last evaluation, or None.

    Faults are a last epoch in which most steps were not finite, and any non-finite weight. Persistent buffers count as
    weights: one that holds infinity, such as a mask, would end every training here.

    Args:
        run, training: the `RunState` and `TrainingState` of `repro.training.loop`, after the last step.
        steps: steps per epoch.
    """
    if 2 * run.epoch_steps < steps:
        return f"loss or gradient not finite in {steps - run.epoch_steps} of the last epoch's {steps} steps"
    for what, model in (("weight", training.model), ("moving average", training.evaluated)):
        for name, value in model.state_dict().items():
            if not value.isfinite().all():
                return f"{what} {name} not finite"
    return None


def require_sound(task: Any, step: int, fault: str | None) -> None:
    """Raise `Diverged` with the files of the last batch of all ranks, unless `fault` is None.

    Every rank must call it with the same fault, since they exchange the files. A search of rates takes this error, and
    no other, for the outcome of a trial (`runs.tune`).

    Args:
        task: the `Task` of `repro.training.loop`.
        step: number of the last step in the run, from 1 on.
        fault: why the run has no result, for the message.
    """
    if fault is None:
        return
    every = task.ranks.join(task.describe(*divmod(step - 1, task.steps_per_epoch)))
    raise Diverged(step, f"step {step}: {fault}; the {len(every)} files of its batch: {', '.join(every)}")
