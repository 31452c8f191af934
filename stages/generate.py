"""`repro generate`: train a denoiser, DiT, DiT3 or DiT5, or draw pictures with one."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.errors import UserError
from repro.core.hashing import require_hash
from repro.tasks.generation.spec import SPEC

from . import GpusOption, SeedsOption, Sha256Option, Stage, typed_options

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC)
# the parameters that a training takes and drawing refuses; `sha256` belongs to both
_TRAINING = ("cell", "gpus", "seeds", "init")


def command(
    context: typer.Context,
    cell: Annotated[str | None, typer.Option(help="Train this cell of `generate:` in params.yaml.")] = None,
    init: Annotated[
        str | None,
        typer.Option("--from", help="With --cell: begin with these weights; a DiT5 inherits those of a DiT."),
    ] = None,
    gpus: GpusOption = None,
    seeds: SeedsOption = None,
    weights: Annotated[
        Path | None, typer.Option(help="Draw with this denoiser: a file of this project, or of a release.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The denoiser of a release's file, which does not name it.")] = None,
    class_label: Annotated[str, typer.Option(help="What to draw: a class by its name or number, or `all`.")] = "all",
    samples: Annotated[
        int | None, typer.Option(min=1, help="How many pictures in all; by default eight of each class.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps from noise to picture, 2 to 1000; by default as in the training's cell.")
    ] = None,
    sampler: Annotated[Literal["ddpm", "ddim"] | None, typer.Option(help="DDPM, or DDIM without noise.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Scale of classifier-free guidance; 1 guides nothing.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise: the same pictures come of the same seed.")] = 0,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Pictures that are drawn at once; it does not change them.")
    ] = 64,
    image_size: Annotated[int | None, typer.Option(help="Side in pixels; by default that of the training.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures and samples.json.")] = Path(
        "samples"
    ),
    vae: Annotated[
        Path | None, typer.Option(help="Of a model of latents: the VAE's decoder as TorchScript or .pt2.")
    ] = None,
    vae_sha256: Annotated[str | None, typer.Option(help="The VAE's SHA-256, or its first 8 digits or more.")] = None,
    sha256: Sha256Option = None,
    judge: Annotated[
        Path | None, typer.Option(help="A classifier's weights: how many pictures it takes for their class.")
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(help="inception-2015-12-05.pt: FID, sFID, IS, precision and recall against --data.")
    ] = None,
    inception_sha256: Annotated[
        str | None, typer.Option(help="The hash of another file with its interface, 16 digits or more.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --inception or --judge: a cell of prepare_data, whose reported split is real; with --inception "
            "also a reference batch, FILE.npz."
        ),
    ] = None,
) -> None:
    """Draw pictures with a denoiser, or train one; a stopped training continues where it was."""
    given = typed_options(context)
    if weights is None:
        from repro.runs.cells import read_cells, train_cells

        if drawing := [name for name in given if name not in (*_TRAINING, "sha256")]:
            option = f"--{drawing[0].replace('_', '-')}"
            raise UserError(
                f"generate: {option} is for drawing, which needs --weights FILE; a training takes all settings from its cell"
            )
        if cell is None:
            raise UserError("generate: nothing to do; train with --cell NAME, or draw with --weights FILE")
        require_hash(None if init is None else Path(init), sha256)
        train_cells(read_cells("generate", SPEC, cell, init=init, seeds=seeds), gpus)
        return
    if set(given) & set(_TRAINING):
        raise UserError("generate: --cell, --from, --gpus and --seeds train, and --weights draws; take one of them")
    require_hash(weights, sha256)
    require_hash(vae, vae_sha256, stated="--vae-sha256")
    from repro.inference.generate import DrawRequest, draw_pictures

    sampling = {"steps": steps, "sampler": sampler, "guidance": guidance}
    request = DrawRequest(
        weights=weights,
        model=model,
        vae=vae,
        image_size=image_size,
        class_label=class_label,
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        sampling={name: value for name, value in sampling.items() if value is not None},
        judge=judge,
        inception=inception,
        inception_sha256=inception_sha256,
        data=data,
        output=output,
    )
    draw_pictures(request)
