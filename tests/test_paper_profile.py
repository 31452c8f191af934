"""A made-up batch goes through every cell of profiles/paper.yaml and profiles/night.yaml: images are tiny where the size
is free, all widths, options and class counts are real. What would fail on the first step of a run of days fails here.
`make test` takes a cell or two of each task, `make test-all` every cell.
"""

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from repro.core.config import load_section, load_yaml
from repro.core.runtime import seed_everything
from repro.models.checkpoints import open_weights
from repro.models.registry import build_model, family_module
from repro.models.weights import save_weights
from repro.papers.vision_ttt.sections import load_questions
from repro.tasks.spec import Datasets
from stages import load_stages
from tests.tasks.backbones import Batches

FILES = {name: Path(__file__).parents[1] / "profiles" / f"{name}.yaml" for name in ("paper", "night")}
PROFILES = {name: load_yaml(file) for name, file in FILES.items()}
TRAINING = {name: stage for name, stage in load_stages().items() if stage.task is not None}
STAGES = [(profile, stage) for profile in PROFILES for stage in TRAINING]
CELLS = [(profile, stage, cell) for profile, stage in STAGES for cell in PROFILES[profile].get(stage) or {}]
SIDE = 64


def choose_cells():
    """Every cell; those that are not the first of their kind are slow.

    A task has two kinds: columnar models, which a detector or segmenter adapts, and those with maps of their own.
    """
    seen = set()
    for profile, stage, cell in CELLS:
        task, model = TRAINING[stage].task.name, PROFILES[profile][stage][cell]["model"]
        kind = task, "patch" in model
        yield pytest.param(profile, stage, cell, id=f"{stage}-{cell}", marks=[pytest.mark.slow] * (kind in seen))
        seen.add(kind)


def classify(params, classes):
    side = min(SIDE, params.transform.image_size)
    params = dataclasses.replace(params, transform=dataclasses.replace(params.transform, image_size=side))
    return params, (torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8), torch.tensor([0, classes - 1]))


def detect(params, classes):
    """An object of the first class and one of the last, on images of different sizes."""
    images, targets = [], []
    for width, label in ((SIDE, 1), (96, classes)):
        images.append(torch.randint(0, 256, (3, SIDE, width), dtype=torch.uint8))
        masks = torch.zeros(1, SIDE, width, dtype=torch.uint8)
        masks[0, 8:40, 8:48] = 1
        boxes = torch.tensor([[8.0, 8.0, 48.0, 40.0]])
        targets.append({"boxes": boxes, "labels": torch.tensor([label]), "masks": masks})
    return params, (images, targets)


def segment(params, classes):
    """A map that has every class, and pixels that do not count."""
    labels = torch.arange(2 * SIDE * SIDE).remainder(classes).to(torch.uint8).view(2, SIDE, SIDE)
    labels[0, :4] = 255
    return params, (torch.randint(0, 256, (2, 3, SIDE, SIDE), dtype=torch.uint8), labels)


def generate(params, classes):
    """Latents of small pictures, of the first class and the last."""
    transform = dataclasses.replace(params.transform, image_size=SIDE)
    batch = torch.randn(2, *transform.shape), torch.tensor([0, classes - 1])
    return dataclasses.replace(params, transform=transform), batch


MADE_UP = {"classify": classify, "linearize": classify, "detect": detect, "segment": segment, "generate": generate}


def save_softmax(file, profile, params, classes):
    """Random weights of the softmax model from which a cell of `linearize:` starts, which is one of `pretrain:`."""
    _, stage, name, _ = Path(params.init.weights).parts
    cell, side = load_section(TRAINING[stage].task.params, FILES[profile], stage, name), params.transform.image_size
    options = {**cell.options, "img_size": side, "num_classes": classes}
    described = {"name": cell.model, "options": options, "preprocessing": params.transform.preprocessing()}
    save_weights(file, build_model(cell.model, **options), **described, classes=list(map(str, range(classes))))
    return file


@pytest.mark.parametrize(("profile", "stage", "cell"), [*choose_cells()])
def test_a_batch_goes_through_every_cell(profile, stage, cell, tmp_path):
    spec = TRAINING[stage].task
    params = load_section(spec.params, FILES[profile], stage, cell)
    classes = PROFILES[profile]["prepare_data"][params.data]["expected"]["classes"]
    seed_everything(0)
    params, batch = MADE_UP[spec.name](params, classes)
    names = tuple(map(str, range(classes)))
    init = None  # other cells than those of students begin at random
    if spec.name == "linearize":
        init = save_softmax(tmp_path / "weights.safetensors", profile, params, classes)
    params = params if init else dataclasses.replace(params, init=None)
    model, _ = spec.build_model(params, names, init, f"{stage}.{cell}")
    loader = Batches([batch])
    datasets = Datasets(train=None, held_out={"val": None}, classes=names)
    parts = {"model": model.train(), "train": loader, "held_out": {"val": loader}, "batch_size": 2}
    task = spec.build_task(datasets, params, **parts, device=torch.device("cpu"))
    if params.teacher_from is not None:
        task.teacher = copy.deepcopy(model).eval()
    loss = task.loss(model, batch)["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is None or torch.isfinite(p.grad).all() for p in trained)
    reached = sum(p.grad is not None for p in trained)
    assert reached > 0.9 * len(trained), f"{reached} of {len(trained)} parameters are reached by the gradient"


def test_official_weights_are_cropped_as_the_cells_of_their_model(tmp_path):
    torch.save({"head.bias": torch.zeros(1000)}, tmp_path / "official.pth")
    crops = {}
    for cell in PROFILES["paper"]["pretrain"].values():
        if hasattr(sys.modules[family_module(cell["model"])], "official_state_dict"):
            crops[cell["model"]] = cell["transform"]["crop_pct"]
    assert len(crops) > 15
    opened = {model: open_weights(tmp_path / "official.pth", model=model).preprocessing for model in crops}
    assert {model: found["crop_pct"] for model, found in opened.items()} == crops


def test_every_data_set_of_a_cell_is_prepared():
    for profile, stage, cell in CELLS:
        assert PROFILES[profile][stage][cell]["data"] in PROFILES[profile]["prepare_data"]


def test_models_of_the_night_differ_in_nothing_but_the_searched_rate():
    """What a pair of the night compares: model, options that make the model, and learning rate."""
    questions, sections = load_questions(), PROFILES["night"]
    for data, about in questions["data"].items():
        names = {name for place in about["tables"] for pair in questions["pairs"][place] for name in pair}
        recipes = set()
        for cell in (
            sections["pretrain"][f"{questions['models'][name]['cell'].rpartition('/')[2]}_{data}"] for name in names
        ):
            fixed = {
                key: value
                for key, value in cell.items()
                if key not in ("model", "family", "options", "snapshot_epochs")
            }
            recipes.add(repr(sorted((fixed | {"optim": {**cell["optim"], "lr": None}}).items())))
        assert len(names) > 4 and len(recipes) == 1
