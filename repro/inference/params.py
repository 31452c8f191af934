"""Parameters and options of the stages that use trained models. Imports nothing heavy: the command line needs it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from ..core.config import Each, bounded
from ..core.errors import UserError
from ..data.settings import TransformSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """The options of `repro evaluate`, whose help explains them."""

    weights: Path | None = None
    models: tuple[str, ...] = ()
    pretrained: bool = False
    table1: bool = False
    image_sizes: tuple[int, ...] = ()
    batch_size: int = 64
    limit: int | None = None
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"

    def check(self) -> None:
        """Raise UserError about options that contradict each other."""
        if self.weights is not None and self.pretrained:
            raise UserError("evaluate: --weights and --pretrained name two sets of weights; give one of them")
        if self.table1 and (self.weights is not None or self.models):
            raise UserError("evaluate: --table1 chooses models and weights itself; leave out --model and --weights")
        if self.weights is None and not self.table1 and not (self.models and self.pretrained):
            raise UserError(
                "evaluate: an untrained model has no accuracy; give --weights FILE, or --model NAME --pretrained"
            )
        if self.weights is not None and len(self.models) > 1:
            raise UserError(
                f"evaluate: a weights file holds one model, but {len(self.models)} are named; give one --model or none"
            )
        for option, values in (("--model", self.models), ("--image-size", self.image_sizes)):
            repeated = [value for index, value in enumerate(values) if value in values[:index]]
            if repeated:
                raise UserError(f"evaluate: {option} {repeated[0]} is given twice")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedParams:
    """The parameters that determine an evaluation's scores besides the data; their hash is in the record's identity.

    A new field changes the hash of all records, unless it is None and listed in `core.config._NEWER`.
    """

    model: str
    weights_hash: str
    transform: TransformSettings
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawRequest:
    """The options of `repro generate --weights`, whose help explains them.

    `sampling` has the fields of `SamplingParams` that differ from those of the training's cell.
    """

    weights: Path
    output: Path
    model: str | None = None
    class_label: str = "all"
    samples: int | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    batch_size: int = 64
    image_size: int | None = None
    vae: Path | None = None
    judge: Path | None = None
    inception: Path | None = None
    inception_sha256: str | None = None
    data: str | None = None

    def check(self) -> None:
        """Raise UserError about options that contradict each other."""
        if self.inception is not None and self.data is None:
            raise UserError("generate: --inception compares with real pictures; name them with --data CELL")
        if self.data is not None and self.inception is None and self.judge is None:
            raise UserError("generate: --data says what --inception and --judge compare with; give one of them")
        if self.inception_sha256 is not None and self.inception is None:
            raise UserError(
                "generate: --inception-sha256 is the hash of the file that --inception names; give that too"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnParams:
    """The parameters that determine the scores of samples besides the data; their hash is in the record's identity."""

    weights_hash: str
    labels: tuple[int, ...]
    samples: int
    image_size: int
    sampling: Any  # `tasks.generation.params.SamplingParams`
    seed: int
    files: tuple[str, ...]  # hashes of the judge, the Inception file, the VAE and the reference batch, as far as given


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldSource:
    """A model of Fig. 8: a file of this project, an official file with `model`, or `model` for timm's own weights."""

    weights: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.weights is None and self.model is None:
            raise ValueError("weights: missing; give a file, or name a model that has published weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisualizeParams:
    """The `visualize:` section.

    Args:
        cell: a cell of `pretrain` with a snapshot of epoch 0, for gradients, reconstruction losses and probes.
        data: a cell of `prepare_data`, whose reported split is used.
        seed: of the choice of images.
        images: number of images over which maps and losses are averaged (the paper: 128).
        shown: number of images in the figure of gradients, evenly spaced over the classes.
        receptive_fields: label -> model, in the order of Fig. 8. `papers.vision_ttt.sections` looks for labels of that
            figure, such as `+ Dual`; models with other labels are shown and not judged.
        field_images: number of images over which receptive fields are averaged.
        probes: changes of the inner loop, see `repro.inference.probes`.
        probe_images: most images for the accuracy of a probe.
        reads: the files of weights that a training makes; only dvc.yaml uses them, as six dependencies. A file of
            `receptive_fields` that is not among them can change without a new run of the stage.
    """

    cell: str
    data: str
    seed: int = bounded(0, ge=0)
    images: int = bounded(128, ge=1)
    shown: int = bounded(3, ge=1)
    receptive_fields: dict[str, FieldSource]
    field_images: int = bounded(ge=1)
    probes: tuple[str, ...] = ()
    probe_images: int = bounded(ge=1)
    reads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolutionParams:
    """The `resolution:` section.

    Args:
        data: a cell of `prepare_data`, whose reported split is used.
        models: family -> weights file; all were trained at one image size.
        image_sizes: sides in pixels.
        batch_size: images per forward pass.
        repeats: number of timed forward passes.
        reads: the files of `models` that a training makes; see `VisualizeParams`.
    """

    data: str
    models: dict[str, str]
    image_sizes: tuple[Annotated[int, Each(ge=1)], ...]
    batch_size: int = bounded(8, ge=1)
    repeats: int = bounded(5, ge=1)
    reads: tuple[str, ...] = ()
