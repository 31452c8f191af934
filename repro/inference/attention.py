"""Where a ViT's tokens look, before and after it was linearised: the work of `repro explain --map attention`."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug, seed_everything
from ..core.ui import print_table
from ..data.cells import DataCell
from ..explain.attention import Look, choose_tokens, find_grid, observe_attention, summarise_looks
from ..explain.draw import draw_attention
from ..models.checkpoints import open_weights
from ..models.linearize import inherit, read_shell
from ..models.registry import build_model, family_module
from ..models.t5 import T5
from .classifier import Classifier, subsample

IMAGES, SHOWN, SEED = 32, 3, 0
_CHOICES = ("inner", "key_norm", "dwc", "neighbours")  # of a linearised model
TEACHER, BEFORE, AFTER = "teacher", "before", "after"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """What the numbers of an attention depend on besides the data; its hash is in the record's identity."""

    model: str
    weights_hash: str
    teacher_hash: str | None
    images: int
    seed: int


def explain_attention(
    classifier: Classifier, images: Tensor, teacher: Path | None, output: Path, caption: str
) -> dict[str, Any]:
    """Draw where the tokens of images uint8 (N,3,S,S) look, print the numbers by layer, and return them.

    With the weights of the teacher from which the classifier was linearised, they are set beside the teacher's, and
    beside those of the student before its training: with what it inherits, and new weights as they are drawn with seed
    0.

    Raises:
        UserError: a model without attention, or a teacher that is none of this student.
    """
    inputs = classifier.to_inputs(images)
    models = {AFTER if teacher else classifier.name: classifier.model}
    if teacher is not None:
        models = _find_earlier(classifier, teacher) | models
    looks: dict[str, Look] = {}
    for state, model in models.items():
        try:
            looks[state] = observe_attention(model.requires_grad_(False), inputs)
        except ValueError as error:
            raise UserError(f"{classifier.checkpoint.where}: {error}; use --map erf") from None
    numbers = summarise_looks(looks, TEACHER if teacher else None)
    # images of a data set are in the order of classes
    shown = torch.linspace(0, len(images) - 1, min(SHOWN, len(images))).round().long()
    pictures = list(images[shown].permute(0, 2, 3, 1).numpy())
    shares = {state: look.share.cpu()[:, shown] for state, look in looks.items()}
    draw_attention(output, pictures, shares, numbers, next(iter(looks.values())).grid, caption)
    _print(numbers)
    return numbers


def measure_on_data(
    classifier: Classifier, cell: DataCell, teacher: Path | None, output: Path, paths: Paths, runtime: Runtime
) -> None:
    """`explain_attention` of 32 images of the reported split of a data set, with a record under
    results/measured/<device>/attention.
    """
    started, device = time.monotonic(), choose_device(runtime.device)
    tree = cell.open_tree()
    images = classifier.read_images(subsample(tree, IMAGES, SEED))
    caption = f"{classifier.name}, {len(images)} images of {cell.name}; {device_label(device)}"
    numbers = explain_attention(classifier, images, teacher, output, caption)
    teacher_hash = open_weights(teacher).hash if teacher else None
    hashes = {"weights_hash": classifier.checkpoint.hash, "teacher_hash": teacher_hash}
    params = AttentionParams(model=classifier.name, images=len(images), seed=SEED, **hashes)
    about = {
        "model": classifier.checkpoint.model,
        "data": cell.name,
        "split": tree.kind.reported_split,
        **dataclasses.asdict(params),
    }
    about["tokens"] = len(choose_tokens(find_grid(classifier.model, images)))
    about |= {
        "options": {key: classifier.checkpoint.options[key] for key in _CHOICES if key in classifier.checkpoint.options}
    }
    about |= {} if teacher else {"teacher_hash_reason": "no teacher was named"}
    place = {"device": device_label(device), "dtype": "fp32", "backend": "torch"}
    code = [__name__, family_module(classifier.checkpoint.model)]
    identity = make_identity(paths.root, code, params, data_manifest=cell.manifest_path, **place)
    folder = (
        paths.measured(device_slug(device))
        / "attention"
        / f"{classifier.name}_{cell.name}_{classifier.checkpoint.hash[:8]}"
    )
    write_record(folder, about | {"by_layer": numbers}, identity, time.monotonic() - started)
    print(
        f"{output}: {min(SHOWN, len(images))} of {len(images)} images; the numbers are in {folder.relative_to(paths.root)}/metrics.json"
    )


def _find_earlier(classifier: Classifier, teacher: Path) -> Mapping[str, Any]:
    """The teacher, and the student before its training."""
    student, checkpoint = classifier.model, open_weights(teacher).require_classifier()
    if not isinstance(student, T5) or student.inner == "softmax":
        raise UserError(
            f"explain: --teacher: {classifier.checkpoint.where} is no linearised model; leave the teacher out"
        )
    model = checkpoint.build(classifier.transform.image_size).to(classifier.device)
    shell = read_shell(model, str(teacher))
    seed_everything(SEED)
    before = build_model(classifier.checkpoint.model, **classifier.checkpoint.options)
    inherit(before, shell, f"{teacher} as {classifier.checkpoint.model}")
    return {TEACHER: model, BEFORE: before.to(classifier.device).eval()}


def _print(numbers: Mapping[str, Mapping[str, list[float]]]) -> None:
    columns = {
        "shift_ratio": "shift of keys",
        "reach_patches": "reach (patches)",
        "peak_percent": "peak (%)",
        "overlap_percent": "overlap (%)",
    }
    layers = len(next(iter(numbers.values()))["reach_patches"])
    rows = [
        [f"layer {layer + 1}", state, *(f"{own[key][layer]:.3g}" if key in own else "–" for key in columns)]
        for layer in range(layers)
        for state, own in numbers.items()
    ]
    print_table(["", "", *columns.values()], rows)
