"""`repro export`: a trained classifier in a format of other programs: timm's folder layout, ONNX, or torch.export."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.errors import UserError
from repro.core.hashing import require_hash

from . import Sha256Option, Stage

STAGE = Stage(purpose="use", records=False)


def command(
    weights: Annotated[
        Path | None, typer.Option(help="A .safetensors file of a classifier of this project; it names its model.")
    ] = None,
    format: Annotated[
        Literal["safetensors", "onnx", "torch_export"] | None,
        typer.Option(help="safetensors writes a folder as on the Hugging Face hub."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="What to write; by default, here: a folder <model>, or a file <model>_<size>."
        ),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Image size of the file in pixels, if not that of the training.")
    ] = None,
    any_size: Annotated[
        bool, typer.Option("--any-size", help="One graph for all image sizes, where the model has one.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Read the file back with its own runtime and compare the logits.")
    ] = True,
    sha256: Sha256Option = None,
) -> None:
    """Write a classifier for timm, ONNX or torch.export."""
    from repro.inference import export as exporting

    if weights is None or format is None:
        raise UserError("export: --weights FILE and --format are needed")
    require_hash(weights, sha256)
    exporting.export(weights, format, output, image_size, verify, any_size)
