"""The common part of detection and segmentation: a head on a pretrained backbone. Light to import, for `--help`."""

import abc
import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from ...core.config import build
from ...core.errors import UserError
from ...core.record import atomic
from ...training.params import TrainParams
from ..spec import Predictor, Sight, TaskSpec

EXAMPLES = 4  # pictures of the reported split that are drawn with the predictions
EXAMPLES_MIN_SCORE = 0.5  # smallest score of a detection in these drawings and in the confusion of classes
_LEGIBLE_PX = 512
_TITLE_PX = 20
_MOST_CONFUSED = 20  # with more classes, the table could not be read


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseParams(TrainParams):
    """Common parameters of cells of `detect:` and `segment:`; `drop_path` also applies to the adapter's extractors.

    Args:
        freeze_backbone: train only the adapter and the heads.
        final_norm: apply the backbone's final norm to its tokens before the adapter adds them to its maps; ViT-Adapter
            removes that norm.
        recompute_blocks: recompute the backbone's activations in the backward pass instead of keeping them.
    """

    freeze_backbone: bool = False
    final_norm: bool = False
    recompute_blocks: bool = False


def choose_enlargement(picture: Any) -> int:
    """Return the least whole factor that makes the short side of a picture (3, H, W) long enough for labels and a legend."""
    return math.ceil(_LEGIBLE_PX / min(picture.shape[1:]))


def list_colours() -> list[tuple[int, int, int]]:
    """List eighteen colours that differ from one another and from grey, since pictures may be grey.

    Strong ones first.
    """
    from matplotlib import colormaps

    colours = [tuple(round(255 * part) for part in colour) for colour in colormaps["tab20"].colors]
    ordered = [*colours[::2], *colours[1::2]]
    return [colour for colour in ordered if max(colour) - min(colour) > 10]


def describe_confusion(classes: Sequence[str], counts: Sequence[Sequence[int]], of: str) -> dict[str, Any]:
    """Make the record of a confusion matrix: counts by true (row) and predicted class (column).

    `of` names what is counted, e.g. `pixels`. With more than 20 classes the matrix is None, with a reason.
    """
    if len(classes) > _MOST_CONFUSED:
        return {"confusion": None, "confusion_reason": f"{len(classes)} classes, of which a table cannot be read"}
    return {"confusion": {"of": of, "classes": list(classes), "counts": [list(row) for row in counts]}}


