"""Base classes of all image models: timm's head and pooling, and the choice of the operators' backend."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]  # rows and columns, or the (H, W) of an image in pixels


class PatchConv(nn.Conv2d):
    """Patch embedding: a convolution whose stride is its kernel, computed as one matrix product.

    The result is channels-last, so the flattened tokens are contiguous and the first block needs no copy. It is a
    `Conv2d` also because hooks of `inference.erf` and `bench.adapted` find it by this class.
    """

    def __init__(self, in_channels: int, out_channels: int, patch_size: int):
        super().__init__(in_channels, out_channels, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) or (C, H, W), with sides that the patch divides, to (B, D, h, w) or (D, h, w)."""
        p = self.stride[0]  # the side of a patch
        cut = x.unflatten(-1, (-1, p)).unflatten(-3, (-1, p))  # (..., C, h, p, w, p)
        cut = cut.movedim((-4, -2), (-5, -4)).flatten(-3)
        return F.linear(cut, self.weight.flatten(1), self.bias).movedim(-1, -3)


class OperatorModel(nn.Module):
    """Model with layers that may run this project's operators; these have `backend` and `selected_backend(dtype)`.

    Layers are found by these two names. The model itself must have no attribute `backend`: it would count as one of its
    layers, and `selected_backend` would call itself without end.
    """

    # whether a training recomputes each block; a subclass reads it in `forward`, or passes it on
    grad_checkpointing = False

    def set_backend(self, backend: str) -> None:
        """Set the backend of the operators in every layer; see `kernels`.

        LaCT and Vittt's steps `plain` and `dot` also know `recurrent` and `parallel`, so a layer refuses a name only
        when it runs.
        """
        for layer in self._operator_layers():
            layer.backend = backend

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the backend that runs on this device, at the built image size, for activations of `dtype`.

        Several backends are joined by `+`. A model without such layers returns `torch`.
        """
        return "+".join(sorted({layer.selected_backend(dtype) for layer in self._operator_layers()})) or "torch"

    def _operator_layers(self) -> list[nn.Module]:
        """Return the layers that have a `backend` and a `selected_backend`."""
        return [
            module for module in self.modules() if hasattr(module, "selected_backend") and hasattr(module, "backend")
        ]


class ImageModel(OperatorModel):
    """Base class of plain and hierarchical backbones, with timm's head, pooling and features.

    A subclass implements `forward_features`, `forward_intermediates` and `pool_features`, sets `pooled_by`, and calls
    `check_rates` before it builds any layer.
    """

    head: nn.Module
    head_drop: nn.Module
    num_features: int  # width of the features that the head takes
    num_classes: int  # outputs of the head; 0 without a head
    pooled_by: str  # timm's name of the pooling that the model was built with
    global_pool: str  # timm's name of the pooling that runs; "" for none
    dynamic_img_size = True  # whether `check_image_size` allows all sizes; `backbone.create` sets timm's option

    def pool_features(self, x: Tensor) -> Tensor:
        """Pool the result of `forward_features` to (B, num_features), by a `global_pool` that is not empty."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map the result of `forward_features` to logits (B, num_classes).

        With `pre_logits`, return the pooled features (B, num_features). Without pooling, the features stay unpooled.
        """
        feature = self.head_drop(self.pool_features(x) if self.global_pool else x)
        return feature if pre_logits else self.head(feature)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, in_chans, H, W) to logits (B, num_classes), or to pooled features if there is no head."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """Return the head; timm's scripts call it."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one for `num_classes` (0: none), and the pooling if one is named.

        The new head has the device and the dtype of the model's other parameters.

        Raises:
            ValueError: a pooling that the model does not have.
        """
        if global_pool is not None:
            self.set_pooling(global_pool, num_classes)
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes:
            like = next(self.parameters())
            self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            init_linear(self.head)

    def set_pooling(self, name: str, num_classes: int) -> None:
        """Set the pooling by timm's name: the model's own, `avg` for the mean of the patches, or "" for none.

        `num_classes` is that of the head which will follow; `Hierarchy` refuses a head without pooling.
        """
        known = sorted({self.pooled_by, "avg", ""})
        if name not in known:
            raise ValueError(f"global_pool {name!r}: this model has {', '.join(map(repr, known))}")
        self.global_pool = name

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay; timm exempts norms and biases itself."""
        return set()

    def check_image_size(self, height: int, width: int) -> None:
        """Raise a ValueError for a size in pixels other than `img_size`, unless `dynamic_img_size`."""
        if not self.dynamic_img_size and (height, width) != self.img_size:
            built = "x".join(map(str, self.img_size))
            raise ValueError(f"image size {height}x{width}: the model is built for {built}, without dynamic_img_size")


def check_rates(**rates: float) -> None:
    """Raise a ValueError for a rate outside 0 to 1; the keywords are the names of the options in its message."""
    for name, rate in rates.items():
        if not 0 <= rate <= 1:
            raise ValueError(f"{name} {rate}: expected a share from 0 to 1")


def init_linear(linear: nn.Linear) -> None:
    """Initialise weights trunc_normal with std 0.02, biases 0."""
    nn.init.trunc_normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
