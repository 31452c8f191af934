"""Logs of a run: a JSON line per step, TensorBoard events, and the means of every few steps."""

import contextlib
import importlib.util
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..core.errors import RunError, UserError
from ..core.ranks import Ranks
from ..core.record import atomic

# names that the loop and this module give; a task's numbers must have others
_OURS = frozenset(["step", "epoch", "lr", "images", "skipped", "seconds", "data_wait_seconds", "not_finite"])
_OURS |= frozenset(["img_per_s", "data_wait_percent", "skip_rate_percent", "peak_memory_mib", "mfu_percent"])


class Watch:
    """Logging and timing of the steps of one run, inside `follow`.

    With `jsonl`, `train.jsonl` gets a line per step: `step`, `epoch`, `lr`, `images` (over all ranks), `skipped`,
    `seconds` (since the previous step), `data_wait_seconds` (of this rank), and the step's numbers; a non-finite number
    is null and is named in the list `not_finite`. The line is handed to the operating system before `step` returns: a
    state that is saved afterwards never gets ahead of the file, and a resumed run ends with the lines of an
    uninterrupted one, apart from the times. TensorBoard gets the means of each window as `train/<name>`.

    Args:
        folder: of `train.jsonl` and the TensorBoard events.
        device: the model's device.
        jsonl, tensorboard: whether to write them; only rank 0 writes.
        flop_per_image, peak_flop_per_s: forward FLOP of an image (twice the multiply-accumulates), and peak of one
            device, for MFU.
        every: steps in a window, which ends at a multiple of this step number. After a resume the first one may be
            shorter.
        ranks: the processes that train together.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device | str,
        jsonl: bool,
        tensorboard: bool,
        flop_per_image: float | None = None,
        peak_flop_per_s: float | None = None,
        every: int,
        ranks: Ranks = Ranks(),
    ):
        self.folder, self.device, self.every = Path(folder), torch.device(device), every
        self.clock = time.perf_counter
        self.world_size = ranks.world_size
        self.jsonl, self.tensorboard = jsonl and ranks.first, tensorboard and ranks.first
        # share of the devices' peak that one image per second takes; backward takes twice the FLOP of forward
        self.flop_share = (
            3 * flop_per_image / (peak_flop_per_s * ranks.world_size) if flop_per_image and peak_flop_per_s else None
        )
        # every rank checks: all of them then end with the error, and none waits for a rank 0 that is gone
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise UserError("TensorBoard is not installed: python -m pip install -e '.[tensorboard]', or switch it off")
        self._file = self._writer = None
        # counts of steps, skipped, images (of all ranks), seconds, waited
        self._run, self._window = Counter(), Counter()
        self._sums, self._terms = Counter(), Counter()  # by name, over the window's steps that were not skipped

    @contextlib.contextmanager
    def follow(self, resumed_step: int) -> Iterator["Watch"]:
        """Enclose the steps of a run.

        Args:
            resumed_step: steps that an earlier process finished and saved; lines about later ones are dropped.

        Raises:
            UserError: the folder is not writable, or a line of `train.jsonl` before the last is damaged.
        """
        try:
            if self.jsonl:
                self._file = _reopen(self.folder / "train.jsonl", resumed_step)
            if self.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                # hides the earlier process' events about steps that are now repeated
                self._writer = SummaryWriter(str(self.folder), purge_step=resumed_step + 1)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror or error}") from None
        if self.device.type == "cuda":  # a process may train several cells: measure the peak of this one
            torch.cuda.reset_peak_memory_stats(self.device)
        self._since, self._waited = self.clock(), 0.0  # end of the last step, and the wait for batches since then
        try:
            yield self
            if self._window["steps"]:  # a run shorter than a window would leave no event
                self._end_window(*self._last)
        finally:
            with contextlib.suppress(OSError):  # every line was flushed; a failed write has already been reported
                for stream in filter(None, (self._writer, self._file)):
                    stream.close()

    def time_waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and add the wait for each to the step that follows.

        The wait for the end of an epoch counts for the first step of the next one.
        """
        while True:
            start = self.clock()
            batch = next(batches, None)
            self._waited += self.clock() - start
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude work that is not training (evaluation, snapshots, saving) from the times of steps and the speed."""
        if self.device.type == "cuda":  # queued kernels belong to the steps before the pause
            torch.cuda.synchronize(self.device)
        start = self.clock()
        yield
        self._since += self.clock() - start

    def step(
        self, step: int, epoch: int, numbers: dict[str, float], lr: float, images: int, skipped: bool = False
    ) -> dict[str, float] | None:
        """Count a finished step; call it before its state is saved.

        Args:
            step, epoch, lr, images: number of finished steps of the whole run, including this one; its epoch, its
                learning rate, and this rank's images.
            numbers: of the step, by name.
            skipped: the step was not applied to the weights; it counts for speed and skip rate, not for the means.

        Returns:
            At the end of a window the means over its steps that were not skipped (a name that none of them has is
            absent), `lr` of its last step, `img_per_s` of all ranks, `data_wait_percent` of this rank,
            `skip_rate_percent`, `peak_memory_mib` so far (CUDA only), `mfu_percent` = 100 x 3 x flop_per_image x
            img_per_s / (peak_flop_per_s x world_size). Else None.

        Raises:
            RunError: a line or an event cannot be written, e.g. because the disk is full.
            ValueError: a number has a reserved name.
        """
        if clash := _OURS.intersection(numbers):
            raise ValueError(f"numbers of a step cannot be named {', '.join(sorted(clash))}")
        if not skipped:
            self._sums.update(numbers)
            self._terms.update(numbers.keys())
        now = self.clock()
        seconds, self._since, waited, self._waited = now - self._since, now, self._waited, 0.0
        images, self._last = images * self.world_size, (step, lr)
        self._window.update(steps=1, skipped=int(skipped), images=images, seconds=seconds, waited=waited)
        try:
            if self._file:
                line = {"step": step, "epoch": epoch, "lr": lr, "images": images, "skipped": skipped, **numbers}
                line |= {"seconds": seconds, "data_wait_seconds": waited}
                not_finite = [name for name, value in line.items() if not math.isfinite(value)]
                line |= {**dict.fromkeys(not_finite), "not_finite": not_finite} if not_finite else {}
                self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
                self._file.flush()
            return self._end_window(step, lr) if step % self.every == 0 else None
        except OSError as error:
            raise RunError(f"{self.folder}: step {step} cannot be written: {error.strerror or error}") from None

    def summary(self) -> dict[str, Any]:
        """Return totals since entering `follow`, without those before a resume; `<name>_reason` explains each None.

        They are `throughput_img_per_s` (over all ranks), `data_wait_percent`, `skip_rate_percent`, `skipped_steps`,
        `peak_memory_mib`, and `mfu_percent` where the peak is known. They differ from run to run (the counts, where a
        run was resumed), and are therefore no metrics: `runs.cells.record_speed` writes those of GPUs into a record of
        speed, in which `repro plan` finds the throughput and the memory by these names.
        """
        total = self._run + self._window
        found = self._rates(total)
        found |= {"throughput_img_per_s": found.get("img_per_s")}
        reasons = dict.fromkeys(("throughput_img_per_s", "data_wait_percent", "skip_rate_percent"), "no step was timed")
        reasons |= {"mfu_percent": "no step was timed"} if self.flop_share else {}
        reasons["peak_memory_mib"] = f"PyTorch keeps no peak of memory on {self.device.type}"
        values = {name: found.get(name) for name in reasons} | {"skipped_steps": total["skipped"]}
        return values | {f"{name}_reason": why for name, why in reasons.items() if values[name] is None}

    def _end_window(self, step: int, lr: float) -> dict[str, float]:
        """Return the means of the window, see `step`, write them to TensorBoard, and begin a new window."""
        means = (
            {name: total / self._terms[name] for name, total in self._sums.items()}
            | {"lr": lr}
            | self._rates(self._window)
        )
        self._run, self._window, self._sums, self._terms = self._run + self._window, Counter(), Counter(), Counter()
        if self._writer:
            for name, value in means.items():
                self._writer.add_scalar(f"train/{name}", value, step)
            self._writer.flush()
        return means

    def _rates(self, counts: Counter) -> dict[str, float]:
        """Compute the rates that are defined: no speed without elapsed time, and no skip rate without steps."""
        found = {"skip_rate_percent": 100 * counts["skipped"] / counts["steps"]} if counts["steps"] else {}
        if (seconds := counts["seconds"]) > 0:
            found |= {"img_per_s": counts["images"] / seconds, "data_wait_percent": 100 * counts["waited"] / seconds}
            found |= {"mfu_percent": 100 * self.flop_share * found["img_per_s"]} if self.flop_share else {}
        if self.device.type == "cuda":
            found["peak_memory_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        return found


def format_window(window: dict[str, float]) -> str:
    """Format the means of a window, see `Watch.step`, as a line of progress."""
    parts = [f"loss {window['loss']:.4f}" if "loss" in window else "no finite loss"]
    parts.append(f"{window['img_per_s']:.0f} img/s, waited {window['data_wait_percent']:.0f} % for data")
    if window["skip_rate_percent"]:
        parts.append(f"{window['skip_rate_percent']:.0f} % of the steps skipped")
    if "mfu_percent" in window:
        parts.append(f"{window['mfu_percent']:.0f} % of the peak")
    if "peak_memory_mib" in window:
        parts.append(f"{window['peak_memory_mib']:.0f} MiB")
    return ", ".join(parts)


def _reopen(path: Path, step: int) -> BinaryIO:
    """Open the file for appending; drop lines about steps after `step`, and a last line that a crash cut short."""
    lines, kept = path.read_bytes().splitlines() if path.exists() else [], []
    for number, line in enumerate(lines, 1):
        try:
            kept += [line + b"\n"] if json.loads(line)["step"] <= step else []
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}: line {number} does not describe a step; move the file away") from None
    with atomic(path) as temporary:
        temporary.write_bytes(b"".join(kept))
    return open(path, "ab")
