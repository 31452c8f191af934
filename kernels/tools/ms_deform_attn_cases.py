"""Multi-scale deformable attention as `check`, `bench` and `resources` need to know it; see `operators` for what each name is.

Shape letters: B samples, Q queries, M heads, C channels of a head, L levels, P points.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..ms_deform_attn import ms_deform_attn, op, selected_backend, triton_bwd, triton_fwd
from ..ms_deform_attn.reference import ms_deform_attn_formula
from .bench import FORWARD, Maker, ours
from .check import DTYPES
from .resources import Compilation

NAME = "ms_deform_attn"
INPUTS = ("value", "locations", "weights")
FLOOR = 0.0
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
BATCH = 16  # the paper's, for detection and for segmentation
TOKENS = (1024, 4200)  # 512×512 and 800×1344 pixels
HEADS = (6, 12)  # of 32 channels: the ViT-Adapters T and B

GOALS = {"forward_share_of_copy_percent": ("forward, share of the bandwidth of a copy", 15, " %")}
AT = "B 16, T 4200, 12 heads of 32, one level, bf16"
PEER = None
DISTRIBUTIONS: dict[str, str] = {}

KERNELS = {
    "ms_deform_attn_forward": (triton_fwd, triton_fwd.forward_kernel),
    "ms_deform_attn_backward_points": (triton_fwd, triton_bwd.points_kernel),
    "ms_deform_attn_backward_value": (triton_bwd, triton_bwd.value_kernel),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One shape: B samples of T patch tokens, as square a map as T has, in a ViT-Adapter.

    With one level it is the extractor's: the queries are the maps of twice, once and half the sides, the value is the map of T
    tokens. With three it is the injector's, the other way round. `crowded`: all points lie in one cell of their level.
    """

    batch: int = BATCH
    tokens: int
    heads: int
    head_dim: int = 32
    levels: int = 1
    points: int = 4
    crowded: bool = False

    def shapes(self) -> list[tuple[int, int]]:
        """(h, w) of each level of the value."""
        return self._maps() if self.levels == 3 else self._maps()[1:2]

    def samples_shape(self) -> tuple[int, int, int, int, int]:
        """(B,Q,M,L,P)."""
        queries = sum(h * w for h, w in self._maps()) if self.levels == 1 else self.tokens
        return self.batch, queries, self.heads, self.levels, self.points

    def _maps(self) -> list[tuple[int, int]]:
        h = next(side for side in range(math.isqrt(self.tokens), 0, -1) if self.tokens % side == 0)
        w = self.tokens // h
        return [(2 * h, 2 * w), (h, w), ((h + 1) // 2, (w + 1) // 2)]

    def bytes(self, passes: str) -> int:
        """What must be read and written at least: the inputs and out; then the inputs, dout and the gradients."""
        B, Q, M, L, P = self.samples_shape()
        value = 2 * B * sum(h * w for h, w in self.shapes()) * M * self.head_dim
        out, points = 2 * B * Q * M * self.head_dim, 4 * 3 * B * Q * M * L * P
        return value + points + out if passes == FORWARD else 3 * (value + points) + 2 * out

    def flop(self, passes: str) -> int:
        """2 per multiply-add by the operator's own formulas."""
        shape = self.samples_shape()
        return op.forward_flops(shape, self.head_dim) + (0 if passes == FORWARD else op.backward_flops(shape, self.head_dim))


COMPARED = Sizes(tokens=4200, heads=12)
TYPICAL = Sizes(batch=2, tokens=197, heads=3)
COMPILED = TYPICAL
LONG = tuple(Sizes(batch=1, tokens=tokens, heads=2, levels=levels) for tokens in (4200, 6400) for levels in (1, 3))


def OP(value: Tensor, locations: Tensor, weights: Tensor, *, backend: str) -> Tensor:
    """The operator with the levels of `COMPILED`."""
    return ms_deform_attn(value, COMPILED.shapes(), locations, weights, backend=backend)


def limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """The kernels' own error, which grows with the pixel coordinates, and of the results' rounding the unit where there is one."""
    return (1e-4 if sizes.tokens > 1000 else 2e-5) + (ROUNDING[dtype] if name in ("out", "value") else 0.0)


def draw(seed: int, sizes: Sizes, device: Any = "cpu") -> list[Tensor]:
    """value, locations, weights and a gradient of the output, fp64: values of bf16, and of fp32 for locations and weights.

    Points lie on the map, at its edges and outside, and never so near a pixel's row or column, where the derivative jumps, that
    rounding could put them on its other side.
    """
    generator = torch.Generator().manual_seed(seed)
    shape, h_w = sizes.samples_shape(), torch.tensor(sizes.shapes(), dtype=torch.float64)
    B, Q, M, _, _ = shape

    def rows(tokens: int) -> Tensor:
        return torch.randn(B, tokens, M, sizes.head_dim, generator=generator, dtype=torch.float64).bfloat16()

    w_h = h_w.flip(1)[:, None]
    uniform = torch.rand(*shape, 2, generator=generator, dtype=torch.float64)
    corner = torch.zeros(()) if sizes.crowded else (uniform * (w_h + 6)).floor() - 4
    within = 0.02 + 0.96 * torch.rand(*shape, 2, generator=generator, dtype=torch.float64)
    locations = ((corner + within + 0.5) / w_h).float()
    weights = torch.randn(shape, generator=generator, dtype=torch.float64).float()
    return [x.double().to(device) for x in (rows(int(h_w.prod(1).sum())), locations, weights, rows(Q))]


def reference(inputs: Sequence[Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """`out` and the gradient of each input, by autograd through the equation, in the dtype of `inputs` (three and dout)."""
    *leaves, dout = inputs
    value, locations, weights = leaves = [x.clone().requires_grad_() for x in leaves]
    out = ms_deform_attn_formula(value, sizes.shapes(), locations, weights)
    return dict(zip(("out", *INPUTS), (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


def kernels(
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    sizes: Sizes,
    config: triton.Config | None = None,
    backward_config: triton.Config | None = None,
) -> dict[str, Tensor]:
    """As `reference`, by the Triton kernels: value and dout in `dtype`, locations and weights in fp32.

    `config` is for both kernels that go by rows, `backward_config` for the one that goes by pixels.
    """
    value, locations, weights, dout = inputs
    arguments = value.to(dtype), [size for shape in sizes.shapes() for size in shape], locations.float(), weights.float()
    out = triton_fwd.forward(*arguments, config)
    gradients = triton_bwd.backward(dout.to(dtype), *arguments, config, backward_config)
    return dict(zip(("out", *INPUTS), (out, *gradients), strict=True))


def ragged(interpreted: bool) -> list[Sizes]:
    """Maps of a pixel, of a row and of more, of extractor and injector; the interpreter is slow, and gets the small ones."""
    sides = (1, 2, 6, 7) if interpreted else (1, 2, 6, 7, 196, 197)
    return [Sizes(batch=2, tokens=tokens, heads=2, head_dim=8, levels=levels) for tokens in sides for levels in (1, 3)]


def variants() -> Iterator[tuple[str, Sizes]]:
    """Channels and points that are no power of two; more samples around a pixel than a program takes at once."""
    yield "five channels, three points", Sizes(batch=2, tokens=6, heads=3, head_dim=5, levels=3, points=3)
    yield "all points in one cell", Sizes(batch=1, tokens=12, heads=2, crowded=True)


def selected(sizes: Sizes, dtype: torch.dtype, device: Any) -> str:
    """The backend that `auto` takes."""
    return selected_backend("auto", device, head_dim=sizes.head_dim, levels=sizes.levels, dtype=dtype)


def configs(dtype: torch.dtype) -> tuple[list[triton.Config], list[triton.Config]]:
    """The candidates of the kernels that go by rows, and of the one that goes by pixels."""
    return triton_fwd.configs(TYPICAL.head_dim), triton_bwd.configs(TYPICAL.head_dim)


def peer_checks(device: Any) -> tuple[()]:
    """None: the kernel that others have is one of mmcv's compiled operators."""
    return ()


def shapes() -> list[Sizes]:
    """B 16: both numbers of heads at both resolutions, extractor and injector."""
    return [Sizes(tokens=tokens, heads=heads, levels=levels) for heads in HEADS for tokens in TOKENS for levels in (1, 3)]


def layer_inputs(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """value, locations and weights as a layer gives them at the start: value in bf16, points around the queries' own pixels."""
    generator = torch.Generator(device).manual_seed(0)
    B, Q, M, L, P = shape = sizes.samples_shape()
    tokens = sum(h * w for h, w in sizes.shapes())
    value = torch.randn(B, tokens, M, sizes.head_dim, generator=generator, device=device).bfloat16()
    maps = sizes._maps() if L == 1 else sizes.shapes()[1:2]
    centres = [
        torch.stack(torch.meshgrid((torch.arange(w) + 0.5) / w, (torch.arange(h) + 0.5) / h, indexing="xy"), -1).view(-1, 2)
        for h, w in maps
    ]
    w_h = torch.tensor([(w, h) for h, w in sizes.shapes()], device=device)[:, None]
    offsets = 2 * torch.randn(*shape, 2, generator=generator, device=device)
    locations = torch.cat(centres).to(device).view(1, Q, 1, 1, 1, 2) + offsets / w_h
    weights = torch.randn(B, Q, M, L * P, generator=generator, device=device).softmax(-1).view(shape)
    return [value, locations, weights]


def implementations(sizes: Sizes) -> dict[str, Maker]:
    """Ours alone."""
    shapes = sizes.shapes()

    def attend(value: Tensor, locations: Tensor, weights: Tensor, *, backend: str) -> Tensor:
        return ms_deform_attn(value, shapes, locations, weights, backend=backend)

    return ours(attend, functools.partial(layer_inputs, sizes))


def missing(name: str) -> str | None:
    """There are no others."""
    return None


def tuners() -> list[tuple[Any, Any]]:
    """Of the three kernels."""
    return [(kernel, triton_fwd.tuned(kernel, module.configs, COMPARED.head_dim)) for module, kernel in KERNELS.values()]


def compilations() -> Iterator[Compilation]:
    """Every kernel, dtype and config, with the six heads of 32 and the four points of the ViT-Adapter T, on three levels."""
    for name, (module, _) in KERNELS.items():
        for dtype in DTYPES:
            for i in range(len(module.configs(32))):
                yield compilation(name, dtype, number=i)


def compilation(name: str, dtype: str, head_dim: int = 32, levels: int = 3, number: int = 0) -> Compilation:
    """One of `KERNELS` in one of its configs, the default one unless said."""
    module, kernel = KERNELS[name]
    return Compilation(
        name=name,
        kernel=kernel,
        operands=("value", "out", "dout", "dvalue"),
        types={"cells_ptr": "*i32", "order_ptr": "*i64", "starts_ptr": "*i64"},
        constants={"M": 6, "C": head_dim, "L": levels, "P": 4, "WIDTH": triton.next_power_of_2(head_dim)},
        config=module.configs(head_dim)[number],
        dtype=dtype,
        sizes={"heads": 6, "head_dim": head_dim, "levels": levels},
        default=number == 0,
    )
