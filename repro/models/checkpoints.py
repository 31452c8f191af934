"""Checkpoints: models opened from weights of any origin, and the initialisation of a training from them.

`open_weights` reads a weights file, or resolves the name of published weights, and returns a `Checkpoint`. The
checkpoint builds the model or returns the tensors. `initialise` fills a freshly built classifier for fine-tuning.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import timm
import torch
from torch import Tensor, nn

from ..core.errors import UserError
from ..core.hashing import hash_file
from .published import PLACES, Published, build_published, find_published, is_from_timm
from .reading import Reading
from .registry import build_model, family_module
from .weights import adapt_to_size, classifier_names, load_state, open_file, translate_official

# options of the data and the training, which `require_same_architecture` does not compare; `windows` are MambaVision's,
# and no weight depends on them
_OF_THE_TRAINING = {"num_classes", "img_size", "drop_rate", "drop_path_rate", "windows"}
_Size = int | tuple[int, int]  # a side, or height and width, in pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model with its weights: a file of this project, a family's official file, or weights that timm loads."""

    name: str  # the model's name in records
    model: str  # its registered name
    # arguments that build the model, where they are not the defaults
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: Mapping[str, Any] | None = None  # a dense model's task: its `name`, and the params that build the decoder
    classes: tuple[str, ...] | None = None  # names in the order of the outputs; None if the weights do not name them
    num_classes: int | None  # None for a backbone without its head
    preprocessing: Mapping[str, Any]  # the evaluation transform in timm's names; `input_size` is that of the training
    path: Path | None = None  # None for weights that timm fetches
    # further entries of the records: options, weights_file, weights_tag, weights_license
    facts: Mapping[str, Any]
    # the file's tensors; a file for one of timm's models keeps its names, the others have this project's; None for
    # weights that timm fetches
    state: Mapping[str, Tensor] | None = dataclasses.field(default=None, repr=False, compare=False)
    is_own: bool = False  # whether `save_weights` wrote the file
    published: Published | None = None  # for weights that timm loads

    @property
    def where(self) -> Path | str:
        """The name of the weights in error messages."""
        return self.path or self.name

    @functools.cached_property
    def hash(self) -> str:
        """The short hash of the file for records, or `timm` for weights that timm fetches."""
        return hash_file(self.path) if self.path else "timm"

    @property
    def image_size(self) -> int:
        """Side of the training images in pixels."""
        return self.preprocessing["input_size"][-1]

    def require_classifier(self) -> Self:
        """Return the checkpoint itself; raise a UserError if it holds a dense model."""
        if self.task is not None:
            raise UserError(f"{self.path}: holds a model for the task {self.task['name']!r}, expected a classifier")
        return self

    def build(self, image_size: _Size | None = None) -> nn.Module:
        """Build the classifier with its weights, in eval mode.

        `image_size` is a side, or height and width, in pixels; the default is that of the training. For another size,
        position tables are resampled. The build draws first weights from PyTorch's global generator also where all are
        replaced, and scores of detectors that exist depend on that, see `read_state`.

        Raises:
            UserError: a dense model, weights that do not fit, or a size that the model does not take.
            RunError: weights that cannot be fetched.
        """
        if self.is_own:
            return self._build_own(image_size).eval()
        size = image_size or self.image_size
        if self.published is None:
            return self._build_official(size).eval()
        return self._build_published(num_classes=self.num_classes, img_size=size).eval()

    def read_state(self, options: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the tensors under this project's names; raises as `build`.

        `options` are the arguments of the model that the tensors are for; timm adapts its own weights to them.
        """
        if self.published is not None:
            kept = {**(options or {}), "num_classes": self.num_classes}
            # building the model draws random numbers: without the fork, modules initialised afterwards would depend on
            # the origin of the weights
            with torch.random.fork_rng(devices=[]):
                return self._build_published(**kept).state_dict()
        # build the model, so that a file that does not fit its own description is an error. This draws random numbers
        # before a detector's heads are initialised, and existing results depend on it
        return self.build().state_dict() if self.is_own and not self.task else dict(self.state)

    def load_into(self, model: nn.Module) -> None:
        """Fill a classifier or dense model that was built from this file's options; UserError if it does not fit."""
        error = f"{self.path}: does not fit {self.model} as built from its options {dict(self.options)}"
        load_state(model, self.state, error)

    def _build_own(self, image_size: _Size | None) -> nn.Module:
        """Build the classifier of a file of this project at its training size, then set another size if asked."""
        self.require_classifier()
        try:
            model = build_model(self.model, **self.options)
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"{self.path}: {error}") from None
        self.load_into(model)
        if image_size not in (None, self.image_size) and hasattr(model, "set_input_size"):
            height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
            try:
                model.set_input_size(img_size=(height, width))
            except (ValueError, AssertionError) as error:
                raise UserError(f"{self.name}: does not take images of {height}x{width} pixels: {error}") from None
        return model

    def _build_official(self, image_size: _Size) -> nn.Module:
        """Build the classifier of an official file for an image size, to which its position tables are resampled."""
        if self.num_classes is None:
            own = build_model(self.model).state_dict()
            # keys of another model explain more than the missing head does
            if foreign := [key for key in self.state if key not in own]:
                more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
                raise UserError(
                    f"{self.path}: {self.model} has no {', '.join(foreign[:3])}{more}, which the file holds"
                )
            raise UserError(f"{self.path}: holds a backbone without its head, expected a classifier")
        try:
            model = build_model(self.model, img_size=image_size, num_classes=self.num_classes)
            state = adapt_to_size(model, self.state, self.preprocessing["input_size"][-2:])
            load_state(model, state, f"official weights do not fit {type(model).__name__} as built")
        except (ValueError, UserError) as error:
            raise UserError(f"{self.path}: {error}") from None
        return model

    def _build_published(self, **options: Any) -> nn.Module:
        """Let timm build the model with these options and load the weights, from the file if there is one."""
        return build_published(self.published, file=self.path, state=self.state, **options)


