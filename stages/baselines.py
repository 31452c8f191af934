"""`repro baselines`: train the families that Vittt is compared with, by the code of `repro pretrain` (Table 1)."""

from . import CellOption, GpusOption, SeedsOption
from .pretrain import STAGE, ReplayOption, train

__all__ = ["STAGE", "command"]


def command(
    cell: CellOption = None, gpus: GpusOption = None, seeds: SeedsOption = None, replay_bad_step: ReplayOption = None
) -> None:
    """Train a classifier of another family; everything else is as in `repro pretrain`."""
    train("baselines", cell, gpus, seeds, replay_bad_step)
