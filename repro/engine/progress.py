"""How a run looks: a rich progress bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable


class Progress:
    """Shows the step, the loss and the speed; a context manager.

    Args:
        total: steps of the whole run.
        done: steps that were finished before.
        every: steps between updates.
        log: takes plain lines where there is no terminal.
        shown: False on all ranks but the first.
    """

    def __init__(self, total: int, done: int, every: int, log: Callable[[str], None], shown: bool = True):
        self.total, self.done, self.every, self.shown = total, done, every, shown
        self.log = log if shown else lambda line: None
        self.bar = self.task = None
        self.since, self.images = time.perf_counter(), 0

    def __enter__(self) -> "Progress":
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=self.total, completed=self.done)
            self.bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, loss: float, images: int) -> None:
        """Count a finished step of `images` images."""
        self.images += images
        if step % self.every and step != self.total:
            return
        now = time.perf_counter()
        speed, self.since, self.images = self.images / (now - self.since), now, 0
        text = f"loss {loss:.4f}, {speed:.0f} img/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        else:
            self.log(f"step {step}/{self.total}, {text}")

    def report(self, row: dict[str, float]) -> None:
        """Print the numbers of a finished epoch."""
        line = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
        if self.bar is not None:
            self.bar.console.print(line)
        else:
            self.log(line)
