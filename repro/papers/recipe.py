"""The resolved settings of a training, its departures from a paper's recipe, and the lines that print both."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from ..core.config import list_values
from ..data.kinds import IMAGENET_1K

_RATES = ("optim.lr", "optim.warmup_lr", "optim.min_lr")  # they hold for a batch of `optim.lr_batch_size`
LINEARIZE = ("freeze", "new_lr_factor", "decay_all")  # settings of a linearisation alone
PAPER_HAS = "the paper has {}"  # a source, see `Printed`
# choices of this project, see `Printed.choices`
NO_REPEATS: dict[str, dict[str, Any]] = {
    "no repeated augmentation: DeiT uses it, but Swin's code, on which the paper builds, does not": {}
}
BF16 = {"bf16 autocast: Swin's default is fp16 autocast": {"precision": "bf16"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """The recipe of a paper for ImageNet-1K. Each paper's package declares its own as `PRINTED` in its module `recipe`.

    Args:
        models: registered name -> the values in which this model differs, in the form of `said`.
        said: source -> {key path, e.g. `optim.lr`: value}. A source is a clause with a placeholder for the value. If
            the recipe names options (`options.*`), every option that it does not name is a departure. A training that
            does not name one counts as having its value here, so that must be the model's default.
        choices: choice of this project that does not count as a departure -> the settings (key -> value) that make it;
            their keys are top-level keys of the params, no key paths.
    """

    models: Mapping[str, Mapping[str, Mapping[str, Any]]]
    said: Mapping[str, Mapping[str, Any]]
    choices: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: NO_REPEATS | BF16)

    def find_values(self, model: str) -> dict[str, tuple[Any, str]]:
        """Return key path -> (value, source) of a model."""
        parts = [*self.said.items(), *self.models.get(model, {}).items()]
        return {key: (value, source) for source, values in parts for key, value in values.items()}


def describe(params: Any, facts: Mapping[str, Any], printed: Printed) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe of a training for its record, and the lines that print it; `facts` are passed to `resolve`."""
    asked = list_values(params)
    resolved = resolve(asked, printed.choices, **facts)
    departs = find_departures(asked, resolved, printed)
    return {"recipe": resolved, "departures_from_the_paper": departs}, lines(resolved, departs)


