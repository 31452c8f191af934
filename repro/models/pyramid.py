"""Four feature maps of an image for dense tasks, from any backbone.

A plain backbone becomes a `Pyramid` through a ViT-Adapter (`adapter.ViTAdapter`); a hierarchical one (this project's,
or timm's Swin, ConvNeXt, ResNet and others) has maps of its own (`NativePyramid`).
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from timm.layers import LayerNorm2d
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..core.errors import UserError
from .adapter import STRIDES, ClasslessViT, Features, Pyramid, ViTAdapter, pad_to_stride
from .backbone import is_plain
from .checkpoints import Checkpoint, require_same_architecture
from .hierarchy import Hierarchy
from .registry import build_model
from .weights import adapt_to_size, classifier_names, load_state

EPS = 1e-5  # of the maps' norms, as in the releases of Swin, VMamba, MambaVision and H-ViT3
_ANY_SIZE = {"strict_img_size": False, "always_partition": True}  # with these, timm's Swin takes images of any size


class NativePyramid(Pyramid):
    """Pyramid of a hierarchical backbone with timm's feature interface.

    The final norm and the head are removed. Each map gets a LayerNorm over its channels, as in the releases of Swin and
    ConvNeXt for detection and segmentation. A `Hierarchy` rounds its grids up, without padding of the image.

    Args:
        backbone: a model with `feature_info` and `forward_intermediates`.
        freeze_backbone: see `Pyramid`.

    Raises:
        ValueError: the model has no feature interface, or no map of one of the four strides.
    """

    def __init__(self, backbone: nn.Module, *, freeze_backbone: bool = False):
        if not hasattr(backbone, "forward_intermediates"):
            raise ValueError("it is neither a plain backbone nor one with timm's forward_intermediates")
        found = {info["reduction"]: (index, info["num_chs"]) for index, info in enumerate(backbone.feature_info)}
        missing = [stride for stride in STRIDES if stride not in found]
        if missing:
            raise ValueError(
                f"its maps have the strides {', '.join(map(str, found))}; a pyramid also needs {missing[0]}"
            )
        super().__init__(backbone, freeze_backbone)
        self.indices = [found[stride][0] for stride in STRIDES]
        self.channels = tuple(found[stride][1] for stride in STRIDES)
        before = set(backbone.state_dict())
        backbone.prune_intermediate_layers(self.indices, prune_norm=True)
        heads = {name.split(".")[0] for name in classifier_names(backbone.pretrained_cfg)}
        for name in heads:  # timm's pruning keeps parts of some heads, such as ConvNeXt's norm
            setattr(backbone, name, nn.Identity())
        # keys of the classifier that `load_backbone` leaves out
        self._removed = before - set(backbone.state_dict())
        self._heads = tuple(f"{name}." for name in heads)
        self.norms = nn.ModuleList(LayerNorm2d(channels, eps=EPS) for channels in self.channels)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (B, 3, H, W) to four maps; raise a UserError if the backbone does not take this size."""
        if not isinstance(self.backbone, Hierarchy):
            images = pad_to_stride(images)
        try:
            maps = self.backbone.forward_intermediates(images, indices=self.indices, intermediates_only=True)
        except (AssertionError, ValueError) as error:  # how timm and a Hierarchy refuse a size
            height, width = images.shape[-2:]
            raise UserError(
                f"{type(self.backbone).__name__} does not take images of {height}x{width} pixels: {error}"
            ) from None
        return [norm(level) for norm, level in zip(self.norms, maps, strict=True)]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switch gradient checkpointing of the backbone; UserError for True in a family of timm's without it."""
        try:
            self.backbone.set_grad_checkpointing(enable)
        except AssertionError:  # how timm refuses
            problem = "cannot recompute its blocks in the backward pass"
            raise UserError(
                f"{type(self.backbone).__name__} {problem}; train it with recompute_blocks: false"
            ) from None

    def group_matcher(self, coarse: bool = False, prefix: str = "") -> dict[str, Any]:
        """Return the backbone's own patterns; everything else is the last layer.

        Raises:
            UserError: the backbone's family has no such patterns.
        """
        if not hasattr(self.backbone, "group_matcher"):
            raise UserError(
                f"{type(self.backbone).__name__} does not say which layers it has; train it without layer-wise decay"
            )
        return _prepend(self.backbone.group_matcher(coarse), rf"^{re.escape(prefix)}backbone\.")

    def no_weight_decay(self) -> set[str]:
        """Return the backbone's parameters without weight decay; timm exempts vectors and biases itself."""
        exempt = self.backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()
        return {f"backbone.{name}" for name in exempt}

    def is_removed(self, key: str) -> bool:
        """Return whether a key of the backbone belongs to its final norm or its head."""
        return key in self._removed or key.startswith(self._heads)


