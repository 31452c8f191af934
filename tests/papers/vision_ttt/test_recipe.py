"""The resolved recipe by hand arithmetic; departures against the paper's Appendix D, DeiT's augmentation and Swin's
config.py.
"""

import copy
import dataclasses

import pytest
from timm.data import create_transform
from torch import nn

from repro.core.config import load_section
from repro.papers import describe_recipe
from repro.papers.kv_binding import recipe as kv
from repro.papers.recipe import describe, find_departures, lines, resolve
from repro.papers.vision_ttt import recipe as vision_ttt
from repro.papers.vit3 import recipe as vit3
from repro.tasks.classification.params import ClassifierParams
from repro.training.optim import build_optimizer, build_schedule
from repro.training.params import OptimParams
from tests.conftest import ROOT

IMAGENET = 1281167
PAPER_CELLS = ["vittt_tiny_imagenet", "vittt_small_imagenet", "vittt_base_imagenet"]
SIZES = "vittt_tiny_patch16_224, vittt_small_patch16_224, vittt_base_patch16_224"
SILENT = ", which the paper does not state"


def cell(name="vittt_tiny_imagenet"):
    return dataclasses.asdict(load_section(ClassifierParams, ROOT / "profiles/paper.yaml", "pretrain", name))


def change(params, changes):
    """A copy with other values at dotted keys."""
    changed = copy.deepcopy(params)
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = changed
        for section in sections:
            place = place[section]
        place[last] = value
    return changed


def resolved(params, *, train_images=IMAGENET, dtype=None, world_size=1, accumulate=1, micro_batch=None):
    micro = micro_batch or params["batch_size"] // world_size // accumulate
    facts = {"device": "cpu", "dtype": dtype or params["precision"], "backend": "torch", "train_images": train_images}
    return resolve(
        params, vision_ttt.PRINTED.choices, world_size=world_size, micro_batch=micro, accumulate=accumulate, **facts
    )


def departing(params, **facts):
    return find_departures(params, resolved(params, **facts), vision_ttt.PRINTED)


# --- what is resolved


def test_paper_recipe_by_hand():
    recipe = resolved(cell(), world_size=8, accumulate=2, micro_batch=64)
    assert recipe["batch"] == {"total": 1024, "world_size": 8, "micro_batch": 64, "accumulate": 2}
    assert recipe["steps"] == {"per_epoch": 1251, "warmup": 25020, "total": 375300}  # 1281167 = 1251 * 1024 + 143
    assert recipe["learning_rate"] == pytest.approx({"first": 1e-6, "peak": 1e-3, "final": 1e-5})
    optimizer = recipe["optimizer"]
    assert "no_weight_decay()" in optimizer.pop("exempt_from_weight_decay")
    assert optimizer == {"name": "AdamW", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05, "clip_grad_norm": 5}
    assert recipe["model"] == "vittt_tiny_patch16_224" and recipe["options"] == {} and recipe["drop_path"] == 0.1
    assert recipe["ema_decay"] is None and recipe["seed"] == 0 and recipe["epochs"] == 300
    assert recipe["data"] == {"cell": "imagenet", "train_images": IMAGENET}
    assert recipe["transform"]["auto_augment"] == "rand-m9-mstd0.5-inc1" and recipe["mix"]["cutmix"] == 1
    assert recipe["precision"] == {"dtype": "bf16", "device": "cpu", "backend": "torch"}
    assert list(recipe["inactive"]) == ["transform.color_jitter"]


@pytest.mark.parametrize("world_size, micro_batch, accumulate", [(3, 341, 1), (1, 1024, 2)])
def test_batch_that_does_not_come_out_is_refused(world_size, micro_batch, accumulate):
    made = world_size * micro_batch * accumulate
    with pytest.raises(ValueError, match=f"^batch_size: 1024, but {world_size} ranks .* make {made}$"):
        resolved(cell(), world_size=world_size, micro_batch=micro_batch, accumulate=accumulate)