class DenseModel:
    """Mix-in for models whose `backbone` is a `repro.models.pyramid.Pyramid`; timm's optimiser factory calls its methods."""

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the backbone's groups for timm's layer-wise decay; everything else is in the last group."""
        return self.backbone.group_matcher(coarse, prefix="backbone.")

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that the backbone exempts from weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


class DenseSpec(TaskSpec):
    """A task whose model is a head on four maps of a backbone.

    `head` names the parameter with the head's sizes, and `features` the blocks that make the maps, see `build_pyramid`.
    """

    head: ClassVar[str]
    features: ClassVar[Literal["last", "each"]]

    @abc.abstractmethod
    def build_head(self, backbone: Any, params: Any, num_classes: int) -> Any:
        """Build the model around a pyramid; of `params`, only `transform` and the head's sizes are used."""

    @abc.abstractmethod
    def score_baseline(self, baseline: Any, task: Any, instances: Any) -> dict[str, float]:
        """Score an `OtsuBaseline` on the reported split's images at their own size; `instances` are its examples."""

    @abc.abstractmethod
    def name_example(self, dataset: Any, index: int, target: Any) -> str:
        """Return the file stem for the drawing of a held-out image with this target."""

    @abc.abstractmethod
    def draw_truth(self, picture: Any, target: Any, names: Sequence[str]) -> Any:
        """Draw the target of a held-out picture, uint8 (3, H, W), in the style of `look`."""

    @abc.abstractmethod
    def look(self, model: Any, settings: Any, names: Sequence[str], min_score: float, picture: Any) -> Sight:
        """Predict and draw a picture, uint8 (3, H, W), with a model in eval mode; `settings` are the transform's."""

    def build_model(
        self, params: Any, classes: Sequence[str], init: Path | None, where: str
    ) -> tuple[Any, Mapping[str, str]]:
        from ...models.checkpoints import open_weights
        from ...models.pyramid import build_pyramid, load_backbone

        checkpoint = open_weights(init, model=params.model) if init else None
        options = dict(params.options)
        # the position embedding must have the length of the checkpoint's training image size
        if checkpoint is not None and "img_size" in checkpoint.options:
            options["img_size"] = checkpoint.options["img_size"]
        asked = {
            "final_norm": params.final_norm,
            "drop_path_rate": params.drop_path,
            "freeze_backbone": params.freeze_backbone,
        }
        try:
            backbone = build_pyramid(params.model, options=options, features=self.features, **asked)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        backbone.set_grad_checkpointing(params.recompute_blocks)
        # before the head is built: reading the weights may draw random numbers, which the head's initial weights follow
        report = (
            load_backbone(backbone, checkpoint) if checkpoint else dict.fromkeys(backbone.state_dict(), "expected: new")
        )
        return self.build_head(backbone, params, len(classes)), report

    def describe(self, model: Any, params: Any, classes: Sequence[str]) -> dict[str, Any]:
        # those of the backbone, with the options of its checkpoint that `params` lacks
        name, options = model.backbone.built_from
        parts = {part: dataclasses.asdict(getattr(params, part)) for part in (self.head, "transform")}
        described = {
            "name": name,
            "options": dict(options),
            "preprocessing": parts["transform"],
            "classes": list(classes),
        }
        return described | {"task": {"name": self.name, "final_norm": params.final_norm, **parts}}

    def score_without_learning(self, task: Any, data: Any) -> dict[str, float] | None:
        """Score Otsu's threshold with the class of the most similar training example.

        Returns None for a set that is not embedded.
        """
        if data.manifest.generated is None:
            return None
        from .otsu import OtsuBaseline, read_examples

        instances = data.open_instances("train")
        return self.score_baseline(OtsuBaseline(read_examples(instances)), task, instances)

    def draw_examples(self, task: Any, model: Any, params: Any, classes: Sequence[str], folder: Path) -> None:
        dataset = task.held_out[task.reported_split].dataset
        for index in range(min(EXAMPLES, len(dataset))):
            image, target = dataset[(0, index)]  # the key is (epoch, index)
            found = self.look(model, params.transform, classes, EXAMPLES_MIN_SCORE, image).drawing
            drawings = {"truth": self.draw_truth(image, target, classes), "found": found}
            with atomic(folder / f"{self.name_example(dataset, index, target)}.png") as temporary:
                _set_side_by_side(drawings).save(temporary, "PNG")

    def open_predictor(self, checkpoint: Any, device: Any, min_score: float) -> Predictor:
        from ...models.pyramid import build_pyramid
        from ...models.weights import require_finite_outputs

        # the settings of transform and head in the file, as the dataclasses of the cell's fields of these names
        kinds, given = typing.get_type_hints(self.params), checkpoint.task
        parts = {
            part: build(kinds[part], given[part], f"{checkpoint.path}: {part}") for part in ("transform", self.head)
        }
        built = {"features": self.features, "final_norm": given.get("final_norm", False)}
        backbone = build_pyramid(checkpoint.model, options=checkpoint.options, **built)
        model = self.build_head(backbone, SimpleNamespace(**parts), len(checkpoint.classes))
        checkpoint.load_into(model)
        require_finite_outputs(backbone, checkpoint.where)  # non-finite scores would silently count as no object
        look = functools.partial(self.look, model.eval().to(device), parts["transform"], checkpoint.classes, min_score)
        return Predictor(look=lambda pictures: [look(picture) for picture in pictures])


def _set_side_by_side(drawings: Mapping[str, Any]) -> Any:
    """Paste pictures in a row on white, each below its name."""
    from PIL import Image, ImageDraw, ImageFont

    font, gap = ImageFont.load_default(_TITLE_PX), _TITLE_PX // 2
    width = sum(drawing.width for drawing in drawings.values()) + gap * (len(drawings) - 1)
    top = _TITLE_PX + 2 * gap
    canvas = Image.new("RGB", (width, top + max(drawing.height for drawing in drawings.values())), "white")
    pen, left = ImageDraw.Draw(canvas), 0
    for name, drawing in drawings.items():
        pen.text((left, gap), name, fill="black", font=font)
        canvas.paste(drawing, (left, top))
        left += drawing.width + gap
    return canvas
