"""Grids of variants, all trained by one recipe: what a paper ablates, or the readings of a paper. A room declares its
own as `GRID`.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from ..core.config import load_section, section_keys
from ..core.errors import UserError, did_you_mean
from ..core.paths import Paths, find_root
from ..core.runtime import choose_device, device_slug, load_runtime
from ..data.cells import manifest_path, suggest_data
from ..data.kinds import PrepareData
from ..data.manifest import read_manifest
from ..tasks.classification.params import ClassifierParams
from ..tasks.classification.spec import SPEC
from ..tasks.spec import TaskSpec
from ..training.grid import Variant, train_grid, train_one
from ..training.job import Cell
from . import describe_recipe, find_rooms

# what the recipes of the rooms for the embedded digits have in common; a patch of 4 pixels is a pixel of the scanned
# 8x8 digit
ON_DIGITS: dict[str, Any] = {
    "data": "digits",
    "batch_size": 32,
    "drop_path": 0.0,
    "evaluate_every": 2,
    "precision": "fp32",
    "mix": {"mixup": 0.0, "cutmix": 0.0},
    "transform": {"image_size": 32, "scale": [0.7, 1.0], "ratio": [0.85, 1.18], "hflip": 0.0, "crop_pct": 1.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Variants that a stage trains.

    Args:
        stage: its name.
        variants: name -> the options of the model that it changes.
        family: of the models whose recipe they share: that of the first one in `section`; None for `recipe` alone.
        model: what the model without changes is called.
        recipe: the recipe where `section` has no model of the family; None where it must have one.
        folder: where the results go, below results/measured/<device>/.
        flags: of the command line, with which the stage trains these variants.
        section: of params.yaml, in which the recipe stands.
        spec: the task of the variants.
        adapt: (recipe on the data, name of a variant) -> the recipe with what a variant changes beside options; None
            changes nothing.
        of_teacher: a file of weights -> the same grid for students of that model; None where no variant inherits.
    """

    stage: str
    variants: Mapping[str, Mapping[str, Any]]
    family: str | None
    model: str
    recipe: ClassifierParams | None = None
    folder: str
    flags: tuple[str, ...] = ()
    section: str = "pretrain"
    spec: TaskSpec = SPEC
    adapt: Callable[[Any, str], Any] | None = None
    of_teacher: Callable[[str], "Grid"] | None = None


def load_grid(paper: str, teacher: str | None = None) -> Grid:
    """The `GRID` of a paper's room, or that for students of another teacher.

    Raises:
        UserError: an unknown paper, one whose room has no variants, or a teacher for variants that do not inherit.
    """
    rooms = [room.split(".")[-2] for room in find_rooms()]
    if paper not in rooms:
        raise UserError(f"ablate: --paper {paper}: not known{did_you_mean(paper, rooms)}")
    name = f"{__package__}.{paper}.grid"
    if importlib.util.find_spec(name) is None:
        raise UserError(f"ablate: --paper {paper}: its room declares no variants")
    grid = importlib.import_module(name).GRID
    if teacher is None:
        return grid
    if grid.of_teacher is None:
        raise UserError(f"ablate: --teacher {teacher}: the variants of {paper} begin with random weights; leave it out")
    return grid.of_teacher(teacher)


def run_variants(
    grid: Grid, variant: str | None, *, data: str | None, seeds: int, epochs: int | None, jobs: int, speed: bool
) -> None:
    """Train one variant in this process, or all in processes of their own, into
    results/measured/<device>/<folder>/<data>/<variant>/.

    Args:
        grid: the stage and its variants.
        variant: the name of one; None trains all.
        data: a cell of prepare_data; None takes that of the shared recipe.
        seeds, epochs: trainings of each variant, with seeds 0, 1, ..., and their length; None takes that of the recipe.
        jobs, speed: see `repro.training.grid.train_grid`.

    Raises:
        UserError: an unknown variant or data set; see also `train_grid`.
    """
    for name, value in {"seeds": seeds, "epochs": epochs, "jobs": jobs}.items():
        if value is not None and value < 1:
            raise UserError(f"{grid.stage}: --{name} {value}: expected 1 or more")
    paths = find_root()
    names = list(grid.variants) if variant is None else [variant]
    built = {name: build_variant(grid, name, paths, data=data, seeds=seeds, epochs=epochs) for name in names}
    read_manifest(manifest_path(paths, built[names[0]].cell.params.data))
    if variant is None:
        train_grid(built, jobs=jobs, speed=speed)
    else:
        train_one(variant, built[variant], speed=speed)


