"""The speed of the training loader against a bare loop of decoding and transforming: the rest is its own cost."""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from ...core.errors import UserError
from ...core.runtime import choose_workers
from ..classification import ImageFolder, read_rgb, train_transform
from ..findings import count
from ..loader import TrainLoader, TrainOrder
from ..pixels import MAX_PIXELS
from ..settings import TransformSettings
from ..tree import Source, scan_tree

# the recipe of a long run, equal to that of profiles/paper.yaml, as a test verifies
TRANSFORM = TransformSettings(image_size=224, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
_BATCH_SIZE = 64
_SEED = 0


def measure_speed(
    root: Path,
    kind: str,
    workers: int,
    *,
    batches: int = 8,
    rounds: int = 3,
    max_pixels: int = MAX_PIXELS,
    log: Callable[[str], None] = print,
) -> tuple[int, list[float], list[float]]:
    """Time the loader and the bare loop in turns, on the training images of a tree.

    The loader's share is order, decoding, transform, batching, and transfer to the main process; in the bare loop as
    many processes only decode and transform the same files.

    Args:
        root, kind: the folder that holds the splits, and the data set's kind.
        workers: number of processes of each; at least 1.
        batches: of 64 images, which a round times after two per worker that it does not; rounded up to full turns of
            the workers.
        rounds: how often both take turns, so that other load on the machine affects both; the range shows how much
            there was.

    Returns:
        Images that were timed in a round; images per second over all processes, of the loader and of the bare loop.

    Raises:
        UserError: training would refuse the tree, or one of its images cannot be read.
        RunError: a loading process died.
    """
    if not choose_workers(workers):
        raise UserError("processes cannot be started without shared memory")
    tree = dataclasses.replace(scan_tree(root, kind), max_pixels=max_pixels)
    run = functools.partial(_run_bare_loop, upright=tree.kind.upright, max_pixels=max_pixels)
    size = len(tree.splits["train"].names)
    batch_size = min(_BATCH_SIZE, size)
    # workers take turns batch by batch, so anything but full turns favours those that come first
    warm, timed = 2 * workers, max(-(-batches // workers), 4) * workers
    order = TrainOrder(size, batch_size, _SEED)
    batches_of_keys = (keys for epoch in itertools.count() for keys in order.batches(epoch, 0))
    sources = [
        tree.source("train", index) for keys in itertools.islice(batches_of_keys, warm + timed) for _, index in keys
    ]
    for source in sorted(set(sources)):
        source.read()  # neither measurement shall pay for the disk
    dataset = ImageFolder(tree, "train", train_transform(TRANSFORM), seed=_SEED)
    shares = [sources[warm * batch_size :][place::workers] for place in range(workers)]
    loader_rates, bare_rates = [], []
    for number in range(rounds):
        log(f"timing the loader and the bare loop, round {number + 1} of {rounds}")
        loader_rates.append(timed * batch_size / _time_loader(dataset, batch_size, workers, warm, timed))
        with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(run, [share[:8] for share in shares]))
            bare_rates.append(sum(pool.map(run, shares)))
    return timed * batch_size, loader_rates, bare_rates


def describe_speed(workers: int, images: int, loader_rates: list[float], bare_rates: list[float]) -> list[str]:
    """Lines to print about what `measure_speed` found."""

    def rate(rounds: list[float]) -> str:
        median = statistics.median(rounds)
        return f"{median:.1f} img/s ({min(rounds):.1f} to {max(rounds):.1f}), {median / workers:.1f} per core"

    # by how much the loader's median is below that of the bare loop; a negative value is noise
    overhead_percent = 100 * (1 - statistics.median(loader_rates) / statistics.median(bare_rates))
    rounds = f"median (range) of {len(bare_rates)} rounds of {images} images, all files cached"
    return [
        f"speed at {TRANSFORM.image_size}², {TRANSFORM.auto_augment}, {count(workers, 'worker')}; {rounds}",
        f"  loader     {rate(loader_rates)}",
        f"  bare loop  {rate(bare_rates)}, only decoding and transform",
        f"  overhead   {overhead_percent:.1f} %",
    ]


def _time_loader(dataset: ImageFolder, batch_size: int, workers: int, warm: int, timed: int) -> float:
    """The seconds that `timed` batches take, after `warm` batches that are not timed."""
    with contextlib.closing(TrainLoader(dataset, batch_size=batch_size, seed=_SEED, workers=workers)) as loader:
        stream = (batch for epoch in itertools.count() for batch in loader.batches(epoch))
        for _ in range(warm):
            next(stream)
        started = time.perf_counter()
        for _ in range(timed):
            next(stream)
        return time.perf_counter() - started


def _run_bare_loop(sources: list[Source], upright: bool, max_pixels: int) -> float:
    """Images per second of one process."""
    transform = train_transform(TRANSFORM)
    started = time.perf_counter()
    for source in sources:
        transform(read_rgb(source, upright, max_pixels))
    return len(sources) / (time.perf_counter() - started)
