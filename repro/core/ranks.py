"""The processes of one training under torchrun: the own rank, and reductions over all ranks.

Without torchrun there is one process. Then no process group is initialised, and every reduction returns its argument.
"""

import contextlib
import dataclasses
import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .children import PARENT, catch_signals, describe_death
from .errors import Interrupted, RunError, UserError
from .paths import find_root
from .runtime import load_runtime

_TIMEOUT_MINUTES = 10.0  # an exchange between ranks fails after this, as when one of them is gone
_RESTARTS = 1  # of all processes by torchrun after one has failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among those that train together, with torchrun's names.

    From `any` on, every method is an exchange that all ranks must call, in the same order. A call that only rank 0
    makes waits until the timeout, and a run of one process does not show it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """True in rank 0, which alone writes and prints."""
        return self.rank == 0

    def share(self, total: int, what: str) -> int:
        """Divide a total by the number of processes; raise a UserError if it is not divisible."""
        if total % self.world_size:
            raise UserError(
                f"{what}: {total} is not divisible by {self.world_size} processes; choose --gpus so that it is"
            )
        return total // self.world_size

    def any(self, *flags: bool) -> list[bool]:
        """Combine flags over the ranks by `or`, in one exchange."""
        return [value > 0 for value in self.sum([float(flag) for flag in flags])]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the ranks, in fp64, in which counts of samples are exact."""
        if self.world_size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        device = f"cuda:{self.local_rank}" if dist.get_backend() == "nccl" else "cpu"
        together = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(together)
        return together.tolist()

    def average(self, tensors: Sequence[Any]) -> None:
        """Set each floating tensor, in place, to its mean over the ranks, taken in fp64; one exchange for all."""
        tensors = [x for x in tensors if x.is_floating_point()]
        if self.world_size == 1 or not tensors:
            return
        import torch
        import torch.distributed as dist

        together = torch.cat([x.detach().double().flatten() for x in tensors])
        dist.all_reduce(together)
        for x, mean in zip(tensors, (together / self.world_size).split([x.numel() for x in tensors]), strict=True):
            x.copy_(mean.view_as(x))

    def gather(self, value: Any) -> list[Any]:
        """Gather a small picklable value of every rank, in their order, on rank 0; return [] on the others."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] | None = [None] * self.world_size if self.first else None
        dist.gather_object(value, found)
        return found or []

    def join(self, values: Sequence[Any]) -> list[Any]:
        """Concatenate the sequences of all ranks, in their order; every rank gets the result."""
        return [value for of_rank in self.from_first(self.gather(values)) for value in of_rank]

    def from_first(self, value: Any) -> Any:
        """Broadcast rank 0's value to every rank."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        holder = [value]
        dist.broadcast_object_list(holder)
        return holder[0]


def launch_ranks(processes: int, arguments: list[str]) -> None:
    """Run `repro ARGUMENTS` under torchrun in `processes` processes on this machine.

    If a process fails, torchrun ends the others and starts all of them again, up to `_RESTARTS` times; they continue
    from the last saved state of the training, and train the cells of the graph before it again. SIGINT and SIGTERM are
    passed on, and every process then finishes its step and saves.

    Raises:
        UserError: there are fewer GPUs than processes; on CPUs it runs only with `runtime.device: cpu`.
        Interrupted: a signal ended the run.
        RunError: the run failed.
    """
    require_gpus(processes, load_runtime(find_root()).device)
    run = [sys.executable, "-m", "repro.core.children", "torch.distributed.run", "--standalone"]
    run += [f"--nproc-per-node={processes}", f"--max-restarts={_RESTARTS}", "-m", "repro", *arguments]
    with catch_signals(twice=True) as received:
        # in its own session, so that a Ctrl-C in the terminal reaches it once, through this process
        child = subprocess.Popen(run, env=os.environ | {PARENT: str(os.getpid())}, start_new_session=True)
        while child.poll() is None:
            if received:
                child.send_signal(signal.SIGTERM)  # and once more after each minute that it still runs
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=60 if received else 0.5)
    if received and child.returncode:
        raise Interrupted(received[0], "the last saved state is kept")
    if death := describe_death(child.returncode):
        raise RunError(
            f"a process was {death}, or by torchrun since another failed with the error above; the last saved state is kept"
        )
    if child.returncode:
        raise RunError(f"torchrun ended with code {child.returncode}; the first error above says why")


def require_gpus(processes: int, device: str) -> None:
    """Raise a UserError if this machine has fewer GPUs than processes, unless `device` is `cpu`."""
    if device == "cpu":
        return
    import torch

    if (found := torch.cuda.device_count()) < processes:
        raise UserError(
            f"--gpus {processes}: PyTorch sees {found} here; with runtime.device: cpu they would be processes on the CPU"
        )


def in_torchrun() -> bool:
    """Tell whether torchrun started this process as one of a training's ranks."""
    return "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined(device_type: str) -> Iterator[Ranks]:
    """Open the process group of this run within the context and yield its ranks: NCCL for `cuda`, gloo for `cpu`.

    Raises:
        UserError: torchrun's variables are incomplete, or name more processes than this machine has GPUs.
    """
    if not in_torchrun():
        yield Ranks()
        return
    if missing := {"RANK", "LOCAL_RANK"} - os.environ.keys():
        raise UserError(f"torchrun's variables {', '.join(missing)} are missing; start with --gpus N or torchrun")
    import torch
    import torch.distributed as dist

    ranks = Ranks(**{name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")})
    if device_type == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {ranks.local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(ranks.local_rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=_TIMEOUT_MINUTES))
    try:
        yield ranks
    except Interrupted:  # all ranks stop at the same step, so none waits in a collective
        dist.destroy_process_group()
        raise
    # after any other error, other ranks may hang in a collective, and destroying the group would wait for them;
    # torchrun ends them instead
    dist.destroy_process_group()
