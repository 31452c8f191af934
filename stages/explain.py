"""`repro explain`: attention of a trained model on your own pictures, and the work of its inner learner."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.config import list_cells
from repro.core.errors import UserError
from repro.core.hashing import require_hash
from repro.core.paths import find_root
from repro.core.runtime import choose_device, load_runtime

from . import Sha256Option, Stage

STAGE = Stage(purpose="use")


def command(
    images: Annotated[
        list[Path] | None, typer.Argument(help="Pictures of any size; a folder stands for the pictures in it.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="A file of this project, or with --model an official file; by default that of the first cell of `pretrain`."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A registered name; without --weights, the weights that timm publishes for it.")
    ] = None,
    map: Annotated[
        Literal["gmm", "erf", "reconstruction", "attention"],
        typer.Option(
            help="Gradient Magnitude Map, effective receptive field, the inner loss of each token, or where a ViT's tokens look."
        ),
    ] = "gmm",
    probe: Annotated[
        str | None,
        typer.Option(
            help="Instead of a map, measure the accuracy with a changed inner loop: steps=K, ascent or q_is_k; or whether "
            "queries are distributed as keys and outputs as values: distributions."
        ),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            help="With --map attention: the softmax model from which the model was linearised; shown beside it."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A cell of `prepare_data`: with --probe (by default digits), or in place of pictures with --map attention."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The PNG file to write.")] = Path("explained.png"),
    sha256: Sha256Option = None,
) -> None:
    """Draw what a model looks at or how it learns; or measure a changed inner loop."""
    paths = find_root()
    # exactly one of pictures, a probe and the data of an attention map says what to look at
    of_data = map == "attention" and data is not None and probe is None
    if bool(images) + bool(probe) + of_data != 1:
        raise UserError(
            "explain: give pictures to draw a map, or --probe NAME; --map attention takes --data NAME in place of pictures"
        )
    if teacher is not None and (probe or map != "attention"):
        raise UserError("explain: --teacher goes with --map attention")
    if images and data is not None:
        raise UserError("explain: --data goes with --probe, or with --map attention in place of pictures")
    if weights is None and model is None:
        first = paths.cell("pretrain", list_cells(paths, "pretrain")[0]) / "metrics.json"
        weights = paths.artifacts(first) / "weights.safetensors"
    require_hash(weights, sha256)
    from repro.data.cells import open_cell
    from repro.inference import distributions
    from repro.inference.attention import measure_on_data
    from repro.inference.classifier import load_classifier
    from repro.inference.explain import draw_map, require_png
    from repro.inference.predict import find_pictures
    from repro.inference.probes import compare_probe
    from repro.models.checkpoints import open_weights

    runtime = load_runtime(paths)
    cell = None if images else open_cell(paths, runtime, data or "digits")
    classifier = load_classifier(open_weights(weights, model=model), choose_device(runtime.device))
    if cell is None:
        draw_map(classifier, find_pictures(images), map, output, teacher, runtime.max_pixels)
    elif probe == distributions.NAME:
        distributions.record_distributions(classifier, cell, paths, runtime)
    elif probe is not None:
        compare_probe(classifier, cell, probe, paths, runtime)
    else:
        require_png(output)
        measure_on_data(classifier, cell, teacher, output, paths, runtime)
