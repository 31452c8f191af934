"""Cases of an operator: a table of the shapes that are checked, and the functions that draw a shape's tensors.

A new operator is checked, timed and tested once its `Cases` are in `operators.OPERATORS`.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import torch
import triton
from torch import Tensor

from ..dispatch import compute_dtype

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# the largest relative error of rounding a number to a dtype
ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
BOTH_DIRECTIONS = (False, True)  # directions: the first scans forward, the second backward

# the configs of the forward and of the backward kernel; None for that of a launch without one
Configs = tuple[Any, Any]
DEFAULT: Configs = (None, None)

IMAGE_TOKENS = (196, 784, 1600, 4096, 6400)  # 224, 448, 640, 1024 and 1280 pixels a side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a case: B samples, T tokens, and those that an operator adds.

    The fields identify measured rows, see `bench.row_key`: files that were written before a new field cannot be read.
    Fields by which `Cases.SHAPES` differ must also be in `_PRINTED` of `repro.bench.kernels` and in `tabulate_times` of
    `repro.report.kernels`. Rows that these two cannot tell apart replace each other there.
    """

    batch: int = 64
    tokens: int

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of the custom op other than its tensors."""
        return {}


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of an operator's table: a shape that is checked, and how."""

    what: str  # the name of the check, in its rows
    sizes: Any
    seeds: Sequence[int] = (0,)  # more than one is what marks a row for `Cases.ragged`
    dtypes: Sequence[str] = tuple(DTYPES)
    on_gpu_alone: bool = False  # whether the interpreter leaves it out, which would take too long


def ragged(*sizes: Sizes, on_gpu_alone: bool = False) -> list[Case]:
    """Return rows of full, short and missing blocks, with five seeds, by which `Cases.ragged` knows them."""
    what = "default config, memory filled with NaN"
    return [Case(what, each, range(5), on_gpu_alone=on_gpu_alone) for each in sizes]


def special(what: str, *sizes: Sizes, on_gpu_alone: bool = False) -> list[Case]:
    """Return rows of one seed."""
    return [Case(what, each, on_gpu_alone=on_gpu_alone) for each in sizes]


def long(*sizes: Sizes) -> list[Case]:
    """Return rows of many tokens, which would take too long without a GPU."""
    return [Case("long, gradients finite", each, dtypes=("fp32", "bf16"), on_gpu_alone=True) for each in sizes]


class Random:
    """A stream of random numbers, on a device and in a dtype."""

    def __init__(self, seed: int, device: Any = "cpu", dtype: torch.dtype = torch.float64):
        """Start the stream of `seed`; streams of two devices or dtypes have different numbers."""
        self.how = {"generator": torch.Generator(device).manual_seed(seed), "device": device, "dtype": dtype}

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Draw numbers with this standard deviation and mean."""
        return mean + scale * torch.randn(shape, **self.how)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers from 0 to 1."""
        return torch.rand(shape, **self.how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """Other people's kernels of an operator.

    `checks`: the name of a check -> sizes, and (cases, sizes, device) -> their results and ours, the output and the
    gradients.
    """

    package: str  # as it is imported
    distribution: str  # as it is installed
    names: tuple[str, ...]  # of the timed implementations
    # name, sizes, our function's inputs -> the function and its inputs
    prepare: Callable[[str, Any, list], tuple[Callable[..., Tensor], list]]
    checks: Mapping[str, tuple[Sizes, Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]]]
    missing: str  # the message where the package is not installed
    takes: Callable[[Any], bool] = lambda sizes: True  # whether they compute it at these sizes