def build_pyramid(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    features: Features = "last",
    final_norm: bool = False,
    drop_path_rate: float = 0.0,
    freeze_backbone: bool = False,
) -> Pyramid:
    """Build the pyramid of a registered backbone: a plain one with a ViT-Adapter, a hierarchical one from its maps.

    Args:
        name: a model of this project, a ViT of timm's, or any model of timm's that has maps of strides 4 to 32 and the
            option `drop_path_rate`.
        options: further arguments of the backbone, among them the `img_size` of its training if not the default.
        drop_path_rate: rate of the backbone's last block, to which the rates rise linearly from 0, and of the adapter's
            extractors.
        features: see `ViTAdapter`; a hierarchical backbone does not use it.
        final_norm: see `ViTAdapter`; the maps of a hierarchical backbone have norms of their own.
        freeze_backbone: see `Pyramid`.

    Raises:
        ValueError: an unknown model, or a backbone that does not fit.
    """
    options = dict(options or {})
    arguments = {**options, "num_classes": 0, "drop_path_rate": drop_path_rate}
    model = build_model(name, **arguments)
    try:
        if isinstance(model, VisionTransformer):
            model = ClasslessViT(model)
        if is_plain(model):
            pyramid = ViTAdapter(
                model,
                features=features,
                final_norm=final_norm,
                drop_path_rate=drop_path_rate,
                freeze_backbone=freeze_backbone,
            )
        elif final_norm:
            raise ValueError("its maps have norms of their own; leave out final_norm")
        else:
            accepted = inspect.signature(type(model)).parameters
            any_size = {key: value for key, value in _ANY_SIZE.items() if key in accepted}
            if any_size:  # built a second time; with one time fewer, the decoder would get other random numbers
                model = build_model(name, **any_size | arguments)
            pyramid = NativePyramid(model, freeze_backbone=freeze_backbone)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    # not `arguments`: the options are compared with those of a classifier's file, and saved with the weights
    pyramid.built_from = name, options
    return pyramid


def load_backbone(pyramid: Pyramid, checkpoint: Checkpoint) -> dict[str, str]:
    """Fill the backbone of a pyramid strictly with the weights of a classifier.

    Returns:
        A status for every key of the checkpoint and the pyramid. Keys of the checkpoint are `used` or `expected: not
        needed` (norm and head; a ViT's class token). Keys of the pyramid that the checkpoint does not fill are
        `expected: new` (everything but the backbone; a ViT's layer scales).

    Raises:
        UserError: a checkpoint that cannot be read, that belongs to another model or was built with other options, or
            with keys that are missing, left over or of another shape. The pyramid is then unchanged.
    """
    name, options = pyramid.built_from
    require_same_architecture(checkpoint, name, options)
    state, trunk = checkpoint.read_state(options), pyramid.trunk
    if isinstance(pyramid, NativePyramid):
        state = adapt_to_size(trunk, state, checkpoint.preprocessing["input_size"][-2:])
    added = {key for key in trunk.state_dict() if pyramid.is_added(key)}
    if not added.isdisjoint(state):  # the checkpoint has layer scales of its own, so it must fill all of them
        added = set()
    try:
        error = f"{checkpoint.where}: does not fit the backbone {name} as built"
        report = load_state(trunk, state, error, not_needed=pyramid.is_removed, new=added.__contains__)
    except UserError as misfit:
        # the words of `load_state` for another shape
        advice = "; build it with the img_size of its training" if "pos_embed is" in str(misfit) else ""
        raise UserError(f"{misfit}{advice}") from None
    filled = {f"{pyramid.trunk_name}.{key}" for key, line in report.items() if line == "used"}
    return report | {key: "expected: new" for key in pyramid.state_dict() if key not in filled}


def _prepend(pattern: Any, start: str) -> Any:
    """Restrict timm's matcher (a pattern, or dicts and sequences of them) to names that begin with `start`."""
    if isinstance(pattern, str):
        # each of timm's alternatives is anchored by ^, which would never match behind the prefix
        alternatives = re.sub(r"(^|\|)\^", r"\1", pattern)
        return f"{start}(?:{alternatives})"
    if isinstance(pattern, dict):
        return {key: _prepend(value, start) for key, value in pattern.items()}
    if isinstance(pattern, (list, tuple)):
        return type(pattern)(_prepend(each, start) for each in pattern)
    return pattern
