"""The resolved recipe of a classifier's training, and where it departs from the paper's; it is printed and recorded."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

BATCH = 1024  # Appendix D
TRAIN_IMAGES = 1_281_167  # ImageNet-1K; the paper prints 1.28M
VITTT = tuple(f"vittt_{size}_patch16_224" for size in ("tiny", "small", "base"))
OPTIMIZERS = {"adamw": "AdamW", "lamb": "LAMB"}
RATES = ("optim.lr", "optim.warmup_lr", "optim.min_lr")

# Where a value comes from. The paper prints no numbers for the augmentation, which is DeiT's, and says that its code is Swin's.
PAPER = "the paper has {}"
VARIED = "the paper has {} (and varies it in its ablations)"
DEIT = "the paper has DeiT's {}"
SWIN = "Swin's default is {}, which the paper does not state"
BESIDE = "Swin's default is {} in effect (RandAugment switches it off), which the paper does not state"
VIT3_B = "ViT3-B's is {}, which the paper does not state"
NO_DEPARTURE = "the recipe is the paper's (where it is silent: Swin's defaults)"

RECIPE: dict[str, dict[str, Any]] = {
    PAPER: {  # Appendix D
        "epochs": 300,
        "batch_size": BATCH,
        "optim.optimizer": "adamw",
        "optim.lr": 1e-3,
        "optim.lr_batch_size": BATCH,
        "optim.weight_decay": 0.05,
        "optim.warmup_epochs": 20,
        "transform.image_size": 224,
    },
    # Tables 3 and 4, Fig. 7; left out, they are the models' defaults
    VARIED: {"options.design": "conv2d", "options.pool": "mean", "options.chunk_size": 16, "options.w0": "per_direction"},
    DEIT: {  # the same numbers stand in Swin's config.py
        "transform.scale": (0.08, 1.0),
        "transform.ratio": (3 / 4, 4 / 3),
        "transform.hflip": 0.5,
        "transform.re_prob": 0.25,
        "transform.auto_augment": "rand-m9-mstd0.5-inc1",
        "mix.mixup": 0.8,
        "mix.cutmix": 1.0,
        "mix.prob": 1.0,
        "mix.switch_prob": 0.5,
    },
    SWIN: {  # config.py; its rates are stated at batch 512, half of these; Swin-T, S and B themselves have drop path 0.2, 0.3, 0.5
        "optim.warmup_lr": 1e-6,
        "optim.min_lr": 1e-5,
        "optim.betas": (0.9, 0.999),
        "optim.eps": 1e-8,
        "optim.clip_grad_norm": 5.0,
        "optim.layer_decay": None,
        "drop_path": 0.1,
        "ema_decay": None,
        "seeds": (0,),
        "mix.label_smoothing": 0.1,
        "transform.interpolation": "bicubic",
        "transform.crop_pct": 0.875,
        "transform.mean": (0.485, 0.456, 0.406),
        "transform.std": (0.229, 0.224, 0.225),
    },
    BESIDE: {"transform.color_jitter": None},
}
DROP_PATH_BASE = 0.4  # ViT3-B's; this project's choice, as profiles/paper.yaml says


def describe_recipe(params: Any, facts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How a classifier is trained: the content of recipe.json, and lines for people. `facts`: the further arguments of `resolve`."""
    asked = dataclasses.asdict(params)
    resolved = resolve(asked, **facts)
    departs = departures(asked, resolved)
    return {"recipe": resolved, "departures_from_the_paper": departs}, lines(resolved, departs)


