"""The interfaces of a task to training and to `repro predict`. Imports nothing heavy."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..training.params import TrainParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """The data sets of a training.

    Args:
        train: a data set for the loaders, see `repro.data.loader.Samples`.
        held_out: split -> such a data set; see `repro.training.loop.Task`.
        classes: the names of the classes, by index.
        groups: (N,) group of each training sample, of which batches take pairs; None for no pairs. See
            `repro.data.loader.TrainOrder`.
        alone: whether images are evaluated one at a time, since they differ in size.
    """

    train: Any
    held_out: Mapping[str, Any]
    classes: tuple[str, ...]
    groups: Any = None
    alone: bool = False


def name_statistic(score: str, what: str) -> str:
    """Return the key of a score's statistic, with the score's unit last: (top1_percent, std) -> top1_std_percent."""
    stem = score.removesuffix("_percent")
    return f"{stem}_{what}{score[len(stem) :]}"


class Sight(NamedTuple):
    """A prediction for one picture: a line of text, plain data for JSON, and a drawing or None."""

    line: str
    content: Any
    drawing: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model, ready for the user's own pictures.

    Args:
        look: maps at most `batch_size` prepared pictures to a prediction for each.
        prepare: maps a picture, uint8 (3, H, W), to an input of `look`.
        batch_size: most pictures in one forward pass.
        draws: whether predictions have drawings.
    """

    look: Callable[[Sequence[Any]], list[Sight]]
    prepare: Callable[[Any], Any] = lambda picture: picture
    batch_size: int = 1
    draws: bool = True


class TaskSpec(abc.ABC):
    """A task: the class of its cells' parameters, and factories for the parts of a training.

    `name` is the task's name in weights files and in `repro predict --task`. `scores` maps the metrics of a model's
    quality, the most important one first, to their names in the report. A score in percent has a key that ends in
    `_percent`, and a higher one is better.

    `runs.job.build_job` sets the seed just before `build_model`: the random draws of `build_model` and `build_task`,
    and their order, determine the results of every training.
    """

    name: ClassVar[str]
    params: ClassVar[type[TrainParams]]
    scores: ClassVar[Mapping[str, str]]

    @abc.abstractmethod
    def open_datasets(self, data: Any, params: Any, held_out: Sequence[str]) -> Datasets:
        """Open the training images and some held-out splits of a prepared data set, a `repro.data.cells.DataCell`.

        Raises:
            UserError: the data differ from the manifest, or this task cannot use their kind.
        """

    @abc.abstractmethod
    def build_model(
        self, params: Any, classes: Sequence[str], init: Path | None, where: str
    ) -> tuple[Any, Mapping[str, str]]:
        """Build the model on the CPU, and load the file `init`, if any.

        Returns:
            The model, and what became of each weight of the file by key. Without a file this is empty, or has every
            key of the backbone as new.

        Raises:
            UserError: the model, its options or the weights do not fit.
        """

    @abc.abstractmethod
    def build_task(self, datasets: Datasets, params: Any, **parts: Any) -> Any:
        """Build the `repro.training.loop.Task`; `parts` are its arguments."""

    @abc.abstractmethod
    def describe(self, model: Any, params: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Return the metadata of a weights file, see `repro.models.weights.save_weights`."""

    @abc.abstractmethod
    def summarise(self, task: Any, last: Mapping[str, float]) -> dict[str, Any]:
        """Return the metrics of a finished training, from its last evaluation.

        They must include `held_out_images`. `runs.cells.summarise_cell` averages over the seeds the scores and every
        other number whose key ends in `_percent`. Every process calls it, while the loaders are open, since it may
        evaluate a model.
        """

    def score_without_learning(self, task: Any, data: Any) -> dict[str, float] | None:
        """Return the same scores of a baseline without learning, on embedded data; None where there is none.

        Only the first process calls it, and the loaders are closed: read their data sets, and do not call
        `Task.evaluate`, which would wait for the other processes.
        """
        return None

    def draw_examples(self, task: Any, model: Any, params: Any, classes: Sequence[str], folder: Path) -> None:
        """Draw predictions of a trained model in eval mode for images of the reported split, as PNGs.

        It is called as `score_without_learning` is, once for a cell: for its first seed. The default draws nothing.
        """
        return

    def count_flop_per_image(self, task: Any) -> float | None:
        """Count the FLOP of a forward pass of one image; None where they are not counted.

        It must draw no random numbers: it is called before a training if `runtime.peak_tflops` is set, and this setting
        must not change the results.
        """
        return None

    @abc.abstractmethod
    def open_predictor(self, checkpoint: Any, device: Any, min_score: float) -> Predictor:
        """Open a trained model for pictures; detections below `min_score` are not drawn.

        Raises:
            UserError: the weights cannot be read or do not fit.
        """
