"""Training on the user's own pictures without params.yaml: `repro pretrain`, `detect` and `segment` with `--data`.

The recipe depends only on the initial weights, the number of pictures and, for scenes, the sizes of pictures and
objects. A small set with random weights needs a high learning rate and many epochs. The rate of a classifying nano is
from its search on digits; the other rates, and the recipes for scenes, were not searched.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..core.hashing import require_hash
from ..core.paths import find_root
from ..core.ranks import in_torchrun
from ..core.runtime import load_runtime
from ..data.cells import manifest_path, open_cell
from ..data.manifest import read_manifest
from ..data.own import parse_own
from ..data.prepare import prepare_own
from ..data.settings import DetectionTransformSettings, TransformSettings
from ..tasks.classification.params import ClassifierParams, MixParams
from ..tasks.detection.params import DetectParams, MaskRcnnParams
from ..tasks.segmentation.params import SegmentationTransformSettings, SegmentParams, UperNetParams
from ..tasks.spec import TaskSpec
from ..training.params import InitParams, OptimParams
from .cells import train_cells
from .job import Cell, describe_init

_NANO = "vittt_nano_patch16_144"
SMALL = 20_000  # training pictures below which a set is small
_FEWEST_STEPS = 1500  # least number of steps from random weights
_FEWEST_TUNING_STEPS = 400  # least number of steps from given weights
_RAND_AUGMENT = "rand-m9-mstd0.5-inc1"  # DeiT's
_KINDS = {"pretrain": ("folder",), "detect": ("coco", "boxes"), "segment": ("ade20k",)}
_SHORT_PX = (128, 512)  # bounds of the short side of scenes
_MIDDLE_STRIDE = 16  # stride of the middle one of five levels with anchors
# sizes of Mask R-CNN's heads for a nano, as in the profile mini; see `MaskRcnnParams`
_NANO_RCNN = {
    "fpn_channels": 32,
    "box_channels": 128,
    "class_agnostic_boxes": True,
    "mask_channels": 32,
    "mask_layers": 1,
    "rpn_samples": 64,
    "train_candidates": 200,
    "test_candidates": 200,
    "train_proposals": 100,
    "test_proposals": 100,
    "roi_samples": 32,
}


def train_own(
    stage: str,
    spec: TaskSpec,
    data: str,
    *,
    model: str | None,
    source: Path | None,
    epochs: int | None,
    seeds: int | None,
    flip: bool,
    sha256: str | None,
    gpus: int | None,
    without: dict[str, Any],
) -> None:
    """Train on a set `KIND:PATH`, which is split and prepared first, and print the command that uses the weights.

    Args:
        stage, spec: the stage, and its task.
        data: `folder:PATH` to classify, `coco:PATH` or `boxes:PATH` to detect, `ade20k:PATH` to segment.
        model: registered name; None for that of `source`, or a small one for a small set.
        source, sha256: weights of a classifier to start from, and the file's hash; None for random ones.
        epochs, seeds: instead of those of the recipe.
        flip: whether a mirrored picture means the same.
        gpus: see `train_cells`.
        without: option -> given value, of those that do not go with `data`.

    Raises:
        UserError: options that do not go together, another kind of data, data or weights that cannot be read, a model
            that is unknown or unfit; see also `train_cells`.
    """
    if wrong := [name for name, value in without.items() if value]:
        raise UserError(f"{stage}: --data trains on your own pictures; leave --{wrong[0]} out")
    require_hash(source, sha256)
    own = parse_own(data)
    if own is None or own.kind not in _KINDS[stage]:
        expected = f"expected {' or '.join(f'{kind}:PATH' for kind in _KINDS[stage])}; cells of params.yaml are named by --cell"
        raise UserError(f"{stage}: --data {data}: {expected}")
    data = own.full_name
    from timm.models import get_pretrained_cfg_value

    from ..models.checkpoints import open_weights
    from ..models.registry import require_known

    paths = find_root()
    runtime = load_runtime(paths)
    options, init, size = {}, None, None
    if source is not None:
        checkpoint = open_weights(source, model=model).require_classifier()
        model, size = checkpoint.model, checkpoint.image_size
        options = {key: value for key, value in checkpoint.options.items() if key not in ("num_classes", "img_size")}
        init = describe_init(paths, source)
    if model is not None:
        try:
            require_known(model)
            size = size or get_pretrained_cfg_value(model, "input_size")[-1]
        except ValueError as error:
            raise UserError(f"{stage}: --model {error}") from None
        except RuntimeError:  # timm's, for an unknown tag and for a denoiser
            problem = "is no classifier, or none with this tag"
            raise UserError(f"{stage}: --model {model}: {problem}; name a classifier without a tag") from None
    if not in_torchrun():  # the process that started torchrun has done it
        prepare_own(data, paths, runtime)
    images = read_manifest(manifest_path(paths, data)).splits["train"].images
    model = model or ("vittt_tiny_patch16_224" if own.kind == "folder" and images >= SMALL else _NANO)
    start = OwnTraining(data=data, model=model, init=init, flip=flip, epochs=epochs)
    if own.kind == "folder":
        params = choose_recipe(start, images, size or get_pretrained_cfg_value(model, "input_size")[-1])
        if source is not None:
            params = dataclasses.replace(params, transform=params.transform.adapt(checkpoint.preprocessing))
    elif stage == "detect":
        params = choose_detector(start, open_cell(paths, runtime, data).open_instances("train"))
    else:
        params = choose_segmenter(start, open_cell(paths, runtime, data).open_pairs("train"))
    parts = [model, *([f"from_{source.stem}"] if source else []), *([f"{epochs}epochs"] if epochs else [])]
    parts += ([f"{seeds}seeds"] if seeds else []) + (["flipped"] if flip else [])
    name = "-".join(parts).replace(".", "_")
    params = dataclasses.replace(params, options=options, seeds=tuple(range(seeds or 1)))
    record = manifest_path(paths, data).parents[1] / name / "metrics.json"  # next to the folder `data`
    about = {"stage": stage, "name": f"{own.name}-{name}", "params": params, "spec": spec, "record": record}
    cell = Cell(paths=paths, runtime=runtime, **about)
    train_cells([cell], gpus)
    if gpus is None and not in_torchrun():
        print(f"use it: repro predict PICTURES --weights {cell.folder / 'weights.safetensors'}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """Settings of a training on own pictures that do not depend on the pictures.

    Args:
        data, model, init: see `TrainParams`.
        flip: whether to mirror half of the pictures.
        epochs: number of epochs; None: enough for `_FEWEST_STEPS` steps and 30 epochs (scenes: 12) or, from given
            weights, for `_FEWEST_TUNING_STEPS` steps and 10 epochs (scenes: 6).
    """

    data: str
    model: str
    init: InitParams | None = None
    flip: bool = False
    epochs: int | None = None

    @property
    def nano(self) -> bool:
        """True for a nano, the size of model for embedded data."""
        return "nano" in self.model

    @property
    def hflip(self) -> float:
        """Return the share of pictures that are mirrored."""
        return 0.5 if self.flip else 0.0

    def choose_length(self, images: int, largest: int, passes: int, evaluations: int) -> dict[str, Any]:
        """Return the settings that all recipes share.

        Args:
            images: number of training pictures.
            largest: most pictures in a batch.
            passes: least number of epochs, unless the user gave one.
            evaluations: about how often the model is evaluated during the training.
        """
        batch_size = max(1, min(largest, images))
        steps = _FEWEST_TUNING_STEPS if self.init else _FEWEST_STEPS
        epochs = self.epochs or min(300, max(passes, math.ceil(steps * batch_size / images)))
        return {
            "model": self.model,
            "init": self.init,
            "data": self.data,
            "epochs": epochs,
            "batch_size": batch_size,
            "drop_path": 0.0 if self.nano else 0.1,
            "evaluate_every": max(1, epochs // evaluations),
        }


def choose_recipe(start: OwnTraining, images: int, image_size: int) -> ClassifierParams:
    """Return the recipe for so many training pictures; `image_size` is the side of the model's input in pixels."""
    small, nano, init = images < SMALL, start.nano, start.init
    largest = 32 if small else 256
    shared = start.choose_length(images, largest, 10 if init else 30, 10)
    # given weights learn slower than random ones, and large models slower than a nano
    rate = (1e-3 if nano else 1e-4) if init else (4e-3 if nano else 5e-4)
    warmup = max(1, shared["epochs"] // 10)
    crops = {"scale": (0.7, 1.0), "ratio": (0.85, 1.18), "crop_pct": 1.0} if small else {"auto_augment": _RAND_AUGMENT}
    mixing = MixParams(mixup=0.0, cutmix=0.0) if small else MixParams()
    return ClassifierParams(
        **shared,
        max_unreadable=images // 100,  # a set of one's own may have some broken files
        optim=OptimParams(lr=rate, min_lr=rate / 100, lr_batch_size=largest, warmup_epochs=warmup),
        mix=mixing,
        transform=TransformSettings(image_size=image_size, hflip=start.hflip, **crops),
    )


def choose_detector(start: OwnTraining, instances: Any) -> DetectParams:
    """Return the recipe for training on these annotated objects, the `repro.data.coco.Instances` of `train`.

    Raises:
        UserError: no picture has an object, or the model gives no pyramid of features.
    """
    from ..data.detection import CocoDetection
    from ..models.adapter import ViTAdapter

    short, long = _choose_sides(instances.sizes)
    transform = DetectionTransformSettings(min_size=(short,), max_size=long, hflip=start.hflip)
    images = len(CocoDetection(instances, transform, training=True))  # pictures without an object are left out
    enlarged = short / float(np.median(instances.sizes.min(axis=1)))  # factor from the pictures to the model's inputs
    left, top, right, bottom = instances.boxes.T
    # the median object's side in pixels of the input; its anchor belongs on the middle level
    middle = enlarged * float(np.median(np.sqrt((right - left) * (bottom - top))))
    pyramid = _build_pyramid("detect", start.model, "last")
    rate = (1.3e-3 if start.init else 3e-3) if start.nano else 1e-4
    anchors = round(min(8.0, max(1.0, middle / _MIDDLE_STRIDE)), 2)
    return DetectParams(
        **_choose_dense(start, images, rate, pyramid),
        final_norm=isinstance(pyramid, ViTAdapter),  # a nano's tokens are many times larger than the adapter's features
        mask_rcnn=MaskRcnnParams(anchor_scale=anchors, **(_NANO_RCNN if start.nano else {})),
        transform=transform,
    )


def choose_segmenter(start: OwnTraining, pairs: Any) -> SegmentParams:
    """Return the recipe for training on these `repro.data.ade20k.AdePairs` of `train`.

    Raises:
        UserError: the model gives no pyramid of features, or a pair cannot be read. `repro.data.prepare` has already
            refused labels without any pixel of a class.
    """
    from ..data.ade20k import survey

    sizes, pixels = survey(pairs)
    short, long = _choose_sides(sizes)
    crop = max(64, short // 32 * 32)  # a multiple of 32, as all sides are
    pyramid = _build_pyramid("segment", start.model, "each")
    heads = {"channels": 48, "aux_channels": 16, "dropout": 0.0} if start.nano else {}
    return SegmentParams(
        **_choose_dense(start, len(pairs), 4e-3 if start.nano else 1e-4, pyramid),
        upernet=UperNetParams(class_weights=_weigh(pixels), **heads),
        transform=SegmentationTransformSettings(
            scale=(long, short),
            ratio=(0.75, 1.33),
            crop_size=crop,
            stride=2 * crop // 3,  # neighbouring windows overlap by a third
            hflip=start.hflip,
            # a short training has no time to learn to ignore random changes of brightness and contrast
            photometric=len(pairs) >= SMALL,
        ),
    )


def _choose_dense(start: OwnTraining, images: int, rate: float, pyramid: Any) -> dict[str, Any]:
    """Return the settings that the recipes for scenes share.

    The rate falls linearly, which needs no milestones. Given weights learn slower in the lower layers (layer decay).
    """
    largest = 4 if images < SMALL else 16
    shared = start.choose_length(images, largest, 6 if start.init else 12, 5)
    steps = shared["epochs"] * (images // shared["batch_size"])
    optim = OptimParams(
        lr=rate,
        warmup_lr=rate / 10,
        lr_batch_size=largest,
        schedule="poly",
        warmup_epochs=0,
        warmup_steps=min(100, steps // 10),
        layer_decay=0.6 if start.init and hasattr(pyramid.backbone, "group_matcher") else None,
    )
    return shared | {"optim": optim}


def _choose_sides(sizes: np.ndarray) -> tuple[int, int]:
    """Return the short and the long side in pixels of the median picture, within bounds; `sizes` is (N, 2)."""
    short, long = float(np.median(sizes.min(axis=1))), float(np.median(sizes.max(axis=1)))
    smallest, largest = _SHORT_PX
    side = round(min(largest, max(smallest, short)))
    return side, max(side, round(side * min(3.0, long / short)))


def _weigh(pixels: np.ndarray) -> tuple[float, ...]:
    """Weight each class by (median number of pixels / its number of pixels)^½, clipped to [0.02, 5]."""
    median = float(np.median(pixels[pixels > 0]))
    return tuple(round(min(5.0, max(0.02, math.sqrt(median / max(count, 1)))), 3) for count in pixels.tolist())


def _build_pyramid(stage: str, model: str, features: str) -> Any:
    """Build a model's pyramid with random weights, to see whether it has one and of which kind; UserError if not."""
    from ..models.pyramid import build_pyramid

    try:
        return build_pyramid(model, features=features)
    except ValueError as error:
        raise UserError(f"{stage}: --model {error}") from None