def resolve(
    params: Mapping, *, world_size: int, micro_batch: int, accumulate: int, device: str, dtype: str, backend: str, train_images: int
) -> dict[str, Any]:
    """What will be trained, with nothing left to compute; plain data for JSON.

    Args:
        params: a cell of `pretrain:` as nested dicts (`dataclasses.asdict`); `ema_decay` may be absent.
        world_size, micro_batch, accumulate: ranks, images of one forward pass on a rank, passes per step.
        device, dtype, backend: where it runs; `fp32`, or the type of autocast; the implementation of the model's operators.
        train_images: of the data set.

    Raises:
        ValueError: the three factors do not make up `batch_size`.
    """
    optim, batch, made = params["optim"], params["batch_size"], world_size * micro_batch * accumulate
    if made != batch:
        raise ValueError(f"batch_size: {batch}, but {world_size} ranks x {micro_batch} images x {accumulate} passes make {made}")
    # images that fill no batch are left out, other ones in each epoch
    per_epoch = params.get("steps_per_epoch") or train_images // batch
    total, warmup = params["epochs"] * per_epoch, min(optim["warmup_epochs"], params["epochs"]) * per_epoch
    peak, first, final = (optim[name] * batch / optim["lr_batch_size"] for name in ("lr", "warmup_lr", "min_lr"))
    mix, augment = params["mix"], params["transform"]["auto_augment"]
    inactive = {  # key path -> whether it has no effect, and why
        "transform.color_jitter": (augment and "3a" not in augment, "timm leaves it out while RandAugment is on"),  # timm's test
        "mix.prob": (not (mix["mixup"] or mix["cutmix"]), "neither mixup nor cutmix is on"),
        "mix.switch_prob": (not (mix["mixup"] and mix["cutmix"]), "mixup and cutmix are not both on"),
        "optim.warmup_lr": (not optim["warmup_epochs"], "there is no warm-up"),
    }
    choices = {  # of this project, that are neither departures from the paper nor Swin's defaults
        "no repeated augmentation: DeiT uses it, but Swin's code, on which the paper builds, does not": True,
        "drop path 0.4: ViT3-B's; Swin's default is 0.1": params["model"] == VITTT[2] and params["drop_path"] == DROP_PATH_BASE,
        "bf16 autocast: Swin's default is fp16 autocast": dtype == "bf16",
    }
    resolved = {
        **{name: params[name] for name in ("model", "options", "drop_path", "epochs", "mix", "transform")},
        "seed": params["seeds"][0],
        "data": {"cell": params["data"], "train_images": train_images},
        "batch": {"total": batch, "world_size": world_size, "micro_batch": micro_batch, "accumulate": accumulate},
        "steps": {"per_epoch": per_epoch, "warmup": warmup, "total": total},
        # without warm-up the first rate is the peak; a run that is all warm-up has no cosine and ends at the peak
        "learning_rate": {"first": first if warmup else peak, "peak": peak, "final": final if warmup < total else peak},
        "optimizer": {
            "name": OPTIMIZERS[optim["optimizer"]],
            **{name: optim[name] for name in ("betas", "eps", "weight_decay", "clip_grad_norm")},
            "exempt_from_weight_decay": "1-D parameters, biases, and what the model's no_weight_decay() names",
        },
        "init": params.get("init"),
        "ema_decay": params.get("ema_decay"),
        "precision": {"dtype": dtype, "device": device, "backend": backend},
        "inactive": {key: reason for key, (holds, reason) in inactive.items() if holds},
        "choices": [choice for choice, holds in choices.items() if holds],
    }
    return json.loads(json.dumps(resolved))  # tuples become lists, as they are in the record


