"""What a classifier's training comes to, with nothing left to compute, and the lines that say so; the rooms compare it with their papers."""

import json
from collections.abc import Mapping
from typing import Any

OPTIMIZERS = {"adamw": "AdamW", "lamb": "LAMB"}
NO_DEPARTURE = "the recipe is the paper's (where it is silent: Swin's defaults)"
# choices of this project, for `resolve`
NO_REPEATS = "no repeated augmentation: DeiT uses it, but Swin's code, on which the paper builds, does not"
BF16 = "bf16 autocast: Swin's default is fp16 autocast"


def resolve(
    params: Mapping,
    *,
    world_size: int,
    micro_batch: int,
    accumulate: int,
    device: str,
    dtype: str,
    backend: str,
    train_images: int,
    choices: Mapping[str, bool],
) -> dict[str, Any]:
    """What will be trained, with nothing left to compute; plain data for JSON.

    Args:
        params: a cell of `pretrain:` as nested dicts (`dataclasses.asdict`); `ema_decay` may be absent.
        world_size, micro_batch, accumulate: ranks, images of one forward pass on a rank, passes per step.
        device, dtype, backend: where it runs; `fp32`, or the type of autocast; the implementation of the model's operators.
        train_images: of the data set.
        choices: of this project, that are neither departures from the paper nor Swin's defaults -> whether each was made.

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


def lines(resolved: Mapping, departures: list[str]) -> list[str]:
    """The recipe in aligned plain lines, then every departure, or a line that says that there is none."""

    def listed(section: str, *names: str) -> str:
        return ", ".join(f"{name} {format_value(resolved[section][name])}" for name in names or resolved[section])

    rows = [
        ("model", ", ".join([resolved["model"], *filter(None, [listed("options")]), f"drop path {format_value(resolved['drop_path'])}"])),
        ("data", f"{listed('data')}, seed {resolved['seed']}"),
        ("batch", listed("batch")),
        ("steps", f"{listed('steps')}, epochs {resolved['epochs']}"),
        ("learning rate", f"{listed('learning_rate')}; linear warm-up, then cosine, set at each step"),
        ("optimiser", f"{listed('optimizer', 'name', 'betas', 'eps', 'clip_grad_norm')}, ema_decay {format_value(resolved['ema_decay'])}"),
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


def format_value(value: Any) -> str:
    """A value of a recipe in a line for people."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
