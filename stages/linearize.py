"""`repro linearize`: conversion of a pretrained softmax ViT into a backbone of linear cost (T5)."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.errors import UserError
from repro.core.hashing import require_hash
from repro.tasks.linearization.spec import SPEC

from . import CellOption, GpusOption, SeedsOption, Sha256Option, Stage, typed_options

STAGE = Stage(params=SPEC.params, cells=True, task=SPEC)


def command(
    context: typer.Context,
    cell: CellOption = None,
    gpus: GpusOption = None,
    seeds: SeedsOption = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Linearise this ViT in place of a cell: a file of weights, or a name of timm's."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --from: the ViT's registered name, where its file does not say it.")
    ] = None,
    inner: Annotated[
        Literal["linear", "projqk", "gate", "2layer", "3layer", "swiglu"],
        typer.Option(help="With --from: what takes the place of softmax attention."),
    ] = "swiglu",
    key_norm: Annotated[
        Literal["none", "instance", "no_std", "no_mean", "layer", "rms"],
        typer.Option(help="With --from: the norm of the keys."),
    ] = "instance",
    dwc: Annotated[
        Literal["none", "cpe", "v", "qk"], typer.Option(help="With --from: what gets a depth-wise convolution.")
    ] = "qk",
    neighbours: Annotated[
        int, typer.Option(min=0, help="With --from: side of the window of neighbourhood attention beside; 0 for none.")
    ] = 0,
    freeze: Annotated[
        bool, typer.Option("--freeze/--finetune", help="With --from: train new parameters alone, or all.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="With --from: a cell of prepare_data, or folder:PATH; by default that of the recipe."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="With --from: epochs of the training.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="With --from: images per step, over all GPUs together.")
    ] = None,
    sha256: Sha256Option = None,
) -> None:
    """Replace a ViT's softmax attention by an inner learner, and train; a stopped run continues where it was."""
    from repro.papers import describe_recipe
    from repro.runs.cells import read_cells, train_cells
    from repro.runs.from_weights import make_cell

    options = {"inner": inner, "key_norm": key_norm, "dwc": dwc, "neighbours": neighbours}
    if source is None:
        if unused := [name for name in typed_options(context) if name not in ("cell", "seeds", "gpus")]:
            option = unused[0].replace("_", "-")
            raise UserError(f"linearize: --{option} goes with --from; the cells of params.yaml say it themselves")
        train_cells(read_cells("linearize", SPEC, cell, seeds=seeds, recipe=describe_recipe), gpus)
        return
    if cell is not None:
        raise UserError("linearize: --from and --cell: give one of them")
    require_hash(Path(source), sha256)
    sizes = {"epochs": epochs, "batch_size": batch_size, "seeds": seeds}
    made = make_cell(source, model=model, options=options, freeze=freeze, data=data, **sizes, recipe=describe_recipe)
    train_cells([made], gpus)
