"""Too many steps whose loss or gradient is not finite end a run, as do weights that are not."""

from typing import Any, NoReturn

from ..core.errors import Diverged


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


def end_run(task: Any, step: int, why: str) -> NoReturn:
    """End the run, and name the files of its last batch, of all ranks.

    Args:
        task: the `Task` of `repro.training.loop`.
        step: the number of the last step in the run, from 1 on.
        why: the run ends, for the message.

    Raises:
        Diverged: always.
    """
    names = task.describe(*divmod(step - 1, task.steps_per_epoch))
    every = [name for of_rank in task.ranks.from_first(task.ranks.gather(names)) for name in of_rank]
    raise Diverged(step, f"step {step}: {why}; the {len(every)} files of its batch: {', '.join(every)}")
