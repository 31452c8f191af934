"""`repro predict`: predictions of a trained model on your own pictures."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.hashing import require_hash

from . import Sha256Option, Stage

STAGE = Stage(purpose="use", records=False)


def command(
    images: Annotated[list[Path], typer.Argument(help="Pictures of any size; a folder stands for those in it.")],
    weights: Annotated[
        Path, typer.Option(help="A .safetensors file of this project; it names its model and its task.")
    ],
    task: Annotated[
        Literal["classify", "detect", "segment"] | None, typer.Option(help="Refuse weights of another task.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the annotated pictures and predictions.json; default: predictions/<task>.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="File for the predictions; without it, classes are only printed.")
    ] = None,
    min_score: Annotated[float, typer.Option(min=0, max=1, help="Do not draw detections below this score.")] = 0.5,
    sha256: Sha256Option = None,
) -> None:
    """Classify pictures, or draw what is detected or segmented in them."""
    from repro.inference.predict import predict_pictures

    require_hash(weights, sha256)
    predict_pictures(images, weights, task, output, json, min_score)
