"""The cases of multi-scale deformable attention. Shape letters: B samples, Q queries, M heads, C channels of a head, L
levels, P points.

There is no peer: the other kernel that there is, mmcv's, is a compiled operator, which this project does not build.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..ms_deform_attn import ms_deform_attn, op, triton_bwd, triton_fwd
from . import cases
from .cases import ROUNDING, normal_drawer

TOKENS = (1024, 4200)  # 512×512 and 800×1344 pixels
HEADS = (6, 12)  # of 32 channels: the ViT-Adapters T and B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """One shape: B samples of T patch tokens in a ViT-Adapter, on a map that is as square as T allows.

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
        """(h, w) of each level of the value."""
        return self._maps() if self.levels == 3 else self._maps()[1:2]

    def query_maps(self) -> list[tuple[int, int]]:
        """(h, w) of the maps that the queries are."""
        return self._maps() if self.levels == 1 else self._maps()[1:2]

    def samples_shape(self) -> tuple[int, int, int, int, int]:
        """(B,Q,M,L,P)."""
        return self.batch, sum(h * w for h, w in self.query_maps()), self.heads, self.levels, self.points

    def _maps(self) -> list[tuple[int, int]]:
        h = next(side for side in range(math.isqrt(self.tokens), 0, -1) if self.tokens % side == 0)
        w = self.tokens // h
        return [(2 * h, 2 * w), (h, w), ((h + 1) // 2, (w + 1) // 2)]

    def tensor_bytes(self) -> tuple[int, int]:
        B, Q, M, L, P = self.samples_shape()
        value = 2 * B * sum(h * w for h, w in self.shapes()) * M * self.head_dim
        return value + 4 * 3 * B * Q * M * L * P, 2 * B * Q * M * self.head_dim

    def flop_of(self, passes: str) -> int:
        return getattr(op, f"{passes}_flops")(self.samples_shape(), self.head_dim)


class MSDeformAttnCases(cases.Cases):
    def limit(self, name: str, dtype: torch.dtype, sizes: Sizes) -> float:
        """The kernels' own error, which grows with the coordinates, plus the rounding of results in `dtype`."""
        return (1e-4 if sizes.tokens > 1000 else 2e-5) + (ROUNDING[dtype] if name in ("out", "value") else 0.0)

    def draw(self, seed: int, sizes: Sizes, device: Any = "cpu") -> list[Tensor]:
        """value, locations, weights and dout; see `draw_points`."""
        return draw_points(
            seed, sizes.shapes(), sizes.samples_shape(), sizes.head_dim, crowded=sizes.crowded, device=device
        )

    def bind(self, sizes: Sizes) -> Callable[..., Tensor]:
        shapes = sizes.shapes()

        def run(value: Tensor, locations: Tensor, weights: Tensor, *, backend: str) -> Tensor:
            return ms_deform_attn(value, shapes, locations, weights, backend=backend)

        return run

    def kernels(self, arguments: Any, dout: Tensor, config: Any = None, backward_config: Any = None) -> list[Tensor]:
        """`config` is for both kernels by rows, `backward_config` for the one by pixels."""
        return [triton_fwd.forward(arguments, config), *triton_bwd.backward(dout, arguments, config, backward_config)]

    def ragged(self, interpreted: bool) -> list[Sizes]:
        """Maps of a pixel, of a row and larger, for extractor and injector."""
        sides = (1, 2, 6, 7) if interpreted else (1, 2, 6, 7, 196, 197)
        return [
            Sizes(batch=2, tokens=tokens, heads=2, head_dim=8, levels=levels) for tokens in sides for levels in (1, 3)
        ]

    def variants(self) -> Iterator[tuple[str, Sizes]]:
        """Channels and points that are no powers of two; more samples around a pixel than a program takes at once."""
        yield "five channels, three points", Sizes(batch=2, tokens=6, heads=3, head_dim=5, levels=3, points=3)
        yield "all points in one cell", Sizes(batch=1, tokens=12, heads=2, crowded=True)

    def shapes(self) -> list[Sizes]:
        """Both numbers of heads at both image sizes, for extractor and injector."""
        return [
            Sizes(tokens=tokens, heads=heads, levels=levels)
            for heads in HEADS
            for tokens in TOKENS
            for levels in (1, 3)
        ]

    def layer_inputs(self, sizes: Sizes, device: torch.device) -> list[Tensor]:
        """As an untrained layer gives them: value in bf16, points around the queries' own pixels."""
        normal = normal_drawer(0, device)
        B, Q, M, L, P = shape = sizes.samples_shape()
        value = normal(B, sum(h * w for h, w in sizes.shapes()), M, sizes.head_dim).bfloat16()
        centres = []
        for h, w in sizes.query_maps():
            x_y = torch.meshgrid((torch.arange(w) + 0.5) / w, (torch.arange(h) + 0.5) / h, indexing="xy")
            centres.append(torch.stack(x_y, -1).view(-1, 2))
        w_h = torch.tensor([(w, h) for h, w in sizes.shapes()], device=device)[:, None]
        locations = torch.cat(centres).to(device).view(1, Q, 1, 1, 1, 2) + 2 * normal(*shape, 2) / w_h
        weights = normal(B, Q, M, L * P).softmax(-1).view(shape)
        return [value, locations, weights]

    def compile_time(self, dtype: torch.dtype, head_dim: int = 32, levels: int = 3) -> cases.CompileTime:
        """Six heads and four points, as in the ViT-Adapter T."""
        constants = {"M": 6, "C": head_dim, "L": levels, "P": 4, "WIDTH": triton.next_power_of_2(head_dim)}
        return {"heads": 6, "head_dim": head_dim, "levels": levels}, constants, (head_dim,)


CASES = MSDeformAttnCases(
    NAME="ms_deform_attn",
    op=op,
    triton_fwd=triton_fwd,
    triton_bwd=triton_bwd,
    INPUTS=("value", "locations", "weights"),
    ACTIVATIONS=("value",),
    SMALL=Sizes(batch=2, tokens=2, heads=2, head_dim=4, levels=3, points=2),
    TYPICAL=Sizes(batch=2, tokens=197, heads=3),
    LONG=tuple(Sizes(batch=1, tokens=tokens, heads=2, levels=levels) for tokens in (4200, 6400) for levels in (1, 3)),
    OPTIONS=("head_dim", "levels"),
    COMPARED=Sizes(tokens=4200, heads=12),
    GOALS={"forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 15, " %")},
    AT="B 16, T 4200, 12 heads of 32, one level, bf16",
    KERNELS={
        "ms_deform_attn_forward": (triton_fwd.configs, triton_fwd.forward_kernel, {}),
        "ms_deform_attn_backward_points": (triton_fwd.configs, triton_bwd.points_kernel, {}),
        "ms_deform_attn_backward_value": (triton_bwd.configs, triton_bwd.value_kernel, {}),
    },
    OPERANDS=("value", "out", "dout", "dvalue"),
    TYPES={"cells_ptr": "*i32", "order_ptr": "*i64", "starts_ptr": "*i64"},
)


def draw_points(
    seed: int,
    shapes: Sequence[tuple[int, int]],
    samples_shape: tuple[int, int, int, int, int],
    head_dim: int,
    *,
    crowded: bool = False,
    device: Any = "cpu",
) -> list[Tensor]:
    """value, locations, weights and dout, fp64: value and dout have values of bf16, locations and weights of fp32.

    Points lie on the map, at its edges and outside, and never so near a pixel's row or column, where the derivative
    jumps, that rounding could move them to its other side.

    Args:
        shapes: (h, w) of each level.
        samples_shape: (B,Q,M,L,P).
        head_dim: C.
        crowded: put all points into one cell of their level.
    """
    generator = torch.Generator().manual_seed(seed)
    h_w = torch.tensor(shapes, dtype=torch.float64)
    B, Q, M, _, _ = samples_shape

    def rows(tokens: int) -> Tensor:
        return torch.randn(B, tokens, M, head_dim, generator=generator, dtype=torch.float64).bfloat16()

    w_h = h_w.flip(1)[:, None]
    uniform = torch.rand(*samples_shape, 2, generator=generator, dtype=torch.float64)
    corner = torch.zeros(()) if crowded else (uniform * (w_h + 6)).floor() - 4
    within = 0.02 + 0.96 * torch.rand(*samples_shape, 2, generator=generator, dtype=torch.float64)
    locations = ((corner + within + 0.5) / w_h).float()
    weights = torch.randn(samples_shape, generator=generator, dtype=torch.float64).float()
    return [x.double().to(device) for x in (rows(int(h_w.prod(1).sum())), locations, weights, rows(Q))]
