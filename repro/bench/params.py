"""Parameters of `repro complexity` and `repro efficiency`, and the rows that they define; it does not import torch."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NoReturn, Self

from ..core.config import Each, bounded
from ..core.errors import UserError, did_you_mean
from .speed import RowSpec
from .sweep import FAMILIES, IMAGE_SIZES, PAIR, PATCH_SIZE, SIZES, order_by_importance

# the value of `model` in the rows of a backbone with its adapter; the option `backbone` names the backbone
ADAPTER = "vit_adapter"
# `first..last` or `first..last:step`
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizePair:
    """A model and the softmax-attention baseline with which it is compared."""

    model: str
    baseline: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A group of rows to count: the product of models, image sizes and options.

    Args:
        models: registered names.
        image_sizes: sides of square images in pixels. For a denoiser of latents, the sides of its latents, an eighth of
            the image's: 32 for 256 pixels.
        vary: option -> its values.
        fvcore: whether the rows also have fvcore's count, see `repro.bench.fvcore`.
    """

    models: tuple[str, ...]
    image_sizes: tuple[Annotated[int, Each(ge=1)], ...]
    vary: dict[str, tuple[str | int, ...]] = dataclasses.field(default_factory=dict)
    fvcore: bool = False

    def rows(self) -> Iterator[tuple[str, dict[str, str | int], tuple[int, int]]]:
        """Yield (model, options, (H, W)) of every row."""
        for model, side, *values in itertools.product(self.models, self.image_sizes, *self.vary.values()):
            yield model, dict(zip(self.vary, values, strict=True)), (side, side)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSize:
    """The size of an image in pixels; the adapter needs multiples of 32."""

    height: int = bounded(ge=32)
    width: int = bounded(ge=32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterRows:
    """The rows of Table 2: every backbone with its ViT-Adapter, without neck and head, at every image size."""

    backbones: tuple[str, ...] = ()
    image_sizes: tuple[ImageSize, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComplexityParams:
    """The `complexity:` section: the rows, and for each size (T, S, B) two models to compare at 1280²."""

    sizes: dict[str, SizePair]
    groups: tuple[RowGroup, ...]
    adapters: AdapterRows = AdapterRows()

    def rows(self) -> Iterator[tuple[str, dict[str, str | int], tuple[int, int]]]:
        """Yield (model, options, (H, W)) of every row; a row may come twice."""
        for group in self.groups:
            yield from group.rows()
        for backbone, size in itertools.product(self.adapters.backbones, self.adapters.image_sizes):
            yield ADAPTER, {"backbone": backbone}, (size.height, size.width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EfficiencyParams:
    """The `efficiency:` section: a fixed grid of rows.

    Args:
        sizes: letter of a size (T, S, B) -> the two models to compare; the baseline runs with unfused and with fused
            attention.
        others: further models, measured once for each image size.
        image_sizes: sides of square images in pixels.
        batch_size, dtype, backend, steps, warmup, budget_s: shared by all rows, see `repro.bench.speed.RowSpec`.
    """

    sizes: dict[str, SizePair]
    others: tuple[str, ...] = ()
    image_sizes: tuple[Annotated[int, Each(ge=1)], ...]
    batch_size: int = bounded(1, ge=1)
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    backend: Literal["auto", "torch", "numba", "triton", "reference"] = "auto"
    steps: int = bounded(10, ge=10)
    warmup: int = bounded(2, ge=1)
    budget_s: float = bounded(120.0, gt=0)

    def specs(self, device_type: str, threads: int | None = None) -> list[RowSpec]:
        """Make the rows, one image size after the other, so that compared rows run close in time and drift together."""
        models: list[tuple[str, str | None]] = []
        for pair in self.sizes.values():
            models += [(pair.model, None), (pair.baseline, "unfused"), (pair.baseline, "fused")]
        models += [(model, None) for model in self.others]
        return _make_specs(self, models, self.image_sizes, device_type, threads)


# the options of a sweep that depend on the device; the help of `stages.efficiency` repeats them
_CPU_DEFAULTS = {"sizes": ("T",), "batch_size": 1, "dtype": "fp32", "minutes": 10.0}
_GPU_DEFAULTS = {"sizes": ("T", "S", "B"), "batch_size": 64, "dtype": "bf16", "minutes": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepParams:
    """The options of a sweep; None stands for the device's default, see `_CPU_DEFAULTS` and `_GPU_DEFAULTS`.

    Args:
        image_sizes: sides of square images in pixels.
        families: keys of `FAMILIES`, all measured at one image size before the next; None: all families, first those of
            `PAIR` at every image size, then the others.
        sizes: keys of `SIZES`.
        batch_size, dtype, mode, compile, budget_s: shared by all rows, see `repro.bench.speed.RowSpec`.
        minutes: time limit for all rows; rows that do not fit are left out and listed.
        runs: how often each row is measured, each time in a new process.
    """

    image_sizes: tuple[int, ...] = IMAGE_SIZES
    families: tuple[str, ...] | None = None
    sizes: tuple[str, ...] | None = None
    batch_size: int | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    mode: Literal["infer", "train"] = "infer"
    compile: bool | Literal["graphs"] = False
    minutes: float | None = None
    runs: int = 1
    budget_s: float = 600.0

    def with_defaults(self, device_type: str) -> Self:
        """Return a copy with a device's defaults in place of None."""
        defaults = _CPU_DEFAULTS if device_type == "cpu" else _GPU_DEFAULTS
        return dataclasses.replace(
            self, **{name: value for name, value in defaults.items() if getattr(self, name) is None}
        )

    def plan(self, device_type: str, threads: int | None = None) -> list[list[RowSpec]]:
        """Make the rows in blocks of families; in a block, one image size after the other by `order_by_importance`.

        The params must come from `with_defaults`.
        """
        others = tuple(family for family in FAMILIES if family not in PAIR)
        blocks = []
        for families in (PAIR, others) if self.families is None else (self.families,):
            chosen = itertools.product(self.sizes or (), (FAMILIES[family] for family in families))
            models = [(pattern.format(SIZES[size]), attention) for size, (pattern, attention) in chosen]
            blocks.append(_make_specs(self, models, order_by_importance(self.image_sizes), device_type, threads))
        return blocks

    def command(self, device_type: str) -> str:
        """Return the command line that measures this sweep on a device."""
        given: dict[str, Any] = {
            "--res": self.image_sizes,
            "--families": self.families,
            "--sizes": self.sizes,
            "--batch-size": self.batch_size,
            "--dtype": self.dtype,
            "--device": device_type,
            "--mode": self.mode,
            "--minutes": None if self.minutes is None else f"{self.minutes:g}",
            "--runs": self.runs if self.runs > 1 else None,
        }
        words = ["repro efficiency"]
        for option, value in given.items():
            if value is not None:
                words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        how = {False: [], True: ["--compile"], "graphs": ["--graphs"]}[self.compile]
        return " ".join([*words, *how])


def _make_specs(
    params: EfficiencyParams | SweepParams,
    models: list[tuple[str, str | None]],
    image_sizes: Iterable[int],
    device_type: str,
    threads: int | None,
) -> list[RowSpec]:
    """Make a row for each image size and (model, `fused`, `unfused` or None), with the fields that both classes share.

    The classes of `params` and `RowSpec` share them by name: if a field is renamed in one of them, every row silently
    has `RowSpec`'s default.
    """
    names = [field.name for field in dataclasses.fields(RowSpec) if hasattr(params, field.name)]
    shared = {name: getattr(params, name) for name in names} | {"device": device_type, "threads": threads}
    return [
        RowSpec(**shared, model=model, attention=attention, image_size=(side, side))
        for side, (model, attention) in itertools.product(image_sizes, models)
    ]


def parse_image_sizes(text: str) -> tuple[int, ...]:
    """Read image sizes from a text and return them sorted.

    The text is `224`, `224..1280` (those of `IMAGE_SIZES` in the range), `224..1280:128` (every 128 pixels), or several
    of these separated by commas.

    Raises:
        UserError: another text, an empty range, or a size that is not a multiple of the patch.
    """

    def refuse(part: object, why: str) -> NoReturn:
        raise UserError(f"efficiency: --res {part}: {why}")

    found: set[int] = set()
    for part in map(str.strip, text.split(",")):
        if match := _RANGE.fullmatch(part):
            first, last, step = int(match[1]), int(match[2]), match[3]
            if first > last:
                refuse(part, f"begins above its end; write {last}..{first}")
            if step is not None and int(step) < 1:
                refuse(part, f"a step of {step} leads nowhere; write one of at least {PATCH_SIZE}")
            every = range(first, last + 1, int(step)) if step else IMAGE_SIZES
            sides = {side for side in every if first <= side <= last}
            if not sides:
                listed = ", ".join(map(str, IMAGE_SIZES))
                refuse(part, f"contains none of {listed}; give single numbers, or a step as in 64..192:32")
            found |= sides
        elif part.isdecimal():
            found.add(int(part))
        else:
            refuse(repr(part), "not an image size; write 224, 224,512, 224..1280 or 224..1280:128")
    if bad := sorted(side for side in found if side < PATCH_SIZE or side % PATCH_SIZE):
        near = max(PATCH_SIZE, round(bad[0] / PATCH_SIZE) * PATCH_SIZE)
        refuse(bad[0], f"not a positive multiple of the patch, {PATCH_SIZE} pixels; the nearest is {near}")
    return tuple(sorted(found))


def parse_names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Split names separated by commas and return them in the order of `known`.

    Raises:
        UserError: an unknown name; the message names the option.
    """
    known, given = tuple(known), [name.strip() for name in text.split(",")]
    for name in given:
        if name not in known:
            raise UserError(f"efficiency: {option} {name}: not known{did_you_mean(name, known)}")
    return tuple(name for name in known if name in given)
