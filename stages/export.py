"""`repro export`: a trained classifier as a file that other programs load: timm's folder layout, ONNX, or torch.export."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.errors import UserError
from repro.core.hashing import require_hash
from repro.core.noise import describe_noise
from repro.core.paths import Paths, find_root
from repro.core.record import read_record

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
        typer.Option("--output", "-o", help="The file or folder to write; by default <model>_<size> in this folder."),
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
    bench: Annotated[
        bool, typer.Option("--bench", help="Instead, time exports of models with random weights, and record them.")
    ] = False,
) -> None:
    """Write a classifier for timm, ONNX or torch.export."""
    from repro.inference import export as exporting

    if bench:
        if weights or format:
            raise UserError("export: --bench chooses its models and formats; leave --weights and --format out")
        exporting.bench(find_root())
        return
    if weights is None or format is None:
        raise UserError("export: --weights FILE and --format are needed")
    require_hash(weights, sha256)
    exporting.export(weights, format, output, image_size, verify, any_size)


def describe_exports(paths: Paths) -> str:
    """The rows of `--bench` as tables, for docs/export.md."""
    blocks = []
    for file in sorted(paths.results.glob("replications/*/export.json")):
        record = read_record(file)
        blocks.append(f"{record['identity']['device']}; model, pixels and format, then what was measured:\n")
        blocks.append("| model | format | written in (s) | MiB | difference | an image (ms) | eager (ms) |")
        blocks.append("|---|---|---|---|---|---|---|")
        for row in sorted(record["metrics"]["rows"], key=lambda row: (row["side"], row["model"], row["format"])):
            noise = f" ({describe_noise(row)})" if row["noisy"] else ""
            blocks.append(
                f"| {row['model']}, {row['side']}² | {row['format']} | {row['write_s']:.0f} | {row['file_mib']:.1f} "
                f"| {row['logit_difference'] / row['largest_logit']:.0e} | {row['latency_ms']:.0f}{noise} "
                f"| {row['eager_ms']:.0f} |"
            )
    return "\n".join(blocks) or "No export is recorded: run `repro export --bench`."