@dataclasses.dataclass(kw_only=True, eq=False)
class Cases:
    """The cases of one operator."""

    NAME: str
    op: Any  # its module, or what has its `CUSTOM_OP` and `selected_backend` (backend, device, *, dtype and `OPTIONS`)
    ACTIVATIONS: tuple[str, ...]  # the inputs that a layer under autocast gives it in low precision
    OPTIONS: tuple[str, ...] = ()  # fields of the sizes that `op.selected_backend` takes
    CPU_BACKENDS: tuple[str, ...] = ("torch",)  # without the reference; `auto` takes the first
    OUT_BATCH: int = 0  # the batch axis of the output
    FLOOR: float = 0.0  # errors are relative to a norm of at least this
    # draws the inputs in the order of `INPUTS`, then the gradient dout of the output; one that these sizes lack is None
    make: Callable[[Any, Random], Sequence[Tensor | None]]
    # binds the public operator to these sizes: a function of the inputs and a backend
    bind: Callable[[Any], Callable[..., Tensor]]
    # input or `out`, dtype, sizes -> the largest relative error of it, or of its gradient
    limit: Callable[[str, torch.dtype, Any], float]
    # the candidates of the forward and of the backward kernel at TYPICAL
    configs: Callable[[torch.dtype], tuple[Sequence[Any], Sequence[Any]]]
    # sizes, the inputs -> the inputs in a layer's layout
    lay_out: Callable[..., list[Tensor | None]] = lambda sizes, *inputs: list(inputs)
    BACKWARD_CONFIGS: int = 1  # number of configs of the backward pass; of two, the first is one of the forward kernel
    SMALL: Any  # for tests
    TYPICAL: Any  # for configs, repetition and torch.compile
    CASES: Sequence[Case]
    SHAPES: Sequence[Any]  # to time
    COMPARED: Any  # the one of SHAPES at which there are goals; `GOALS` of `repro.report.kernels` has it in words
    PEERS: Peers | None = None

    @functools.cached_property
    def INPUTS(self) -> tuple[str, ...]:
        """Return the names of the tensor inputs, in the order of the op's arguments and of the gradients."""
        hints = get_type_hints(self.op.CUSTOM_OP.arguments)
        return tuple(name for name, kind in hints.items() if kind in (Tensor, Tensor | None))

    @property
    def ragged(self) -> list[Any]:
        """Return the sizes of the table that have several seeds and need no GPU."""
        return [case.sizes for case in self.CASES if len(case.seeds) > 1 and not case.on_gpu_alone]

    def draw(self, seed: int, sizes: Any, device: Any = "cpu") -> list[Tensor | None]:
        """Draw the inputs and dout in fp64, the same on every device.

        Activations and dout have values that bf16 can hold, the others values that fp32 can hold.
        """
        drawn = self.cast(self.cast(self.make(sizes, Random(seed)), torch.bfloat16), torch.float64)
        return [x if x is None else x.to(device) for x in drawn]

    def layer_inputs(self, sizes: Any, device: Any) -> list[Tensor | None]:
        """Draw inputs as a layer gives them: activations in bf16, parameters in fp32."""
        drawn = self.make(sizes, Random(0, device, torch.float32))[:-1]
        return self.lay_out(sizes, *self.cast(drawn, torch.bfloat16))

    def cast(self, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
        """Cast inputs (and any dout) as a layer has them: activations and dout to `dtype`, others to fp32.

        For fp64 all are fp64. An input that these sizes lack stays None.
        """
        names, low = (*self.INPUTS, "dout")[: len(inputs)], {*self.ACTIVATIONS, "dout"}
        dtypes = [dtype if name in low else compute_dtype(dtype) for name in names]
        return [x if x is None else x.to(own) for x, own in zip(inputs, dtypes, strict=True)]

    def arguments(self, inputs: Sequence[Tensor | None], sizes: Any) -> Any:
        """Return the arguments of the custom op: the inputs, with the options of these sizes."""
        return self.op.CUSTOM_OP.arguments(**dict(zip(self.INPUTS, inputs, strict=True)), **sizes.options)

    def kernels(self, arguments: Any, dout: Tensor, configs: Configs = DEFAULT) -> list[Tensor]:
        """Return the output and each gradient, by the Triton kernels.

        `forward` takes keep_states only where states are kept. Where the backward pass has two kernels, it takes both
        configs, see `BACKWARD_CONFIGS`.
        """
        op = self.op.CUSTOM_OP
        forward, backward = op._load_triton()
        found = forward.forward(arguments, *[True] * bool(op.kept), configs[0])
        results = dict(zip(("out", "states"), found, strict=True)) if op.kept else {"out": found}
        kept = (results[name] for name in op.kept)
        return [results["out"], *backward.backward(dout, *kept, arguments, *configs[-self.BACKWARD_CONFIGS :])]

    def select(self, backend: str, sizes: Any, dtype: torch.dtype, device: Any) -> str:
        """Return the backend that runs for a request."""
        options = {name: getattr(sizes, name) for name in self.OPTIONS}
        return self.op.selected_backend(backend, device, dtype=dtype, **options)

    def implementations(self, sizes: Any) -> list[str]:
        """Return the names of the timed implementations: our function on two backends, and other people's kernels."""
        return ["triton", "torch", *(self.PEERS.names if self.PEERS and self.PEERS.takes(sizes) else ())]

    def prepare(self, name: str, sizes: Any, device: Any) -> tuple[Callable[..., Tensor], list[Tensor | None]]:
        """Return the function of one of `implementations`, or of our function on the backend `name`, and its inputs."""
        inputs = self.layer_inputs(sizes, device)
        if self.PEERS and name in self.PEERS.names:
            return self.PEERS.prepare(name, sizes, inputs)
        return functools.partial(self.bind(sizes), backend=name), inputs

    def missing(self) -> str | None:
        """Return why other people's kernels cannot run here, or None."""
        return None if importlib.util.find_spec(self.PEERS.package) else self.PEERS.missing


def describe_config(config: Any) -> dict[str, Any]:
    """Return a config as results record it: its constants and its compiler options.

    A tuple of configs gives each by name.
    """
    if isinstance(config, tuple):
        return {name: describe_config(each) for name, each in config._asdict().items()}
    return {**config.kwargs, **compiler_options(config)}


def compiler_options(config: triton.Config) -> dict[str, int]:
    """Return the compiler options of a config; without maxnreg the compiler chooses the registers."""
    chosen = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg}
    return {name: value for name, value in chosen.items() if value is not None}