@pytest.mark.parametrize(("warmup_epochs", "warmup_steps"), [(0, 0), (1, 0), (5, 0), (0, 3)])
def test_engine_does_what_the_recipe_says(warmup_epochs, warmup_steps):
    warmup = {"optim.warmup_epochs": warmup_epochs, "optim.warmup_steps": warmup_steps}
    params = change(cell(), {"epochs": 2, "batch_size": 512} | warmup)
    recipe = resolved(params, train_images=512 * 7 + 3)
    assert recipe["steps"] == {"per_epoch": 7, "warmup": warmup_steps or 7 * min(warmup_epochs, 2), "total": 14}
    assert ("optim.warmup_lr" in recipe["inactive"]) == (not warmup_steps and not warmup_epochs)
    optim = OptimParams(**params["optim"])
    optimizer = build_optimizer(nn.Linear(2, 2), optim, 512)
    schedule = build_schedule(optimizer, optim, 512, 2, 7)
    rates = []
    for step in range(15):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert recipe["learning_rate"] == pytest.approx({"first": rates[0], "peak": max(rates), "final": rates[-1]})
    assert rates.index(max(rates)) == recipe["steps"]["warmup"]


def test_a_padded_crop_is_shown_in_place_of_the_other():
    params = change(cell(), {"transform.crop_padding": 4})
    recipe = resolved(params)
    assert {"transform.scale", "transform.ratio"} <= set(recipe["inactive"])
    assert any("image_size 224, crop_padding 4, hflip" in line for line in lines(recipe, []))
    assert not any("crop_padding" in line for line in lines(resolved(cell()), departing(cell())))


@pytest.mark.parametrize(
    "augment, active", [("rand-m9-mstd0.5-inc1", False), ("rand-m9-mstd0.5-inc1-t3a", True), (None, True)]
)
def test_colour_jitter_is_inactive_when_timm_leaves_it_out(augment, active):
    steps = create_transform(32, is_training=True, color_jitter=0.4, auto_augment=augment).transforms
    assert any(type(step).__name__ == "ColorJitter" for step in steps) == active
    params = change(cell(), {"transform.color_jitter": 0.4, "transform.auto_augment": augment})
    assert ("transform.color_jitter" not in resolved(params)["inactive"]) == active
    lines_of_it = [line for line in departing(params) if line.startswith("transform.color_jitter: 0.4, Swin's")]
    assert len(lines_of_it) == active


# --- where it departs


@pytest.mark.parametrize("name, world_size, accumulate", list(zip(PAPER_CELLS, (1, 8, 2), (1, 1, 4))))
def test_paper_profile_departs_nowhere(name, world_size, accumulate):
    assert departing(cell(name), world_size=world_size, accumulate=accumulate) == []


