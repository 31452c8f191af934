"""The cell of `repro linearize --from`, which has no section in params.yaml."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.config import list_cells, load_section
from ..core.errors import UserError
from ..core.paths import Paths, find_root
from ..core.ranks import in_torchrun
from ..core.runtime import choose_device, device_slug, load_runtime
from ..data.cells import manifest_path, require_data
from ..data.own import parse_own
from ..data.prepare import prepare_own
from ..data.settings import TransformSettings
from ..tasks.linearization.params import LinearizeParams
from ..tasks.linearization.spec import SPEC
from .job import Cell, Recipe, describe_init

_STAGE = "linearize"
# timm's modules of the models that `models.linearize.read_shell` can read
_VITS = {"timm.models.vision_transformer", "timm.models.deit"}


def make_cell(
    source: str,
    *,
    model: str | None,
    options: Mapping[str, Any],
    freeze: bool,
    data: str | None,
    epochs: int | None,
    batch_size: int | None,
    seeds: int | None,
    recipe: Recipe,
) -> Cell:
    """Make the cell that linearises a ViT, with the recipe of the cell of `linearize:` on this data, else of the first.

    Args:
        source: a file of weights, or a name of weights that timm publishes.
        model: registered name of the ViT, where its file does not say it.
        options: of the student, see `repro.models.t5.T5`.
        freeze: whether only new parameters learn.
        data: a cell of `prepare_data`, or `folder:PATH`; None for that of the recipe.
        epochs, batch_size, seeds: instead of those of the recipe.
        recipe: see `Cell`.

    Raises:
        UserError: weights that cannot be read, another model than a ViT, a student that cannot be built, or unknown
            data.
    """
    from ..models.checkpoints import open_weights
    from ..models.linearize import choose_student, read_shell
    from ..models.registry import build_model

    paths = find_root()
    runtime = load_runtime(paths)
    file, teacher = find_weights(paths, source, model)
    opened = open_weights(file, model=teacher).require_classifier()
    if opened.is_own:
        teacher = None  # the file says it, and the params must not say it again, see `LinearizeParams.teacher`
    shell = read_shell(opened.build(), source)  # all of the ViT but its attention
    own = parse_own(data or "")
    if own and own.kind != "folder":
        raise UserError(f"linearize: --data {data}: expected folder:PATH, or a cell of prepare_data")
    if own:
        data = own.full_name
    params = find_recipe(paths, None if own else data)
    name, of_shell = choose_student(shell)
    changes: dict[str, Any] = {"model": name, "options": of_shell | options, "teacher": teacher, "snapshot_epochs": ()}
    changes["init"] = describe_init(paths, file)
    changes["freeze"] = freeze
    transform = params.transform.adapt(opened.preprocessing)
    if params.data != (data or params.data):  # the images of other data, as the ViT saw its own
        changes["data"], transform = data, dataclasses.replace(transform, image_size=opened.image_size)
    changes["transform"] = transform
    if batch_size:
        changes["batch_size"] = batch_size
    if seeds:
        changes["seeds"] = tuple(range(seeds))
    try:
        if epochs:
            params = params.with_epochs(epochs)
        params = dataclasses.replace(params, **changes)
        build_model(name, img_size=params.transform.image_size, **params.options)
    except ValueError as error:
        raise UserError(f"linearize: {error}") from None
    if own and not in_torchrun():  # the process that started torchrun has done it
        prepare_own(data, paths, runtime)
    stem = file.parent.name if file.stem == "weights" else file.stem
    parts = [stem, *(f"{key}_{value}" for key, value in options.items()), own.name if own else params.data]
    parts += (["frozen"] if freeze else []) + ([f"{epochs}epochs"] if epochs else [])
    cell = "-".join(parts).replace(".", "_")
    measured = paths.replications(device_slug(choose_device(runtime.device))) / _STAGE
    about = {"stage": _STAGE, "name": cell, "spec": SPEC, "recipe": recipe}
    # the sets of one's own have a folder each, where the models are next to `data`
    record = manifest_path(paths, data).parents[1] / cell / "metrics.json" if own else measured / f"{cell}.json"
    return Cell(**about, params=params, paths=paths, runtime=runtime, record=record)


def find_recipe(paths: Paths, data: str | None) -> LinearizeParams:
    """Return the params of the cell of `linearize:` on this data, else of the first one.

    Raises:
        UserError: unknown data, or the section has no cell.
    """
    if data is not None:
        require_data(paths, _STAGE, data)
    cells = [load_section(LinearizeParams, paths.params, _STAGE, cell) for cell in list_cells(paths, _STAGE)]
    return next((params for params in cells if params.data == data), cells[0])


def find_weights(paths: Paths, source: str, model: str | None) -> tuple[Path, str | None]:
    """Return the file of a ViT's weights, and the `model` that was named for it; fetch published weights once.

    Raises:
        UserError: neither a file nor a name with published weights.
        RunError: the weights cannot be fetched.
    """
    from timm.models import is_model_pretrained

    from ..models.checkpoints import open_weights
    from ..models.registry import family_module

    # a name of timm's may hold a dot before its tag, as a file's name before its suffix, and be that of a folder here
    file, published = Path(source), is_model_pretrained(source)
    if model is not None or file.is_file() or ((file.suffix or file.exists()) and not published):
        if not file.is_file():
            raise UserError(f"linearize: --from {source}: no such file")
        return file.resolve(), model
    checkpoint = open_weights(None, model=source)
    if family_module(checkpoint.model) not in _VITS:  # refused before anything is fetched
        raise UserError(f"linearize: --from {source}: is no ViT or DeiT; expected one of timm's, or a file of weights")
    fetched = paths.root / ".runs" / "published" / f"{checkpoint.name}.safetensors"
    if not fetched.is_file():
        _keep(checkpoint, fetched)
    return fetched, None


def _keep(checkpoint: Any, file: Path) -> None:
    """Write published weights as a file of this project, so that records can name it by its hash.

    Its classes are named 0, 1, …, which `checkpoints.has_classes` takes for no names, so that a student keeps the head
    on data of as many classes.
    """
    from ..models.weights import save_weights

    classes = [str(index) for index in range(checkpoint.num_classes)]
    shown = TransformSettings.from_preprocessing(checkpoint.preprocessing).preprocessing()
    options = {"num_classes": checkpoint.num_classes}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_weights(file, checkpoint.build(), name=checkpoint.model, options=options, preprocessing=shown, classes=classes)
