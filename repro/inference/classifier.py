"""A trained classifier on its device with the transform of its images, shared by all uses of classifiers."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import RunError, UserError
from ..core.runtime import torch_dtype
from ..core.ui import Progress
from ..data.classification import ImageFolder, ToInput, eval_transform
from ..data.loader import EvalLoader
from ..data.settings import TransformSettings
from ..data.tree import Tree
from ..models.checkpoints import Checkpoint, has_classes
from ..tasks.classification.task import accuracy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """A classifier in eval mode, without gradients for its parameters."""

    checkpoint: Checkpoint  # origin of the weights
    model: nn.Module  # inputs (B, 3, S, S) -> logits (B, num_classes)
    transform: TransformSettings  # from an image to an input
    device: torch.device

    @property
    def name(self) -> str:
        """The model's name in records."""
        return self.checkpoint.name

    def read_images(self, tree: Tree) -> Tensor:
        """Read the images of a tree's reported split, resized and cropped for the model: uint8 (N, 3, S, S)."""
        dataset = self.open_dataset(tree)
        # an item is asked for by (epoch, index), for transforms that draw; this one draws nothing
        return torch.stack([torch.as_tensor(dataset[(0, index)][0]) for index in range(len(dataset))])

    def to_inputs(self, images: Tensor) -> Tensor:
        """Convert uint8 images (N, 3, S, S) to normalised fp32 inputs on the model's device."""
        return ToInput(self.transform, self.device)(images)

    def measure_accuracy(
        self, tree: Tree, *, batch_size: int, workers: int, dtype: str = "fp32", progress: Progress | None = None
    ) -> dict[str, float]:
        """Compute the scores of `tasks.classification.task.accuracy` over a tree's reported split.

        Args:
            workers: processes that read the images.
            dtype: `fp32`, or `bf16` and `fp16` under autocast.
            progress: updated with the number of finished images.
        """
        with (
            contextlib.closing(
                EvalLoader(self.open_dataset(tree), batch_size=batch_size, workers=workers, device=self.device)
            ) as loader,
            torch.autocast(self.device.type, dtype=torch_dtype(dtype), enabled=dtype != "fp32"),
        ):
            return accuracy(self.model, _report_progress(loader, progress), ToInput(self.transform, self.device))

    def open_dataset(self, tree: Tree) -> ImageFolder:
        """Return the images of a tree's reported split, resized and cropped for the model as they are read."""
        return ImageFolder(tree, tree.kind.reported_split, eval_transform(self.transform))


def load_classifier(checkpoint: Checkpoint, device: torch.device, image_size: int | None = None) -> Classifier:
    """Build a classifier for its training image size, or for another side in pixels; raises as `Checkpoint.build`."""
    model = checkpoint.require_classifier().build(image_size).to(device).requires_grad_(False)
    transform = TransformSettings.from_preprocessing(checkpoint.preprocessing, image_size)
    return Classifier(checkpoint=checkpoint, model=model, transform=transform, device=device)


def require_sizes(checkpoint: Checkpoint, device: torch.device, sizes: Sequence[int]) -> None:
    """Run the model on an image of each size, so that an unsupported size fails before hours go into the others.

    Raises as `load_classifier` and `one_line_errors`.
    """
    for size in sizes:
        classifier = load_classifier(checkpoint, device, size)
        with torch.inference_mode(), one_line_errors(checkpoint.name, size):
            classifier.model(torch.zeros(1, 3, size, size, device=device))


@contextlib.contextmanager
def one_line_errors(name: str, size: int) -> Iterator[None]:
    """Convert errors of forward passes: a refused size to UserError, too little GPU memory to RunError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise RunError(f"{name} at {size}: the GPU has too little memory; lower the batch size") from None
    except (ValueError, AssertionError) as error:
        raise UserError(f"{name}: {error}") from None


def require_same_classes(checkpoint: Checkpoint, classes: Sequence[str], data: str) -> None:
    """Raise UserError if the weights name other classes than those of the data set `data`; see `has_classes`."""
    if checkpoint.classes is not None and not has_classes(checkpoint, classes):
        theirs = len(checkpoint.classes)
        raise UserError(f"{checkpoint.path}: was trained on other classes ({theirs}) than {data} has ({len(classes)})")


def subsample(tree: Tree, count: int, seed: int) -> Tree:
    """Return the tree with at most `count` images in its reported split.

    They are drawn without replacement and keep their order. Records of different models and times are compared as
    scores on the same images, so a count and a seed must go on giving the same draw.
    """
    split = tree.kind.reported_split
    files = tree.splits[split]
    if count >= len(files.names):
        return tree
    chosen = np.sort(np.random.Generator(np.random.PCG64(seed)).choice(len(files.names), count, replace=False))
    return dataclasses.replace(tree, splits={**tree.splits, split: files.take(chosen)})


def _report_progress(loader: EvalLoader, progress: Progress | None) -> Iterator[tuple]:
    """Yield the batches (images, targets) of a loader, and update the progress after each."""
    done = 0
    for batch in loader:
        yield batch
        done += len(batch[1])  # control returns here after the model's result was waited for
        if progress is not None:
            progress.update(done)