def open_weights(path: Path | None, *, model: str | None = None) -> Checkpoint:
    """Open weights and find the model that they belong to, without building or downloading anything.

    Args:
        path: a file of this project, an official file of a family, or one that timm can load; None for weights that
            timm publishes.
        model: the registered name; only a file of this project needs none. A name of timm's may end in a tag.

    Raises:
        UserError: a file that does not exist, cannot be read or belongs to another model; an unknown model; a missing
            model name; or published weights that do not exist.
    """
    if path is None:
        if model is None:
            raise UserError("no weights are named; give a file of weights, or a model with published weights")
        return _describe_published(find_published(model))
    of_timm = model is not None and is_from_timm(model)
    state, metadata = open_file(path, *([PLACES] if of_timm else []))
    if metadata is not None:
        if model not in (None, metadata["model"]):
            raise UserError(f"{path}: holds weights of {metadata['model']}, not of {model}")
        return _describe_own(path, state, metadata)
    if model is None:
        raise UserError(f"{path}: not a file of this project, so it does not name its model; name it with --model")
    return _describe_timm_file(path, state, model) if of_timm else _describe_official(path, state, model)


def open_own(path: Path, advice: str = "take one that it trained") -> Checkpoint:
    """Open a file of this project; raises as `open_weights`, and for any other file with `advice` at the end."""
    state, metadata = open_file(path)
    if metadata is None:
        raise UserError(
            f"{path}: not a weights file of this project, which would name its model and its classes; {advice}"
        )
    return _describe_own(path, state, metadata)


