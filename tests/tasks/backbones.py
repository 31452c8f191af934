"""What tests of several tasks share: batches, a backbone of two convolutions, and the hierarchical ones."""

from torch import Tensor, nn
from torch.nn import functional as F

from repro.tasks.segmentation.params import UperNetParams

NARROW = UperNetParams(channels=8, aux_channels=4, pool_scales=(1, 2))
# name in timm, options, and the widths of the four maps
SWIN = {"embed_dim": 8, "depths": (1, 2, 1, 1), "num_heads": (1, 1, 2, 2)}
HIERARCHICAL = [
    ("swin_tiny_patch4_window7_224", SWIN, (8, 16, 32, 64)),
    ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)}, (8, 12, 16, 24)),
    ("hvit3_nano_144", {}, (16, 32, 64, 96)),
    ("vmamba_nano_144", {}, (16, 32, 64, 128)),
    ("mambavision_nano_144", {"windows": (8, 4)}, (16, 32, 64, 128)),
]
# followed by batch norms, whose statistics take the gradient of a bias away
BEFORE_NORMS = ("downsample.conv.2.conv.bias", "blocks.0.conv1.bias", "blocks.0.conv2.bias")


class Batches(list):
    """Batches, and what a task asks of its loader beside them."""

    dataset = None


class Pyramid(nn.Module):
    """Four maps of strides 4 to 32, of width `embed_dim`."""

    def __init__(self, embed_dim: int = 8):
        super().__init__()
        self.channels = (embed_dim,) * 4
        self.stem = nn.Conv2d(3, embed_dim, 4, stride=4)
        self.mix = nn.Conv2d(embed_dim, embed_dim, 3, padding=1)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.mix(self.stem(images).relu())
        return [F.avg_pool2d(x, 2**i) if i else x for i in range(4)]


def list_unreached(model: nn.Module, *exempt: str) -> list[str]:
    """The parameters without a gradient, or with one that is zero or not finite; those that end in `exempt` may be."""
    own = {name: p for name, p in model.named_parameters() if not name.endswith(exempt)}
    return [name for name, p in own.items() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