def build_variant(grid: Grid, name: str, paths: Paths, *, data: str | None, seeds: int, epochs: int | None) -> Variant:
    """A variant with its cell; see `run_variants` and `vary_recipe`."""
    params = vary_recipe(grid, name, paths, data=data, seeds=tuple(range(seeds)), epochs=epochs)
    runtime = load_runtime(paths)
    folder = paths.measured(device_slug(choose_device(runtime.device))) / grid.folder / params.data / name
    shared = {"paths": paths, "runtime": runtime, "folder": folder, "recipe": describe_recipe}
    places = [*grid.folder.split("/")[1:], params.data, name]  # two rooms may have variants of one name
    cell = Cell(stage=grid.stage, name="_".join(places), params=params, spec=grid.spec, **shared)
    changes = ", ".join(f"{key} {value}" for key, value in grid.variants[name].items()) or f"{grid.model} itself"
    options = {"--variant": name, "--data": params.data, "--seeds": seeds, "--epochs": params.epochs}
    arguments = (*grid.flags, *(str(part) for pair in options.items() for part in pair), "--no-speed")
    return Variant(cell=cell, changes=changes, arguments=arguments)


def vary_recipe(
    grid: Grid, name: str, paths: Paths, *, data: str | None, seeds: tuple[int, ...], epochs: int | None
) -> ClassifierParams:
    """The parameters of a variant, trained as `pretrain` trains its first model of the family on this data.

    Where `pretrain` has none on the data, the recipe of its first one holds, or the grid's own, without the changes of
    the image that its labels may not survive; generated images keep their own size.

    Raises:
        UserError: an unknown variant or data set, or no recipe.
    """
    if name not in grid.variants:
        raise UserError(f"{grid.stage}: --variant {name}: not known{did_you_mean(name, grid.variants)}")
    cells = section_keys(paths.params, grid.section) if grid.family else []
    every = [load_section(grid.spec.params, paths.params, grid.section, cell) for cell in cells]
    ours = [params for params in every if params.model.startswith(f"{grid.family}_")] or (
        [grid.recipe] if grid.recipe else []
    )
    if not ours:
        raise UserError(
            f"{paths.params}: {grid.section}: has no cell with a {grid.model}, whose recipe the variants need; add one"
        )
    data = data or ours[0].data
    if data not in (known := section_keys(paths.params, "prepare_data")):
        raise UserError(
            f"{grid.stage}: --data {data}: not a cell of prepare_data in params.yaml{suggest_data(paths, data, known)}"
        )
    recipe = next((params for params in ours if params.data == data), None)
    if recipe is None:
        unchanged = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0, "color_jitter": None, "auto_augment": None}
        unchanged |= {"re_prob": 0.0, "crop_pct": 1.0}
        if written := load_section(PrepareData, paths.params, "prepare_data", data).curves:
            unchanged["image_size"] = written.image_size
        transform = dataclasses.replace(ours[0].transform, **unchanged)
        recipe = dataclasses.replace(
            ours[0], transform=transform, mix=dataclasses.replace(ours[0].mix, mixup=0.0, cutmix=0.0)
        )
    recipe = dataclasses.replace(recipe, data=data)
    if grid.adapt is not None:
        recipe = grid.adapt(recipe, name)
    options, length = {**recipe.options, **grid.variants[name]}, epochs or recipe.epochs
    return dataclasses.replace(recipe, options=options, seeds=seeds, epochs=length, snapshot_epochs=())