SINGLE = [
    ("model", "deit_tiny_patch16_224", f"deit_tiny_patch16_224, the paper has {SIZES}"),
    ("options.design", "conv1d", "conv1d, the paper has conv2d (and varies it in its ablations)"),
    ("options.pool", "mid", "mid, the paper has mean (and varies it in its ablations)"),
    ("options.chunk_size", 64, "64, the paper has 16 (and varies it in its ablations)"),
    ("options.w0", "frozen", "frozen, the paper has per_direction (and varies it in its ablations)"),
    ("options.depth", 6, "6, the paper has the model's own"),
    ("data", "digits", "digits (1,281,167 training images), the paper has ImageNet-1K (1,281,167)"),
    ("seeds", (3,), f"[3], Swin's default is [0]{SILENT}"),
    ("epochs", 60, "60, the paper has 300"),
    ("batch_size", 512, "512, the paper has 1024"),
    ("drop_path", 0.2, f"0.2, Swin's default is 0.1{SILENT}"),
    ("precision", "fp32", f"fp32, Swin's default is fp16 autocast{SILENT}"),
    ("ema_decay", 0.9996, f"0.9996, Swin's default is none{SILENT}"),
    ("optim.lr", 5e-4, "0.0005 at batch 1024, the paper has 0.001 at batch 1024"),
    ("optim.warmup_lr", 0.0, f"0 at batch 1024, Swin's default is 1e-06 at batch 1024{SILENT}"),
    ("optim.min_lr", 1e-6, f"1e-06 at batch 1024, Swin's default is 1e-05 at batch 1024{SILENT}"),
    ("optim.lr_batch_size", 512, "512, the paper has 1024"),
    ("optim.optimizer", "lamb", "lamb, the paper has adamw"),
    ("optim.weight_decay", 0.1, "0.1, the paper has 0.05"),
    ("optim.betas", (0.9, 0.95), f"[0.9, 0.95], Swin's default is [0.9, 0.999]{SILENT}"),
    ("optim.eps", 1e-6, f"1e-06, Swin's default is 1e-08{SILENT}"),
    ("optim.warmup_epochs", 5, "5, the paper has 20"),
    ("optim.clip_grad_norm", None, f"none, Swin's default is 5{SILENT}"),
    ("mix.mixup", 0.0, "0, the paper has DeiT's 0.8"),
    ("mix.cutmix", 0.0, "0, the paper has DeiT's 1"),
    ("mix.prob", 0.5, "0.5, the paper has DeiT's 1"),
    ("mix.switch_prob", 0.3, "0.3, the paper has DeiT's 0.5"),
    ("mix.label_smoothing", 0.0, f"0, Swin's default is 0.1{SILENT}"),
    ("optim.layer_decay", 0.75, f"0.75, Swin's default is none{SILENT}"),
    ("transform.image_size", 256, "256, the paper has 224"),
    ("transform.scale", (0.2, 1.0), "[0.2, 1], the paper has DeiT's [0.08, 1]"),
    ("transform.ratio", (1.0, 1.0), "[1, 1], the paper has DeiT's [0.75, 1.33333]"),
    ("transform.hflip", 0.0, "0, the paper has DeiT's 0.5"),
    ("transform.crop_padding", 4, "4, the paper crops by scale and ratio"),
    ("transform.auto_augment", None, "none, the paper has DeiT's rand-m9-mstd0.5-inc1"),
    ("transform.re_prob", 0.0, "0, the paper has DeiT's 0.25"),
    ("transform.interpolation", "bilinear", f"bilinear, Swin's default is bicubic{SILENT}"),
    ("transform.crop_pct", 0.9, f"0.9, Swin's default is 0.875{SILENT}"),
    ("transform.crop_mode", "squash", "squash, the paper evaluates the central crop"),
    ("transform.mean", (0.5, 0.5, 0.5), f"[0.5, 0.5, 0.5], Swin's default is [0.485, 0.456, 0.406]{SILENT}"),
    ("transform.std", (0.5, 0.5, 0.5), f"[0.5, 0.5, 0.5], Swin's default is [0.229, 0.224, 0.225]{SILENT}"),
]


@pytest.mark.parametrize("key, value, text", SINGLE)
def test_one_changed_key_is_one_line(key, value, text):
    assert departing(change(cell(), {key: value})) == [f"{key}: {text}"]


def test_what_ran_counts_and_not_what_was_asked_for():
    assert departing(cell(), dtype="fp32") == [f"precision: fp32, Swin's default is fp16 autocast{SILENT}"]
    (line,) = departing(cell(), train_images=128_116)
    assert line == "data: imagenet (128,116 training images), the paper has ImageNet-1K (1,281,167)"


@pytest.mark.parametrize("section", ["optim", "mix", "transform"])
def test_every_key_of_the_training_is_compared(section):
    """A key that joins one of these sections must be compared, or changes nothing in the training and is named here."""
    without_effect = {"transform.color_jitter"}
    # a cell of pretrain with another schedule is refused, and steps of warm-up are compared as epochs
    without_effect |= {"optim.schedule", "optim.milestones", "optim.warmup_steps"}
    keys = {f"{section}.{name}" for name in cell()[section]}
    assert keys - without_effect == {key for key, _, _ in SINGLE if key.startswith(f"{section}.")}


