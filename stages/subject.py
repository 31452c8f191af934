"""What `explain` and `visualize` share: a trained model from wherever its weights are, its receptive field, and its probes."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.data.settings import TransformSettings

BATCH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in eval mode, its registered name, the transform of its images, and its classes where its weights name them."""

    model: Any
    name: str
    transform: TransformSettings
    classes: tuple[str, ...] | None


def open_subject(weights: Path | None, model: str | None, device: Any) -> Subject:
    """A model in eval mode: of this project's file; with a name, of an official file, or without one of timm's published weights.

    Raises:
        UserError: a file that cannot be read or does not fit. RunError: published weights that cannot be fetched.
    """
    from repro.models.weights import build_from_weights
    from repro.tasks.published import OfficialFile, build_published, find_published, is_timms

    classes = None
    if model is None:
        network, metadata = build_from_weights(weights)
        name, preprocessing, classes = metadata["model"], metadata["preprocessing"], tuple(metadata["classes"])
    elif weights is not None and not is_timms(model):
        official = OfficialFile(weights, model)
        name, preprocessing = model, official.preprocessing
        network = official.build(preprocessing["input_size"][-1])
    else:
        published = find_published(model)
        name, preprocessing = published.full_name, published.preprocessing
        network = build_published(published, preprocessing["input_size"][-1], weights)
    transform = TransformSettings.from_preprocessing(preprocessing)
    return Subject(model=network.to(device).eval().requires_grad_(False), name=name, transform=transform, classes=classes)


def field_of(subject: Subject, inputs: Any) -> tuple[Any, Any]:
    """The receptive field of a model's central unit: its `Shape`, and the contributions (H,W)."""
    from repro.explain import erf

    field = erf.receptive_field(erf.last_features(subject.model), inputs)
    return erf.describe(field, erf.centre_of(subject.model, tuple(inputs.shape[-2:]))), field.cpu().numpy()


def snapshots_of(weights: Path) -> dict[int, Path]:
    """The snapshots beside a weights file, by epoch."""
    found = {re.fullmatch(r"epoch_(\d+)", file.stem): file for file in (weights.parent / "snapshots").glob("epoch_*.safetensors")}
    return dict(sorted((int(match[1]), file) for match, file in found.items() if match))


def probe(subject: Subject, tree: Any, name: str, workers: int) -> tuple[dict[str, float], str]:
    """Accuracy and inner losses over a tree's validation split with a changed inner loop, and what the literature found.

    Raises:
        UserError: an unknown probe, or a model without inner learner.
    """
    from repro.data.classification import ImageFolder, ToInput, eval_transform
    from repro.data.loader import EvalLoader
    from repro.explain.operator import Answer
    from repro.explain.probes import Probe
    from repro.tasks.classification import accuracy

    device = next(subject.model.parameters()).device
    dataset = ImageFolder(tree, "val", eval_transform(subject.transform))
    loader = EvalLoader(dataset, batch_size=BATCH, workers=workers, device=device)
    try:
        changed = Probe(name)
        with Answer(changed):
            numbers = accuracy(subject.model, loader, ToInput(subject.transform, device))
        before, after = changed.inner_losses()
    except ValueError as error:
        raise UserError(f"explain: {error}") from None
    finally:
        loader.close()
    scores = {name: numbers[name] for name in ("top1_percent", "images")}
    return scores | {"inner_loss_before": before, "inner_loss_after": after}, changed.literature
