"""The interface between a task and the training code, and between a task and `repro predict`. Imports nothing heavy."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..training.params import TrainParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a training reads.

    Args:
        train: a data set as the loaders want it, see `repro.data.loader.Samples`.
        held_out: split -> such a data set; see `repro.training.loop.Task`.
        classes: the names of the classes, by index.
        groups: a number for each training sample, or None; see `repro.data.loader.TrainOrder`.
        alone: whether images are evaluated one at a time, since they differ in size.
    """

    train: Any
    held_out: Mapping[str, Any]
    classes: tuple[str, ...]
    groups: Any = None
    alone: bool = False


def name_statistic(score: str, what: str) -> str:
    """Return the key of a statistic of a score, with the score's unit last: (top1_percent, std) -> top1_std_percent."""
    stem = score.removesuffix("_percent")
    return f"{stem}_{what}{score[len(stem) :]}"


class Sight(NamedTuple):
    """What a model sees in one picture: a line for people, plain data for JSON, and the picture drawn over, if any."""

    line: str
    content: Any
    drawing: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model, ready for the user's own pictures.

    Args:
        look: prepared pictures, at most `batch_size` of them, to what is seen in each.
        prepare: a picture, uint8 (3, H, W), to what `look` takes.
        batch_size: how many pictures go through the model at once.
    """

    look: Callable[[Sequence[Any]], list[Sight]]
    prepare: Callable[[Any], Any] = lambda picture: picture
    batch_size: int = 1
    draws: bool = True


class TaskSpec(abc.ABC):
    """A task: the class of its cells' parameters, and how the parts of a training are made from them.

    `name` is the task's name in weights files and in `repro predict --task`; `scores` are the metrics that say how good
    a model is, the most telling one first, each with what the report calls it. A score in percent ends in `_percent`,
    and is better the higher.
    """

    name: ClassVar[str]
    params: ClassVar[type[TrainParams]]
    scores: ClassVar[Mapping[str, str]]

    @abc.abstractmethod
    def open_datasets(self, data: Any, params: Any, held_out: Sequence[str]) -> Datasets:
        """The training images of a prepared data set, a `repro.data.cells.DataCell`, and those of some held-out splits.

        Raises:
            UserError: the data are not those of the manifest, or of a kind that this task cannot use.
        """

    @abc.abstractmethod
    def build_model(
        self, params: Any, classes: Sequence[str], init: Path | None, where: str
    ) -> tuple[Any, Mapping[str, str]]:
        """The model on the CPU, and what became of each weight of the file `init`, key by key; empty without one.

        Raises:
            UserError: a model, options or weights that do not fit.
        """

    @abc.abstractmethod
    def build_task(self, datasets: Datasets, params: Any, **parts: Any) -> Any:
        """Return the task of the loop; `parts` are the arguments of `repro.training.loop.Task`."""

    @abc.abstractmethod
    def describe(self, model: Any, params: Any, classes: Sequence[str]) -> dict[str, Any]:
        """What a weights file says besides the weights, see `repro.models.weights.save_weights`."""

    @abc.abstractmethod
    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        """Return the metrics of a finished training, from its last evaluation."""

    def score_without_learning(self, task: Any, data: Any) -> dict[str, float] | None:
        """Return the same scores of a method that learns nothing, on embedded data where there is one."""
        return None

    def draw_examples(self, task: Any, model: Any, params: Any, classes: Sequence[str], folder: Path) -> None:
        """Draw what a trained model in eval mode sees in images of the reported split, as PNGs; nothing by default."""
        return

    def count_flop_per_image(self, task: Any) -> float | None:
        """Return the FLOP of a forward pass of one image; None where they are not counted."""
        return None

    @abc.abstractmethod
    def open_predictor(self, checkpoint: Any, device: Any, min_score: float) -> Predictor:
        """Return a trained model for pictures; detections below `min_score` are not drawn.

        Raises:
            UserError: weights that cannot be read or do not fit.
        """