@pytest.mark.parametrize(
    "changes",
    [
        # Swin's own way to say it
        {"optim.lr": 5e-4, "optim.warmup_lr": 5e-7, "optim.min_lr": 5e-6, "optim.lr_batch_size": 512},
        {"transform.ratio": (0.75, 1.3333)},
        {"transform.auto_augment": "rand-n2-m9-mstd0.5-inc1"},
        {"transform.color_jitter": 0.4},  # as in Swin's configuration, and without effect
        {"options.design": "conv2d", "options.pool": "mean", "options.chunk_size": 16, "options.w0": "per_direction"},
        {"precision": "fp16"},
        {"optim.warmup_epochs": 0, "optim.warmup_steps": 20 * 1251},
        {"ema_decay": None},
        {"evaluate_every": 1, "snapshot_epochs": (), "max_unreadable": 0},
    ],
)
def test_the_same_recipe_in_other_words_departs_nowhere(changes):
    assert departing(change(cell(), changes)) == []


def test_rates_are_compared_at_the_papers_batch():
    changes = {"optim.lr": 2e-3, "optim.lr_batch_size": 2048}  # the same peak, half of the other two
    assert [line.split(":")[0] for line in departing(change(cell(), changes))] == ["optim.warmup_lr", "optim.min_lr"]


def test_drop_path_of_the_base_model_is_not_called_swins():
    assert departing(change(cell(PAPER_CELLS[2]), {"drop_path": 0.1})) == [f"drop_path: 0.1, ViT3-B's is 0.4{SILENT}"]
    assert any("ViT3-B" in choice for choice in resolved(cell(PAPER_CELLS[2]))["choices"])
    assert not any("ViT3-B" in choice for choice in resolved(cell())["choices"])


@pytest.mark.parametrize(
    "changes, departing_keys",
    [
        ({"mix.mixup": 0.0, "mix.cutmix": 0.0, "mix.prob": 0.1, "mix.switch_prob": 0.1}, ["mix.mixup", "mix.cutmix"]),
        ({"mix.mixup": 0.0, "mix.prob": 0.1, "mix.switch_prob": 0.1}, ["mix.mixup", "mix.prob"]),
        ({"transform.auto_augment": None, "transform.color_jitter": 0.0}, ["transform.auto_augment"]),
        ({"optim.warmup_epochs": 0, "optim.warmup_lr": 0.1}, ["optim.warmup_epochs"]),
        (
            {"optim.warmup_epochs": 0, "optim.warmup_steps": 211, "optim.warmup_lr": 0.1},
            ["optim.warmup_epochs", "optim.warmup_lr"],
        ),
    ],
)
def test_keys_without_effect_are_no_departures(changes, departing_keys):
    assert sorted(line.split(":")[0] for line in departing(change(cell(), changes))) == sorted(departing_keys)


# --- what is printed


@pytest.mark.parametrize("changes", [{}, {"epochs": 60, "seeds": (1,), "options.design": "conv1d"}])
def test_printed_lines(changes):
    params = change(cell(), changes)
    recipe = resolved(params, world_size=8)
    departures = find_departures(params, recipe, vision_ttt.PRINTED)
    printed = lines(recipe, departures)
    assert len(departures) == len(changes)
    assert [f"departs from the paper: {line}" in printed for line in departures] == [True] * len(changes)
    assert printed[-1].startswith("the recipe is the paper's") != bool(changes)
    assert "batch          total 1024, world_size 8, micro_batch 128, accumulate 1" in printed
    assert any(line.startswith("steps          per_epoch 1251, warmup 25020, total ") for line in printed)
    # one column of names
    named = [line for line in printed[:-1] if not line.startswith("departs")]
    assert all(len(line) <= 132 and "\n" not in line and line[15] != " " for line in named)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("study_mse_imagenet", vit3),
        ("vit3_tiny_imagenet", vit3),  # which the primary paper compares too
        ("vittt_tiny_imagenet", vision_ttt),
        ("ladder_vit3_own_imagenet", kv),
    ],
)
def test_a_cell_is_compared_with_the_recipe_of_its_own_paper(name, recipe):
    """From which the cell does not depart."""
    params = load_section(ClassifierParams, ROOT / "profiles/paper.yaml", "pretrain", name)
    world = {"world_size": 1, "micro_batch": params.batch_size, "accumulate": 1}
    facts = {**world, "device": "cuda", "dtype": "bf16", "backend": "torch", "train_images": IMAGENET}
    found = describe_recipe(params, facts)
    assert found == describe(params, facts, recipe.PRINTED) and found[0]["departures_from_the_paper"] == []
