"""Cases of multi-scale deformable attention.

Shape letters: B samples, Q queries, M heads, C channels of a head, L levels, P points. There is no peer: the other
kernel, mmcv's, is a compiled operator, which this project does not build.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ms_deform_attn import ms_deform_attn, op, triton_bwd, triton_fwd
from . import cases
from .cases import ROUNDING, Random, long, ragged, special


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """Sizes of a case: B samples of T patch tokens in a ViT-Adapter, on a map that is as square as T allows.

    With one level it is the extractor's: the queries are the maps of twice, once and half the sides, and the value is
    the map of T tokens. With three levels it is the injector's, the other way round. `crowded` puts all points into one
    cell of their level.
    """

    batch: int = 16  # the paper's, for detection and for segmentation
    heads: int
    head_dim: int = 32
    levels: int = 1
    points: int = 4
    crowded: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"shapes": [size for shape in self.shapes() for size in shape]}

    def shapes(self) -> list[tuple[int, int]]:
        """Return (h, w) of each level of the value."""
        return self._maps() if self.levels == 3 else self._maps()[1:2]

    def query_maps(self) -> list[tuple[int, int]]:
        """Return (h, w) of each map of queries."""
        return self._maps() if self.levels == 1 else self._maps()[1:2]

    def samples_shape(self) -> tuple[int, int, int, int, int]:
        """Return (B,Q,M,L,P)."""
        return self.batch, sum(h * w for h, w in self.query_maps()), self.heads, self.levels, self.points

    def _maps(self) -> list[tuple[int, int]]:
        """Return (h, w) of the maps of twice, once and half the sides of the T tokens' map."""
        h = next(side for side in range(math.isqrt(self.tokens), 0, -1) if self.tokens % side == 0)
        w = self.tokens // h
        return [(2 * h, 2 * w), (h, w), ((h + 1) // 2, (w + 1) // 2)]


def find_limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return the kernels' own error, which grows with the coordinates, plus the rounding of results in `dtype`."""
    return (1e-4 if sizes.tokens > 1000 else 2e-5) + (ROUNDING[dtype] if name in ("out", "value") else 0.0)


def make(sizes: Sizes, random: Random) -> list[Tensor]:
    """Draw value, locations, weights and dout; see `make_points`."""
    return make_points(random, sizes.shapes(), sizes.samples_shape(), sizes.head_dim, crowded=sizes.crowded)


def make_points(
    random: Random,
    shapes: Sequence[tuple[int, int]],
    samples_shape: tuple[int, int, int, int, int],
    head_dim: int,
    *,
    crowded: bool = False,
) -> list[Tensor]:
    """Draw value, locations, weights and dout.

    Points lie on the map, at its edges and outside. They are never so near a pixel's row or column, where the
    derivative jumps, that rounding could move them to its other side.

    Args:
        shapes: (h, w) of each level.
        samples_shape: (B,Q,M,L,P).
        head_dim: C.
        crowded: put all points into one cell of their level.
    """
    B, Q, M, _, _ = samples_shape
    uniform = random.uniform(*samples_shape, 2)
    w_h = torch.tensor(shapes).to(uniform).flip(1)[:, None]
    corner = torch.zeros_like(uniform) if crowded else (uniform * (w_h + 6)).floor() - 4
    within = 0.02 + 0.96 * random.uniform(*samples_shape, 2)
    weights = random.normal(*samples_shape)
    value, dout = (random.normal(B, rows, M, head_dim) for rows in (sum(h * w for h, w in shapes), Q))
    return [value, (corner + within + 0.5) / w_h, weights, dout]


def lay_out(sizes: Sizes, value: Tensor, locations: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the inputs as an untrained layer gives them: points around the queries' own pixels."""
    centres = []
    for h, w in sizes.query_maps():
        x_y = torch.meshgrid((torch.arange(w) + 0.5) / w, (torch.arange(h) + 0.5) / h, indexing="xy")
        centres.append(torch.stack(x_y, -1).view(-1, 1, 1, 1, 2))
    w_h = torch.tensor(sizes.shapes()).to(locations).flip(1)[:, None]
    apart = 2 * Random(1, locations.device, locations.dtype).normal(*locations.shape) / w_h
    return [
        value,
        torch.cat(centres).to(apart).expand_as(apart[0]) + apart,
        weights.flatten(3).softmax(-1).view_as(weights),
    ]


def list_sizes(*lengths: int, **sizes: int) -> list[Sizes]:
    """Return the sizes of the extractor and the injector for each number of tokens."""
    return [Sizes(tokens=tokens, levels=levels, **sizes) for tokens in lengths for levels in (1, 3)]


small = partial(list_sizes, batch=2, heads=2, head_dim=8)
CASES = cases.Cases(
    NAME="ms_deform_attn",
    op=op,
    ACTIVATIONS=("value",),
    OPTIONS=("head_dim", "levels"),
    make=make,
    bind=lambda sizes: (
        lambda value, locations, weights, *, backend: ms_deform_attn(
            value, sizes.shapes(), locations, weights, backend=backend
        )
    ),
    limit=find_limit,
    configs=lambda dtype: (triton_fwd.configs(32), triton_bwd.configs(32)),
    lay_out=lay_out,
    BACKWARD_CONFIGS=2,  # of the kernel by rows, and of the one by pixels
    SMALL=Sizes(batch=2, tokens=2, heads=2, head_dim=4, levels=3, points=2),
    TYPICAL=Sizes(batch=2, tokens=197, heads=3),
    CASES=[
        # maps of a pixel, of a row and larger
        *ragged(*small(1, 2, 6, 7)),
        *ragged(*small(196, 197), on_gpu_alone=True),
        # no powers of two
        *special("five channels, three points", Sizes(batch=2, tokens=6, heads=3, head_dim=5, levels=3, points=3)),
        # more samples around a pixel than a program takes at once
        *special("all points in one cell", Sizes(batch=1, tokens=12, heads=2, crowded=True)),
        *long(*list_sizes(4200, 6400, batch=1, heads=2)),
    ],
    # 512×512 and 800×1344 pixels; heads of 32 channels of the ViT-Adapters T and B
    SHAPES=[*list_sizes(1024, 4200, heads=6), *list_sizes(1024, 4200, heads=12)],
    COMPARED=Sizes(tokens=4200, heads=12),
)
