"""A classifier of one's own pictures, without an edit of params.yaml: the work of `repro pretrain --data folder:PATH`.

Only the weights to start from and the number of pictures decide the recipe. A small set from random weights needs a
large rate and many passes; the rates are those that the nanos' searches chose, and DeiT's for larger models.
"""

import dataclasses
import math
import os
from pathlib import Path

from ..core.errors import UserError
from ..core.hashing import hash_file
from ..core.paths import find_root
from ..core.runtime import load_runtime
from ..data.cells import manifest_path
from ..data.manifest import read_manifest
from ..data.own import parse_own
from ..data.prepare import prepare_own
from ..data.settings import TransformSettings
from ..tasks.classification.params import ClassifierParams, MixParams
from ..tasks.classification.spec import SPEC
from ..training.params import InitParams, OptimParams
from .job import Cell

SMALL = 20_000  # training pictures below which a set is small
STEPS = 1500  # at least, of a training from random weights
TUNED_STEPS = 400  # at least, from given weights
_RAND_AUGMENT = "rand-m9-mstd0.5-inc1"  # of DeiT


def make_own_cell(
    data: str, *, model: str | None, source: Path | None, epochs: int | None, seeds: int | None, flip: bool
) -> Cell:
    """The cell that trains a classifier of a set `folder:PATH`, which is split and prepared first.

    Args:
        data: `folder:PATH`.
        model: registered name; None for that of `source`, or a small one for a small set.
        source: weights to start from; None for random ones.
        epochs, seeds: instead of those of the recipe.
        flip: whether a mirrored picture is of the same class.

    Raises:
        UserError: another kind of data, data or weights that cannot be read, an unknown model.
    """
    from timm.models import get_pretrained_cfg_value

    from ..models.checkpoints import open_weights
    from ..models.registry import require_known

    own = parse_own(data)
    if own is None or own.kind != "folder":
        raise UserError(f"pretrain: --data {data}: expected folder:PATH; cells of params.yaml are named by --cell")
    paths = find_root()
    runtime = load_runtime(paths)
    if "WORLD_SIZE" not in os.environ:  # else the process that started torchrun has done it
        prepare_own(data, paths, runtime)
    images = read_manifest(manifest_path(paths, data)).splits["train"].images
    options, init, size = {}, None, None
    if source is not None:
        checkpoint = open_weights(source, model=model).require_classifier()
        model, size = checkpoint.model, checkpoint.image_size
        options = {key: value for key, value in checkpoint.options.items() if key not in ("num_classes", "img_size")}
        init = InitParams(weights=str(source.resolve()), sha256=hash_file(source, digits=64))
    model = model or ("vittt_nano_patch16_144" if images < SMALL else "vittt_tiny_patch16_224")
    try:
        require_known(model)
    except ValueError as error:
        raise UserError(f"pretrain: --model {error}") from None
    size = size or get_pretrained_cfg_value(model, "input_size")[-1]
    params = choose_recipe(data, images, model, size, init=init, flip=flip, epochs=epochs)
    params = dataclasses.replace(params, options=options, seeds=tuple(range(seeds or 1)))
    parts = [model, *([f"from_{source.stem}"] if source else []), *([f"{epochs}epochs"] if epochs else [])]
    parts += ([f"{seeds}seeds"] if seeds else []) + (["flipped"] if flip else [])
    name = "-".join(parts).replace(".", "_")
    folder = paths.results / "own" / own.name.removeprefix("own_") / name
    cell = {"stage": "pretrain", "name": f"{own.name}-{name}", "params": params, "spec": SPEC, "folder": folder}
    return Cell(paths=paths, runtime=runtime, **cell)


def choose_recipe(
    data: str, images: int, model: str, image_size: int, *, init: InitParams | None, flip: bool, epochs: int | None
) -> ClassifierParams:
    """The recipe for this many training pictures.

    Args:
        data, model, init: see `TrainParams`.
        images: training pictures.
        image_size: side of the model's input in pixels.
        flip: whether to mirror half of the pictures.
        epochs: instead of those that give `STEPS` or `TUNED_STEPS` steps, and 30 or 10 passes at least.
    """
    small, nano = images < SMALL, "nano" in model
    batch_size = max(1, min(32 if small else 256, images))
    steps, passes = (TUNED_STEPS, 10) if init else (STEPS, 30)
    epochs = epochs or min(300, max(passes, math.ceil(steps * batch_size / images)))
    rate = (1e-3 if nano else 1e-4) if init else (4e-3 if nano else 5e-4)
    warmup = max(1, epochs // 10)
    optim = OptimParams(lr=rate, min_lr=rate / 100, lr_batch_size=32 if small else 256, warmup_epochs=warmup)
    crops = {"scale": (0.7, 1.0), "ratio": (0.85, 1.18), "crop_pct": 1.0} if small else {"auto_augment": _RAND_AUGMENT}
    mixing = MixParams(mixup=0.0, cutmix=0.0) if small else MixParams()
    return ClassifierParams(
        model=model,
        init=init,
        data=data,
        epochs=epochs,
        batch_size=batch_size,
        drop_path=0.0 if nano else 0.1,
        evaluate_every=max(1, epochs // 10),
        max_unreadable=images // 100,
        optim=optim,
        mix=mixing,
        transform=TransformSettings(image_size=image_size, hflip=0.5 if flip else 0.0, **crops),
    )
