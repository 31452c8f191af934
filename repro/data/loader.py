"""Loaders whose sequence can be stopped after any batch and resumed, with any number of worker processes.

The order is a function of (seed, epoch), and a sample's augmentation is one of (seed, epoch, index). The only state is
therefore the epoch and the batch number, which the training loop knows anyway.
"""

import atexit
import contextlib
import dataclasses
import pickle
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..core.errors import RunError, UserError
from ..core.runtime import choose_workers, measure_shared_memory

Keys = list[tuple[int, int]]  # (epoch or pass over the data, index) of each sample of a batch
_AMPLE = 2**30  # bytes of free shared memory from which workers send tensors through it, and not through pipes


class Samples(Protocol):
    """A data set for a loader: its items are indexed by (epoch, index), which also seed its random augmentation."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: tuple[int, int]) -> Any: ...

    def collate(self, samples: list[Any]) -> tuple:
        """Make a batch of these items; called in the process that loaded them."""

    def name(self, index: int) -> str:
        """Return an item's name for messages, such as its path relative to the split's folder."""


@contextlib.contextmanager
def own_randomness(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed Python, NumPy and torch from (seed, epoch, index), and restore their states afterwards in the main process.

    Transforms of timm, torchvision and mmseg draw from these global generators. Without restoring them, a loader
    without workers would change the randomness of the training step, and a resumed run would differ from an
    uninterrupted one. In a worker process nothing else draws, so skipping the restoration saves 70 microseconds per
    image.
    """
    before = None if get_worker_info() else (random.getstate(), np.random.get_state(), torch.get_rng_state())
    # the first number keeps these seeds apart from those of `TrainOrder._order`
    for_python, for_numpy, for_torch = np.random.SeedSequence((1, seed, epoch, index)).generate_state(3).tolist()
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would also reseed every GPU
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


@dataclasses.dataclass
class TrainOrder:
    """Batches of (epoch, index) keys: a fresh permutation per epoch, cut into batches, each divided among ranks.

    A remainder smaller than a total batch is dropped; each epoch drops other samples. For recipes that count steps,
    `batches_per_epoch` is the length of an epoch, and epochs continue through the passes over the data.

    With `groups`, both samples of each pair in a batch are of one group, such as wide images, which reduces padding.
    Grouping pairs instead of whole batches follows the published recipes, which put 2 images on a GPU, and keeps the
    total batches the same on any number of processes.
    """

    size: int  # number of samples
    batch_size: int  # samples per rank
    seed: int  # seed of the permutations
    rank: int = 0  # this process among those that train together
    world_size: int = 1
    groups: np.ndarray | None = None  # (size,) group of each sample
    batches_per_epoch: int | None = None  # None makes an epoch one pass over the data

    def __post_init__(self) -> None:
        self._of_a_pass = self.size // (self.batch_size * self.world_size)  # batches in one pass over the data
        if self._of_a_pass == 0:
            found = f"batch size {self.batch_size} on {self.world_size} process(es): there are only {self.size} training images"
            raise UserError(f"{found}; make it smaller")

    def __len__(self) -> int:
        """Return the number of batches of an epoch on each rank."""
        return self.batches_per_epoch or self._of_a_pass

    def batches(self, epoch: int, start: int) -> Iterator[Keys]:
        """Yield the keys of an epoch's batches from number `start` on; a key is (pass over the data, index)."""
        order, ordered = np.empty(0, dtype=np.int64), -1
        for number in range(start, len(self)):
            number_of_pass, place = divmod(epoch * len(self) + number, self._of_a_pass)
            if number_of_pass != ordered:
                order, ordered = self._order(number_of_pass), number_of_pass
            first = (place * self.world_size + self.rank) * self.batch_size
            yield [(number_of_pass, index) for index in order[first : first + self.batch_size].tolist()]

    def _order(self, number_of_pass: int) -> np.ndarray:
        """Return the indices of all samples (size,) in the order of one pass, the same on every rank."""
        # the first number separates the generators of orders (0) from those of samples (1)
        sequence = np.random.SeedSequence((0, self.seed, number_of_pass))
        order = np.random.Generator(np.random.PCG64(sequence)).permutation(self.size)
        return order if self.groups is None else _pair_up(order, self.groups)


