"""`repro evaluate`: accuracy of a registered model, or of published weights, on prepared data at any image size."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.hashing import require_hash
from repro.core.paths import find_root
from repro.core.runtime import load_runtime
from repro.inference.params import EvaluateRequest

from . import Sha256Option, Stage

STAGE = Stage(purpose="use")


def command(
    data: Annotated[str, typer.Option(help="A cell of `prepare_data`, e.g. digits or imagenet.")],
    weights: Annotated[
        Path | None,
        typer.Option(
            help="A .safetensors file of this project, which names its model; or, with --model, an official file of that model."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "--models",
            help="A registered name; several with --pretrained; with --weights, the file's model.",
        ),
    ] = None,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            help="With --model: the weights that timm publishes, trained on ImageNet-1K alone if possible.",
        ),
    ] = False,
    table1: Annotated[
        bool,
        typer.Option(
            "--table1", help="Every model of the paper's Table 1 with published weights, at the table's image size."
        ),
    ] = False,
    image_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Image size (side in pixels), if not that of the training; several give a curve."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 64,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Evaluate only this many images, drawn with a fixed seed: a quick look, not a full score."
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        typer.Option(help="bf16 and fp16 run under autocast; the papers evaluate in fp32."),
    ] = "fp32",
    sha256: Sha256Option = None,
) -> None:
    """Measure top-1 and top-5 accuracy; the records go to results/replications, or results/own for your own pictures."""
    from repro.inference.evaluate import evaluate
    from repro.papers.vision_ttt.published import find_table1_models, find_table1_top1

    require_hash(weights, sha256)
    paths = find_root()
    request = EvaluateRequest(
        weights=weights,
        models=tuple(model or ()),
        pretrained=pretrained,
        table1=table1,
        image_sizes=tuple(image_size or ()),
        batch_size=batch_size,
        limit=limit,
        dtype=dtype,
    )
    evaluate(paths, load_runtime(paths), data, request, find_models=find_table1_models, find_printed=find_table1_top1)