def resolve(
    params: Mapping,
    choices: Mapping[str, Mapping[str, Any]],
    *,
    world_size: int,
    micro_batch: int,
    accumulate: int,
    device: str,
    dtype: str,
    backend: str,
    train_images: int,
) -> dict[str, Any]:
    """Compute every setting of a training that follows from its params, such as steps and scaled learning rates.

    The result is plain data for JSON. The report joins the records of a cell by several machines only if it is equal
    (`core.record.serialise_recipe`), so even a reworded reason or choice separates old records from new ones.

    Args:
        params: a cell of `pretrain:` or `linearize:` as nested dicts (`list_values`); `ema_decay` may be absent.
        choices: see `Printed`.
        world_size, micro_batch, accumulate: ranks, images of one forward pass on a rank, forward passes per step.
        device: the device of the training.
        dtype: `fp32`, or the dtype of autocast.
        backend: the implementation of the model's operators.
        train_images: number of training images of the data set.

    Raises:
        ValueError: the three factors do not make up `batch_size`.
    """
    optim, batch, images = params["optim"], params["batch_size"], world_size * micro_batch * accumulate
    if images != batch:
        raise ValueError(
            f"batch_size: {batch}, but {world_size} ranks x {micro_batch} images x {accumulate} passes make {images}"
        )
    # the last incomplete batch of an epoch is dropped; shuffling drops other images in each epoch
    per_epoch = params.get("steps_per_epoch") or train_images // batch
    total = params["epochs"] * per_epoch
    warmup = optim["warmup_steps"] or min(optim["warmup_epochs"], params["epochs"]) * per_epoch
    peak, first, final = (optim[name] * batch / optim["lr_batch_size"] for name in ("lr", "warmup_lr", "min_lr"))
    mix, augment = params["mix"], params["transform"]["auto_augment"]
    padded = params["transform"].get("crop_padding") is not None
    inactive = {  # key path -> whether it has no effect, and why
        **{f"transform.{name}": (padded, "crop_padding takes its place") for name in ("scale", "ratio")},
        # the condition is that of timm's transforms_imagenet_train
        "transform.color_jitter": (augment and "3a" not in augment, "timm leaves it out while RandAugment is on"),
        "mix.prob": (not (mix["mixup"] or mix["cutmix"]), "neither mixup nor cutmix is on"),
        "mix.switch_prob": (not (mix["mixup"] and mix["cutmix"]), "mixup and cutmix are not both on"),
        "optim.warmup_lr": (not warmup, "there is no warm-up"),
    }
    made = {**params, "precision": dtype}
    chosen = [choice for choice, values in choices.items() if all(made[key] == value for key, value in values.items())]
    resolved = {
        **{name: params[name] for name in ("model", "options", "drop_path", "epochs", "mix", "transform")},
        "seed": params["seeds"][0],
        "data": {"cell": params["data"], "train_images": train_images},
        "batch": {"total": batch, "world_size": world_size, "micro_batch": micro_batch, "accumulate": accumulate},
        "steps": {"per_epoch": per_epoch, "warmup": warmup, "total": total},
        # without warm-up the first rate is the peak; a run that is all warm-up has no cosine and ends at the peak
        "learning_rate": {"first": first if warmup else peak, "peak": peak, "final": final if warmup < total else peak},
        "optimizer": {
            "name": {"adamw": "AdamW", "lamb": "LAMB"}[optim["optimizer"]],
            **{name: optim[name] for name in ("betas", "eps", "weight_decay", "clip_grad_norm")},
            "exempt_from_weight_decay": "nothing"
            if params.get("decay_all")
            else "1-D parameters, biases, and what the model's no_weight_decay() names",
        },
        "init": params.get("init"),
        "ema_decay": params.get("ema_decay"),
        "precision": {"dtype": dtype, "device": device, "backend": backend},
        "inactive": {key: reason for key, (holds, reason) in inactive.items() if holds},
        "choices": chosen,
    }
    if "freeze" in params:
        resolved["linearize"] = {name: params[name] for name in LINEARIZE}
    return json.loads(json.dumps(resolved))  # tuples become lists, as they are in the record


def find_departures(params: Mapping, resolved: Mapping, printed: Printed) -> list[str]:
    """Return a line for each value that is not the paper's, and for another model or data set.

    `resolved` is the result of `resolve`. The number of GPUs and gradient accumulation do not count, because they keep
    the batch size. Keys without effect (`resolved["inactive"]`) do not count either.
    """
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
    wanted = printed.find_values(params["model"])
    options = {key: value for key, (value, _) in wanted.items() if key.startswith("options.")}
    # a training over several seeds follows the recipe if its first seed does
    ran = {"precision": resolved["precision"]["dtype"], "repeated augmentation": None, "seeds": [resolved["seed"]]}
    if flat["optim.warmup_steps"]:
        ran["optim.warmup_epochs"] = resolved["steps"]["warmup"] / resolved["steps"]["per_epoch"]
    # what the params do not name counts as the recipe's (options) or as off (ema_decay); later entries win
    ours = {**options, "ema_decay": None, **flat, **ran, "init": flat.get("init.weights")}
    found = []
    if params["model"] not in printed.models:
        found.append(f"model: {params['model']}, the paper has {', '.join(printed.models)}")
    if (images := resolved["data"]["train_images"]) != IMAGENET_1K.train or not params["data"].startswith("imagenet"):
        found.append(
            f"data: {params['data']} ({images:,} training images), the paper has ImageNet-1K ({IMAGENET_1K.train:,})"
        )
    crops = {"crop_padding": "the paper crops by scale and ratio", "crop_mode": "the paper evaluates the central crop"}
    for name, paper in crops.items():
        if (value := ours.get(f"transform.{name}")) is not None:
            found.append(f"transform.{name}: {value}, {paper}")
    if options:
        others = [key for key in flat if key.startswith("options.") and key not in options]
        found += [f"{key}: {_show(flat[key])}, the paper has the model's own" for key in others]
    compared, rates = dict(ours), [key for key in _RATES if key in wanted]
    stated, (batch, _) = ours["optim.lr_batch_size"], wanted.get("optim.lr_batch_size", (None, ""))
    if not all(_same(ours[key], wanted[key][0]) for key in rates):
        # rates can be compared at one batch size only: 5e-4 at 512 is 1e-3 at 1024 (linear scaling)
        compared |= {key: ours[key] * batch / stated for key in rates} | {"optim.lr_batch_size": batch}
    skipped = {*resolved["inactive"], *(key for choice in resolved["choices"] for key in printed.choices[choice])}
    for key, (value, source) in wanted.items():
        if key not in skipped and not _same(compared[key], value):
            here, there = (f" at batch {stated}", f" at batch {batch}") if key in _RATES else ("", "")
            found.append(f"{key}: {_show(ours[key])}{here}, {source.format(_show(value) + there)}")
    return found


