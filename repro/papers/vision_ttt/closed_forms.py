"""Parameters and multiply-adds of the two hierarchical Mambas of Table 1, from their published definitions and without the models.

VMamba-T/S/B are its `v05_noz` models, MambaVision-T/S/B those of its release. Every function is arithmetic on a configuration. The
multiply-adds follow the convention by which each family's own FLOPs are counted, because Table 1 prints those. A test holds both
equal to what the models themselves count (`param_terms`, `paper_mac_terms`).

Symbols: C width of a stage, C, 2C, 4C, 8C for the four stages of strides 4, 8, 16, 32; L positions of its grid; E channels of the
scan; N its states; R = ceil(C/16) its rank; K routes of the scan.
"""

import dataclasses
from fractions import Fraction
from math import ceil

CLASSES = 1000
MLP_RATIO = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class VMamba:
    """A VMamba: stem, four stages of blocks (SS2D, then an MLP), a 3x3 convolution of stride 2 between stages, LayerNorm and head.

    Args:
        width: C of the first stage.
        depths: blocks by stage.
        expand: E/C.
        routes, states: K and N of the scan.
    """

    width: int
    depths: tuple[int, int, int, int]
    expand: int
    routes: int = 4
    states: int = 1

    def count_params(self) -> dict[str, int]:
        """Learned values by part."""
        C, widths = self.width, self._widths()
        return {
            # 3x3 convolutions 3 -> C/2 -> C with biases, each followed by a LayerNorm
            "stem": 27 * (C // 2) + C // 2 + 2 * (C // 2) + 9 * (C // 2) * C + C + 2 * C,
            "blocks": sum(depth * self.count_block_params(width) for depth, width in zip(self.depths, widths, strict=True)),
            # 3x3 convolution C -> 2C with bias, and a LayerNorm of 2C
            "downsampling": sum(18 * width**2 + 2 * width + 4 * width for width in widths[:3]),
            "head": 2 * widths[3] + (widths[3] + 1) * CLASSES,
        }

    def count_block_params(self, width: int) -> int:
        """Learned values of one block at width C."""
        C, E, R, K, N = width, self.expand * width, _rank(width), self.routes, self.states
        mixer = 2 * C * E + 9 * E  # into the scan and out of it, and the depth-wise 3x3, all without biases
        scan = K * (R + 2 * N) * E + K * R * E + K * E + K * N * E + K * E  # X, T, the bias of the step, A, D
        mlp = 2 * MLP_RATIO * C**2 + MLP_RATIO * C + C
        return mixer + scan + 2 * E + mlp + 4 * C  # the LayerNorms of the scan's output and of the two branches

    def count_macs(self, image_size: int = 224) -> dict[str, int]:
        """Multiply-adds for one image by fvcore's convention, with which its authors count.

        A convolution or linear layer counts its multiply-adds, a LayerNorm 5 per value, the pooling 1 per value that enters it, and
        the scan 9·N + 1 per position, channel and route. Activations are free.
        """
        C, widths, grids = self.width, self._widths(), _grids(image_size)
        stages = list(zip(self.depths, widths, grids, strict=True))
        linear = 27 * (C // 2) * (2 * grids[0]) ** 2 + 9 * (C // 2) * C * grids[0] ** 2
        normed = (C // 2) * (2 * grids[0]) ** 2 + C * grids[0] ** 2
        scanned = 0
        for depth, width, grid in stages:
            E, R, K, N = self.expand * width, _rank(width), self.routes, self.states
            linear += depth * grid**2 * (2 * width * E + 9 * E + K * (R + 2 * N) * E + K * R * E + 2 * MLP_RATIO * width**2)
            normed += depth * grid**2 * (2 * width + E)
            scanned += depth * grid**2 * K * E
        for width, grid in zip(widths[:3], grids[1:], strict=True):
            linear += 18 * width**2 * grid**2
            normed += 2 * width * grid**2
        last = widths[3] * grids[3] ** 2
        return {
            "convolutions_and_linear_layers": linear + widths[3] * CLASSES,
            "layer_norms": 5 * (normed + last),
            "pooling": last,
            "scan": (9 * self.states + 1) * scanned,
        }

    def _widths(self) -> list[int]:
        return [self.width << stage for stage in range(4)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaVision:
    """A MambaVision: stem, two stages of convolutions, two whose first blocks mix by a scan and whose others by attention, and a head.

    Args:
        width: C of the first stage.
        stem: channels of the stem's first convolution.
        depths: blocks by stage; of the last two stages, the first ceil(depth/2) blocks scan.
        layer_scale: whether the branches of the last two stages have a learned scale per channel.
        states: N of the scan.
    """

    width: int
    stem: int
    depths: tuple[int, int, int, int]
    layer_scale: bool = False
    states: int = 8

    def count_params(self) -> dict[str, int]:
        """Learned values by part; the running statistics of BatchNorm are buffers."""
        C, widths = self.width, self._widths()
        blocks = sum(depth * (18 * width**2 + 6 * width) for depth, width in list(zip(self.depths, widths, strict=True))[:2])
        for scans, attentions, width in self._mixing_stages():
            blocks += scans * self.count_block_params(width, scan=True) + attentions * self.count_block_params(width, scan=False)
        return {
            # 3x3 convolutions 3 -> stem -> C without biases, each followed by a BatchNorm
            "stem": 27 * self.stem + 2 * self.stem + 9 * self.stem * C + 2 * C,
            "blocks": blocks,
            "downsampling": sum(18 * width**2 for width in widths[:3]),  # 3x3 convolution C -> 2C without bias or norm
            "head": 2 * widths[3] + (widths[3] + 1) * CLASSES,
        }

    def count_block_params(self, width: int, *, scan: bool) -> int:
        """Learned values of one block of the last two stages at width C, whose branches are a scan or attention, and an MLP."""
        C, E, R, N = width, width // 2, _rank(width), self.states
        if scan:  # linear layers in and out, two Conv1d of 3 without biases, X, T with the bias of the step, A, D
            mixer = 2 * C**2 + 6 * E + (R + 2 * N) * E + R * E + E + N * E + E
        else:
            mixer = 4 * C**2 + 4 * C
        return mixer + 2 * MLP_RATIO * C**2 + (MLP_RATIO + 1) * C + 4 * C + 2 * C * self.layer_scale

    def count_macs(self, image_size: int = 224) -> dict[str, int]:
        """Multiply-adds for one image, of which its authors count 2-D convolutions and linear layers only.

        The scan, its Conv1d and the products of attention are left out, as they do. A grid must fit into one window (14x14 and 7x7),
        as it does at 224x224.
        """
        widths, grids = self._widths(), _grids(image_size)
        convolutions = 27 * self.stem * (2 * grids[0]) ** 2 + 9 * self.stem * self.width * grids[0] ** 2
        for depth, width, grid in list(zip(self.depths, widths, grids, strict=True))[:2]:
            convolutions += depth * 18 * width**2 * grid**2
        convolutions += sum(18 * width**2 * grid**2 for width, grid in zip(widths[:3], grids[1:], strict=True))
        linear = widths[3] * CLASSES
        for (scans, attentions, width), grid in zip(self._mixing_stages(), grids[2:], strict=True):
            E, R = width // 2, _rank(width)
            scan = 2 * width**2 + (R + 2 * self.states) * E + R * E
            mlp = 2 * MLP_RATIO * width**2
            linear += grid**2 * (scans * (scan + mlp) + attentions * (4 * width**2 + mlp))
        return {"convolutions": convolutions, "linear_layers": linear}

    def _widths(self) -> list[int]:
        return [self.width << stage for stage in range(4)]

    def _mixing_stages(self) -> list[tuple[int, int, int]]:
        """(blocks that scan, blocks with attention, width) of the last two stages."""
        return [(ceil(depth / 2), depth // 2, width) for depth, width in list(zip(self.depths, self._widths(), strict=True))[2:]]


MODELS: dict[str, VMamba | MambaVision] = {
    "vmamba_t": VMamba(width=96, depths=(2, 2, 8, 2), expand=1),
    "vmamba_s": VMamba(width=96, depths=(2, 2, 15, 2), expand=2),
    "vmamba_b": VMamba(width=128, depths=(2, 2, 15, 2), expand=2),
    "mambavision_t": MambaVision(width=80, stem=32, depths=(1, 3, 8, 4)),
    "mambavision_s": MambaVision(width=96, stem=64, depths=(3, 3, 7, 5)),
    "mambavision_b": MambaVision(width=128, stem=64, depths=(3, 3, 10, 5), layer_scale=True),
}


def closed_form_macs_g(name: str) -> Fraction:
    """Multiply-adds of a model of MODELS for one image of 224x224, in units of 1e9; a ValueError for another name."""
    if name not in MODELS:
        raise ValueError(f"there is no closed form of {name!r}; there are {', '.join(MODELS)}")
    return Fraction(sum(MODELS[name].count_macs().values()), 10**9)


def list_closed_forms() -> dict[str, dict[str, int]]:
    """Model -> `num_params` and `macs` at 224x224."""
    return {
        name: {"num_params": sum(model.count_params().values()), "macs": sum(model.count_macs().values())} for name, model in MODELS.items()
    }


def _rank(width: int) -> int:
    return ceil(width / 16)


def _grids(image_size: int) -> list[int]:
    """The sides of the four stages' grids; convolutions of stride 2 round them up."""
    return [ceil(image_size / stride) for stride in (4, 8, 16, 32)]
