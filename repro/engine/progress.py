"""How a run looks: a rich progress bar on a terminal, plain lines in a log."""

import sys
from collections.abc import Callable


class Progress:
    """Shows the step, the loss and the speed; a context manager.

    Args:
        total: steps of the whole run.
        done: steps that were finished before.
        log: takes plain lines where there is no terminal.
        shown: False on all ranks but the first.
    """

    def __init__(self, total: int, done: int, log: Callable[[str], None], shown: bool = True):
        self.total, self.done, self.shown = total, done, shown
        self.log = log if shown else lambda line: None
        self.bar = self.task = None

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

    def update(self, step: int, window: dict[str, float] | None) -> None:
        """Show what `Watch.step` returned after this many steps: the means of the steps since it last returned any."""
        if window is None:
            return
        loss = f"loss {window['loss']:.4f}" if "loss" in window else "no finite loss"
        text = f"{loss}, {window['img_per_s']:.0f} img/s, waited {window['data_wait_percent']:.0f} % for data"
        text += f", {window['skip_rate_percent']:.0f} % of the steps skipped" if window["skip_rate_percent"] else ""
        text += f", {window['mfu_percent']:.0f} % of the peak" if "mfu_percent" in window else ""
        text += f", {window['peak_memory_mib']:.0f} MiB" if "peak_memory_mib" in window else ""
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