def _same(ours: Any, wanted: Any, rel_tol: float = 1e-9) -> bool:
    """Tell whether our value of a setting is the recipe's; the rule follows from the type of the recipe's value."""
    if wanted is None or isinstance(wanted, bool):
        return bool(ours) == bool(wanted)  # a strength of 0 switches it off
    if isinstance(wanted, tuple):  # 1.3333 in a params file is 4/3
        return len(ours) == len(wanted) and all(_same(*pair, rel_tol=5e-5) for pair in zip(ours, wanted, strict=True))
    # the parts of a RandAugment string have no order, and two operations are timm's default
    if isinstance(wanted, str):
        return isinstance(ours, str) and sorted(set(ours.split("-")) - {"n2"}) == sorted(wanted.split("-"))
    # isinstance would accept True as an int
    return type(ours) in (int, float) and math.isclose(ours, wanted, rel_tol=rel_tol)


def lines(resolved: Mapping, departures: list[str]) -> list[str]:
    """Return the recipe as aligned lines of text, then a line for each departure, or one line if there is none."""

    def listed(section: str, *names: str) -> str:
        """List these names of a section with their values; without names, all of them."""
        return ", ".join(f"{name} {_show(resolved[section][name])}" for name in names or resolved[section])

    padded = resolved["transform"].get("crop_padding") is not None
    rows, crop = [], ("crop_padding",) if padded else ("scale", "ratio")
    mode = ("crop_mode",) if resolved["transform"].get("crop_mode") else ()
    if linearize := resolved.get("linearize"):
        trained = "the new weights alone" if linearize["freeze"] else "all weights"
        factor = _show(linearize["new_lr_factor"])
        rows.append(("trained", f"{trained}, the new ones at {factor} times the rate"))
    model = resolved["model"], listed("options"), f"drop path {_show(resolved['drop_path'])}"
    optimizer = listed("optimizer", "name", "betas", "eps", "clip_grad_norm")
    rows += [
        ("model", ", ".join(filter(None, model))),
        ("data", f"{listed('data')}, seed {resolved['seed']}"),
        ("batch", listed("batch")),
        ("steps", f"{listed('steps')}, epochs {resolved['epochs']}"),
        ("learning rate", f"{listed('learning_rate')}; linear warm-up, then cosine, set at each step"),
        ("optimiser", f"{optimizer}, ema_decay {_show(resolved['ema_decay'])}"),
        ("weight decay", listed("optimizer", "weight_decay", "exempt_from_weight_decay")),
        ("augmentation", listed("transform", "image_size", *crop, "hflip", "interpolation")),
        ("", listed("transform", "auto_augment", "color_jitter", "re_prob")),
        ("mixing", listed("mix")),
        ("evaluation", listed("transform", "crop_pct", *mode, "mean", "std")),
        ("precision", listed("precision")),
        *(("inactive", f"{key}: {reason}") for key, reason in resolved["inactive"].items()),
        *(("our choice", choice) for choice in resolved["choices"]),
    ]
    verdict = [f"departs from the paper: {line}" for line in departures]
    verdict = verdict or ["the recipe is the paper's (where it is silent: Swin's defaults)"]
    return [*(f"{name:<13}  {text}" for name, text in rows), *verdict]


def _show(value: Any) -> str:
    """Format a value of a recipe for a printed line."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show, value))}]"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