def _pair_up(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Reorder samples into pairs of one group, each at the position of its second sample; unpaired ones come last.

    Args:
        order: (N,) the permutation, as indices of samples.
        groups: (N,) the group of each sample, by its index.
    """
    pairs, alone = [], []
    # a stable sort keeps the order of the permutation within each group
    in_order = groups[order]
    by_group = in_order.argsort(kind="stable")
    for places in np.split(by_group, np.flatnonzero(np.diff(in_order[by_group])) + 1):
        whole = len(places) // 2 * 2
        pairs.append(places[:whole].reshape(-1, 2))
        alone.append(places[whole:])
    together = np.concatenate(pairs)
    return order[np.concatenate([together[together[:, 1].argsort()].ravel(), *alone])]


class EvalOrder:
    """Every sample exactly once over all ranks, in order; arguments as for `TrainOrder`.

    The last batch may be smaller than `batch_size`, and the ranks' numbers of samples may differ by one. Sample n of
    rank r has the index r + n · world_size, from which `Generation.evaluate` draws the sample's noise.

    Raises:
        UserError: there are fewer samples than ranks.
    """

    def __init__(self, size: int, batch_size: int, rank: int = 0, world_size: int = 1):
        if size < world_size:  # a rank without a batch would know neither the losses' names nor the number of classes
            raise UserError(f"{size} held-out image(s) for {world_size} processes; start at most {size}")
        self._mine = range(rank, size, world_size)
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of batches on this rank; ranks may differ by one."""
        return -(-len(self._mine) // self._batch_size)

    def batches(self, epoch: int, start: int) -> Iterator[Keys]:
        """Yield the keys of this rank's batches from number `start` on; a key is (epoch, index)."""
        for number in range(start, len(self)):
            yield [(epoch, index) for index in self._mine[number * self._batch_size : (number + 1) * self._batch_size]]


class _Keys:
    """Sampler of a DataLoader: the rest of one epoch of an order, from the batch number `start` on.

    A DataLoader keeps its sampler and its workers, so `_Loader.batches` sets `epoch` and `start` for each pass.
    """

    def __init__(self, order: TrainOrder | EvalOrder):
        self.order, self.epoch, self.start = order, 0, 0

    def __iter__(self) -> Iterator[Keys]:
        return self.order.batches(self.epoch, self.start)


class _Batches(Dataset):
    """The batches of a data set as the items of a DataLoader: an item's index is the keys of its samples.

    With `piped` a batch is pickled, since a DataLoader sends bytes through a pipe, and tensors through shared memory.
    """

    def __init__(self, samples: Samples, *, piped: bool):
        self.samples, self.piped = samples, piped

    def __getitem__(self, keys: Keys) -> tuple | bytes | UserError:
        """Load a batch. A UserError is returned: a DataLoader would add the traceback of a worker to its message."""
        try:
            batch = self.samples.collate([self.samples[key] for key in keys])
        except UserError as error:
            return error
        return pickle.dumps(batch, pickle.HIGHEST_PROTOCOL) if self.piped else batch


class _Loader:
    """A DataLoader whose workers outlive epochs, ignore SIGINT and SIGTERM, and are ended by `close`."""

    _order: type[TrainOrder | EvalOrder]

    def __init__(self, dataset: Samples, *, workers: int = 0, device: torch.device | str = "cpu", **order: Any):
        self.dataset = dataset
        self._keys = _Keys(self._order(len(dataset), **order))
        workers = choose_workers(workers)
        # containers often have 64 MB of shared memory, and workers that put tensors there are killed; they send bytes
        # through a pipe instead
        self._piped = workers > 0 and measure_shared_memory() < _AMPLE
        self._loader: DataLoader | None = DataLoader(
            _Batches(dataset, piped=self._piped),
            batch_size=None,  # an item is a batch
            sampler=self._keys,
            collate_fn=_keep,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.device(device).type == "cuda",
            worker_init_fn=_ignore_signals,
            # DataLoader draws a base seed for each iterator, by default from the global generator, which would change
            # training
            generator=torch.Generator(),
        )
        self._iterator: Iterator | None = None
        self._end_workers: weakref.finalize | None = None

    def __len__(self) -> int:
        """Return the number of batches per epoch on this rank."""
        return len(self._keys.order)

    def close(self) -> None:
        """End the worker processes. The loader cannot be used afterwards."""
        if self._end_workers is not None:
            self._end_workers()
        self._iterator = None
        self._loader = None

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple]:
        """Yield an epoch's batches from number `start` on, the same as those of an uninterrupted run.

        Use one pass at a time: after a second call, an earlier generator would yield the batches of the later one.
        """
        if self._loader is None:
            raise RuntimeError("this loader was closed")
        self._keys.epoch, self._keys.start = epoch, start
        with _keep_signals():
            self._iterator = iter(self._loader)
        if self._loader.num_workers and self._end_workers is None:
            # DataLoader ends its workers too late while a traceback still refers to its iterator. At exit,
            # multiprocessing would send SIGTERM, which our workers ignore, and wait for ever. So they are ended when
            # this object is collected, and at exit before multiprocessing's handler, since handlers run in reverse
            # order of registration.
            self._end_workers = weakref.finalize(self, _end_workers, self._iterator)
            atexit.register(self._end_workers)
        while (batch := self._next()) is not None:
            yield tuple(pickle.loads(batch) if self._piped else batch)

    def _next(self) -> Any:
        """Return the next batch, pickled if `_piped`; None after the last one. Raises as `TrainLoader`."""
        try:
            batch = next(self._iterator, None)
        except (RuntimeError, OSError, EOFError):
            # a dead worker may cause any of these errors, depending on when it died
            workers = getattr(self._iterator, "_workers", [])
            if not workers or not wait([worker.sentinel for worker in workers], timeout=1):
                raise
            raise RunError("a loading process died, most likely for lack of memory; lower runtime.workers") from None
        if isinstance(batch, UserError):
            raise batch
        return batch


class TrainLoader(_Loader):
    """Training batches from the data set's `collate`.

    Args:
        dataset: see `Samples`.
        workers: processes that decode and augment; 0 uses this process. The batches are the same.
        device: the device of the batches' consumer; for CUDA they are put into page-locked memory.
        order: batch_size, seed, and the other arguments of `TrainOrder`.

    Raises:
        UserError: there are fewer samples than one total batch; while iterating, too many files are unreadable.
        RunError: while iterating, a worker process died.
    """

    _order = TrainOrder

    def files(self, epoch: int, number: int) -> list[str]:
        """Return the names of one batch's items."""
        return [self.dataset.name(index) for _, index in next(self._keys.order.batches(epoch, number))]


class EvalLoader(_Loader):
    """Every sample exactly once over all ranks, in order, from the start each time; `order` is that of `EvalOrder`.

    Other arguments and errors are those of `TrainLoader`.
    """

    _order = EvalOrder

    def __iter__(self) -> Iterator[tuple]:
        return self.batches(0)


def _keep(batch: Any) -> Any:
    """Return an item as it is, in place of the conversion to tensors that a DataLoader applies by default."""
    return batch


def _end_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator, by force where one does not end by itself."""
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # it waits for a lock that another worker held when it died
            worker.kill()
            worker.join()


def _ignore_signals(worker_id: int) -> None:
    """Ignore signals to the process group, which must not end workers before the main process has saved its state."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def _keep_signals() -> Iterator[None]:
    """Block and restore signals around the start of worker processes.

    SIGINT and SIGTERM are blocked: a worker that is forked inside inherits this, and cannot be hit before it ignores
    them. DataLoader's SIGCHLD handler is removed: when a worker dies it raises wherever the main process happens to be,
    in the middle of a training step or of saving. Waiting for a batch notices the death too, within five seconds, and
    its error is handled.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        # Windows has no pthread_sigmask; elsewhere only the main thread may set handlers, as DataLoader knows too
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    on_child = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if on_child is not None:  # None was set outside of Python and cannot be restored from here
            signal.signal(signal.SIGCHLD, on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