def departures(params: Mapping, resolved: Mapping) -> list[str]:
    """One line per departure from the paper's recipe, and where it is silent from DeiT's augmentation and Swin's defaults.

    GPUs and accumulation, which keep the batch, do not count, nor do keys without effect. Takes the argument and the result of `resolve`.
    """
    flat = {}
    for key, value in params.items():
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
    ours = {**RECIPE[VARIED], "ema_decay": None, **flat}
    wanted = {key: (value, source) for source, values in RECIPE.items() for key, value in values.items()}
    if params["model"] == VITTT[2]:
        wanted["drop_path"] = (DROP_PATH_BASE, VIT3_B)
    found = [] if params["model"] in VITTT else [f"model: {params['model']}, the paper has {', '.join(VITTT)}"]
    found += [f"{k}: {_text(ours[k])}, the paper has the model's own" for k in ours if k.startswith("options.") and k not in wanted]
    images, dtype = resolved["data"]["train_images"], resolved["precision"]["dtype"]
    if not params["data"].startswith("imagenet") or images != TRAIN_IMAGES:
        found.append(f"data: {params['data']} ({images:,} training images), the paper has ImageNet-1K ({TRAIN_IMAGES:,})")
    if params.get("init"):
        found.append(f"init: {params['init']['weights']}, the paper has random weights")
    if dtype not in ("fp16", "bf16"):
        found.append(f"precision: {dtype}, {SWIN.format('fp16 autocast')}")
    compared, stated = dict(ours), ours["optim.lr_batch_size"]
    if not all(_same(ours[key], wanted[key][0]) for key in RATES):
        # rates mean something together with their batch only: 5e-4 at 512 is the paper's 1e-3 at 1024
        compared |= {key: ours[key] * BATCH / stated for key in RATES} | {"optim.lr_batch_size": BATCH}
    for key, (value, source) in wanted.items():
        if key not in resolved["inactive"] and not _same(compared[key], value):
            at = (f" at batch {stated}", f" at batch {BATCH}") if key in RATES else ("", "")
            found.append(f"{key}: {_text(ours[key])}{at[0]}, {source.format(_text(value) + at[1])}")
    return found


def lines(resolved: Mapping, departures: list[str]) -> list[str]:
    """The recipe in aligned plain lines, then every departure, or a line that says that there is none."""

    def listed(section: str, *names: str) -> str:
        return ", ".join(f"{name} {_text(resolved[section][name])}" for name in names or resolved[section])

    rows = [
        ("model", ", ".join([resolved["model"], *filter(None, [listed("options")]), f"drop path {_text(resolved['drop_path'])}"])),
        ("data", f"{listed('data')}, seed {resolved['seed']}"),
        ("batch", listed("batch")),
        ("steps", f"{listed('steps')}, epochs {resolved['epochs']}"),
        ("learning rate", f"{listed('learning_rate')}; linear warm-up, then cosine, set at each step"),
        ("optimiser", f"{listed('optimizer', 'name', 'betas', 'eps', 'clip_grad_norm')}, ema_decay {_text(resolved['ema_decay'])}"),
        ("weight decay", listed("optimizer", "weight_decay", "exempt_from_weight_decay")),
        ("augmentation", listed("transform", "image_size", "scale", "ratio", "hflip", "interpolation")),
        ("", listed("transform", "auto_augment", "color_jitter", "re_prob")),
        ("mixing", listed("mix")),
        ("evaluation", listed("transform", "crop_pct", "mean", "std")),
        ("precision", listed("precision")),
        *(("inactive", f"{key}: {reason}") for key, reason in resolved["inactive"].items()),
        *(("our choice", choice) for choice in resolved["choices"]),
    ]
    verdict = [f"departs from the paper: {line}" for line in departures]
    return [f"{name:<13}  {text}" for name, text in rows] + (verdict or [NO_DEPARTURE])


def _same(ours: Any, wanted: Any) -> bool:
    if wanted is None:
        return not ours  # a strength of 0 switches it off
    if isinstance(wanted, tuple):
        return len(ours) == len(wanted) and all(map(_same, ours, wanted))
    if isinstance(wanted, str):  # the parts of a RandAugment string have no order, and two operations are timm's default
        return isinstance(ours, str) and sorted(set(ours.split("-")) - {"n2"}) == sorted(wanted.split("-"))
    # 1.3333 in a params file is 4/3; True is a number to Python, but not here
    return type(ours) in (int, float) and math.isclose(ours, wanted, rel_tol=5e-5)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