def _describe_own(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Checkpoint:
    """Describe a file of this project.

    The report and `evaluate` compare a score with a paper by the `options` in its `facts`, so an option that is left
    out there makes a variant look like the plain model.
    """
    options, classes = metadata["options"], tuple(metadata["classes"])
    return Checkpoint(
        name=metadata["model"],
        model=metadata["model"],
        options=options,
        task=metadata.get("task"),
        classes=classes,
        num_classes=len(classes),
        preprocessing=metadata["preprocessing"],
        path=path,
        facts={"options": {key: value for key, value in options.items() if key not in ("num_classes", "img_size")}},
        state=state,
        is_own=True,
    )


def _describe_official(path: Path, state: Mapping[str, Tensor], model: str) -> Checkpoint:
    """Describe a file of the authors of one of this project's families.

    Its `facts` have empty `options`, by which the report and `evaluate` take it for the paper's model; the description
    of a file of timm has none.
    """
    try:
        state = translate_official(state, family_module(model))
    except UserError as error:
        raise UserError(f"{path}: not a file of this project, and for {model} {error}") from None
    config = timm.get_pretrained_cfg(model)
    head = state.get(f"{config.classifier}.weight")
    return Checkpoint(
        name=model,
        model=model,
        num_classes=None if head is None else len(head),
        # all these families publish a bicubic resize, a central crop of 224 and ImageNet's mean and std; the short side
        # is resized to 224 / crop_pct
        preprocessing=dataclasses.asdict(config),
        path=path,
        facts={"options": {}, "weights_file": path.name},
        state=state,
    )


def _describe_timm_file(path: Path, state: Mapping[str, Tensor], model: str) -> Checkpoint:
    """Describe a file for one of timm's models; the rows of its head, if it has one, are the number of classes."""
    published = find_published(model, required=False)
    names = (*classifier_names(published.preprocessing), "head", "fc", "classifier")
    heads = [state[f"{name}.weight"] for name in names if f"{name}.weight" in state]
    return Checkpoint(
        name=model,
        model=published.model,
        num_classes=len(heads[0]) if heads else published.preprocessing["num_classes"],
        preprocessing=published.preprocessing,
        path=path,
        # no options: reports must not take it for a paper's model, because it may have been trained on other data
        facts={"weights_file": path.name},
        state=state,
        published=published,
    )


def _describe_published(published: Published) -> Checkpoint:
    """Describe weights that timm fetches when the model is built."""
    facts: dict[str, Any] = {"options": {}, "weights_tag": published.tag, "weights_license": published.license}
    if published.license is None:
        facts["weights_license_reason"] = "timm's configuration states none"
    return Checkpoint(
        name=published.record_name,
        model=published.model,
        num_classes=published.preprocessing["num_classes"],
        preprocessing=published.preprocessing,
        facts=facts,
        published=published,
    )


def require_same_architecture(checkpoint: Checkpoint, name: str, options: Mapping[str, Any]) -> None:
    """Refuse weights of another model than `name`, of `options` that change the architecture, or of a dense task.

    Options are compared for a file of this project alone. Weights of another origin are refused later by their shapes,
    so an option that changes no shape, such as `step`, is not noticed.

    Raises:
        UserError: naming the difference.
    """
    where = checkpoint.require_classifier().where
    if checkpoint.model.partition(".")[0] != name.partition(".")[0]:  # whatever tags of timm's they have
        raise UserError(f"{where}: holds weights of {checkpoint.model}, not of {name}")
    if checkpoint.is_own:
        theirs, ours = (_architecture(each) for each in (checkpoint.options, options))
        if theirs != ours:
            raise UserError(
                f"{where}: holds a {name} built with {theirs or 'no options'}, but it is wanted with {ours or 'none'}"
            )


def _architecture(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are part of the architecture, with tuples as lists, as JSON returns them."""
    kept = {key: value for key, value in options.items() if key not in _OF_THE_TRAINING}
    if reading := str(Reading.of(kept.pop("reading", ""))):  # in its canonical form, which is empty for the default
        kept["reading"] = reading
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


def has_classes(checkpoint: Checkpoint, classes: Sequence[str]) -> bool:
    """Return whether a checkpoint's head has these classes in this order; without names, only the number is compared.

    The names 0, 1, ... count as no names: files made from published weights have them.
    """
    counted = tuple(map(str, range(len(classes))))
    return checkpoint.num_classes == len(classes) and checkpoint.classes in (None, counted, tuple(classes))


def initialise(model: nn.Module, checkpoint: Checkpoint, classes: Sequence[str] | None = None) -> dict[str, str]:
    """Fill a freshly built classifier strictly with the weights of a checkpoint, to fine-tune it.

    A head for other classes stays as initialised; see `has_classes`, and for `classes` None only the numbers of classes
    are compared. The embedding `pos_embed` is resampled if the image size differs; tables in the blocks (`BlockTable`)
    are not, so their weights are refused at another size.

    Returns:
        A status for every key of the model and the checkpoint: `used`; `expected: new` for a head that stays as
        initialised; `expected: not needed` for keys of the checkpoint's head that the model does not have.

    Raises:
        UserError: a checkpoint that cannot be read, belongs to another model or does not fit; the model is then
            unchanged.
        RunError: weights that cannot be fetched.
    """
    name, options = model.built_from
    require_same_architecture(checkpoint, name, options)
    state = checkpoint.read_state(options)
    try:
        state = adapt_to_size(model, state, checkpoint.preprocessing["input_size"][-2:])
    except ValueError as error:
        raise UserError(f"{checkpoint.where}: {error}") from None
    changed = checkpoint.num_classes != model.num_classes or not (classes is None or has_classes(checkpoint, classes))
    heads = tuple(f"{head}." for head in classifier_names(model.pretrained_cfg)) if changed else ()

    def of_the_head(key: str) -> bool:
        """Return whether a key of either side belongs to a head that is not taken over."""
        return key.startswith(heads)

    error = f"{checkpoint.where}: does not fit {name} as built with {options or 'no options'}"
    report = load_state(model, state, error, not_needed=of_the_head, new=of_the_head)
    # a key of both heads was reported as not needed: the model's own head makes it new
    return report | {key: "expected: new" for key in model.state_dict() if report.get(key) != "used"}
