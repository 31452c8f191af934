"""Maps of a trained classifier and its inner learner, for `repro explain` and `repro visualize`."""

import re
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..core.errors import UserError, blame
from ..core.runtime import device_label
from ..data.classification import eval_transform
from ..data.pixels import MAX_PIXELS, read_pixels
from ..models.checkpoints import open_weights
from . import draw, erf, inner
from .attention import explain_attention
from .classifier import Classifier, load_classifier

# the choices of `repro explain --map`
Map = Literal["gmm", "erf", "reconstruction", "attention"]


def find_snapshots(weights: Path) -> dict[int, Path]:
    """Map epoch to file, in order of the epochs, for the snapshots that a training left next to a weights file.

    `repro.runs.job` names them. A file with another name is ignored without an error.
    """
    found = {
        re.fullmatch(r"epoch_(\d+)", file.stem): file
        for file in (weights.parent / "snapshots").glob("epoch_*.safetensors")
    }
    return dict(sorted((int(match[1]), file) for match, file in found.items() if match))


def measure_field(classifier: Classifier, inputs: Tensor) -> tuple[erf.FieldShape, np.ndarray]:
    """Compute the receptive field of a model's central unit over inputs (N,3,H,W): in numbers, and as a map (H,W)."""
    field = erf.compute_receptive_field(erf.get_last_features(classifier.model), inputs)
    return erf.describe_field(field, erf.find_centre(classifier.model, tuple(inputs.shape[-2:]))), field.cpu().numpy()


def require_png(output: Path) -> None:
    """Raise UserError if the output of a figure is not a PNG."""
    if output.suffix.lower() != ".png":
        raise UserError(f"{output}: the figure is written as PNG; give a name that ends in .png")


def draw_map(
    classifier: Classifier,
    pictures: list[Path],
    map: Map,
    output: Path,
    teacher: Path | None = None,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Draw a map of pictures as a PNG, and print its main numbers.

    `gmm` has a row for each picture, or two with a snapshot of epoch 0; `erf` and `reconstruction` are averaged over
    the pictures; for `attention` see `explain_attention`.

    Raises:
        UserError: a picture cannot be read, the output is not a PNG, or the model does not have this map.
    """
    require_png(output)
    weights = classifier.checkpoint.path
    images = torch.stack([_read_picture(classifier, path, max_pixels) for path in pictures])
    inputs = classifier.to_inputs(images)
    count = f"{len(images)} picture" + ("s" if len(images) > 1 else "")
    source = "/".join(weights.parts[-2:]) if weights else "published weights"
    caption = f"{classifier.name}, {source}, {count}; {device_label(classifier.device)}"
    if map == "erf":
        with blame(str(weights or classifier.name), ValueError):
            shape, field = measure_field(classifier, inputs)
        draw.draw_fields(output, {classifier.name: field}, {classifier.name: shape}, caption)
        half, most = f"{shape.radius_50_px:.1f} px", f"{shape.radius_90_px:.1f} px"
        print(f"50 % of the contributions lie within {half}, 90 % within {most}; anisotropy {shape.anisotropy:.3f}")
    elif map == "attention":
        explain_attention(classifier, images, teacher, output, caption)
    else:
        try:
            _draw_inner_map(classifier, images, inputs, map, output, caption)
        except ValueError as error:
            raise UserError(f"{weights or classifier.name}: {error}; use --map erf") from None
    size, mode = classifier.transform.image_size, classifier.transform.crop_mode
    if mode is None:
        resized = f"resized to a short side of {round(size / classifier.transform.crop_pct)} px"
        print(f"{output}: {count}, {resized}; the model sees the central {size}x{size}")
    else:
        print(f"{output}: {count}, brought to {size}x{size} by crop_mode {mode}")


def _draw_inner_map(
    classifier: Classifier, images: Tensor, inputs: Tensor, map: Map, output: Path, caption: str
) -> None:
    """Draw `gmm` or `reconstruction` of a model and, where its training left snapshots, of those.

    Raises:
        ValueError: the model has no inner learner that can be drawn.
    """
    weights = classifier.checkpoint.path
    snapshots = find_snapshots(weights) if weights else {}

    def load(file: Path) -> nn.Module:
        """Build the model of a snapshot, as `load_classifier` does."""
        return load_classifier(open_weights(file), classifier.device).model

    if map == "gmm":
        models = {"before": load(snapshots[0])} if 0 in snapshots else {}
        models["after"] = classifier.model
        maps = {state: inner.compute_gradient_maps(model, inputs).cpu() for state, model in models.items()}
        tops = {state: inner.mark_tokens(classifier.model, found) for state, found in maps.items()}
        draw.draw_gradients(output, list(images.permute(0, 2, 3, 1).numpy()), maps, tops, caption)
    else:
        models = {f"epoch {epoch}": load(file) for epoch, file in snapshots.items()} or {"trained": classifier.model}
        losses = {state: inner.compute_reconstruction_losses(model, inputs).cpu() for state, model in models.items()}
        draw.draw_losses(output, losses, caption)


def _read_picture(classifier: Classifier, path: Path, max_pixels: int) -> Tensor:
    """Read a picture, resized and cropped for the model: uint8 (3, S, S)."""
    return torch.as_tensor(eval_transform(classifier.transform)(Image.fromarray(read_pixels(path, max_pixels))))
