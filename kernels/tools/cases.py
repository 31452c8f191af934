"""What an operator's cases are: all that `check`, `bench`, `resources` and the tests need to know about it.

A new operator is checked, timed, compiled and tested once its `Cases` are in `operators.OPERATORS`.
"""

import abc
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from ..triton_launch import tuned
from .resources import Compilation

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# the largest relative error of rounding a number to a dtype
ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
BOTH = (False, True)  # directions: the first scans forward, the second backward

BATCH = 64
TOKENS = (196, 784, 1600, 4096, 6400)  # 224, 448, 640, 1024 and 1280 pixels a side
FORWARD, BOTH_PASSES = "forward", "forward+backward"

# see `Cases.compile_time`
CompileTime = tuple[dict[str, Any], dict[str, Any], tuple]
# of `check`: what a row says if it breaks off, the function that makes the row, its arguments and its options
Check = tuple[str, Callable[..., dict[str, Any]], tuple, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(abc.ABC):
    """One shape: B samples, T tokens, and what an operator adds."""

    batch: int = BATCH
    tokens: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the custom op besides its tensors."""
        return {}

    @abc.abstractmethod
    def tensor_bytes(self) -> tuple[int, int]:
        """The bytes of the inputs, and of the output, in bf16. Tensors whose size does not grow with T may be left out."""

    @abc.abstractmethod
    def flop_of(self, passes: str) -> int:
        """The FLOPs of `forward` or `backward` by the operator's own formulas."""

    def bytes(self, passes: str) -> int:
        """The least to be read and written: inputs and output; then the inputs, the output's gradient, and theirs."""
        inputs, out = self.tensor_bytes()
        return inputs + out if passes == FORWARD else 3 * inputs + 2 * out

    def flop(self, passes: str) -> int:
        """2 per multiply-add; the backward pass without its repetition of the forward pass."""
        return self.flop_of("forward") + (0 if passes == FORWARD else self.flop_of("backward"))


@dataclasses.dataclass(kw_only=True, eq=False)
class Cases(abc.ABC):
    """The cases of one operator."""

    NAME: str
    op: ModuleType
    triton_fwd: ModuleType
    triton_bwd: ModuleType
    INPUTS: tuple[str, ...]  # the names of its tensor inputs; one that some sizes do without is None there
    ACTIVATIONS: tuple[str, ...]  # those that a layer under autocast gives it in low precision
    OPTIONS: tuple[str, ...] = ()  # the sizes that `op.selected_backend` takes
    CPU_BACKENDS: tuple[str, ...] = ("torch",)  # besides the reference; `auto` takes the first
    OUT_BATCH: int = 0  # the axis of the output that is the samples'
    FLOOR: float = 0.0  # errors are relative to a norm of at least this
    SMALL: Sizes  # for tests
    TYPICAL: Sizes  # for configs, repetition and torch.compile
    LONG: tuple[Sizes, ...]  # for a GPU alone
    COMPARED: Sizes  # what GOALS and AT are about
    GOALS: Mapping[str, tuple[str, float, str]]  # key -> what, target, unit
    AT: str
    PEERS: tuple[str, ...] = ()  # other people's kernels
    PEER: str | None = None  # their package
    PEER_MISSING: str = ""  # what is said where it is not installed
    # key in the record -> package that has them
    DISTRIBUTIONS: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # name -> what gives its configs, the kernel, constants of its own
    KERNELS: Mapping[str, tuple[Any, Any, Mapping[str, Any]]]
    OPERANDS: tuple[str, ...]  # this and TYPES: see `resources.Compilation`
    TYPES: Mapping[str, str] = dataclasses.field(default_factory=dict)
    COMPILED: Sequence[Mapping[str, Any]] = ({},)  # the options of `compile_time` that `resources` compiles

    @abc.abstractmethod
    def draw(self, seed: int, sizes: Any, device: Any = "cpu") -> list[Tensor | None]:
        """The inputs and the gradient dout of the output, fp64, of values that the low precisions have."""

    @abc.abstractmethod
    def bind(self, sizes: Any) -> Callable[..., Tensor]:
        """The public operator at these sizes, a function of INPUTS and a backend."""

    @abc.abstractmethod
    def limit(self, name: str, dtype: torch.dtype, sizes: Any) -> float:
        """The largest relative error allowed for `out` or a gradient."""

    @abc.abstractmethod
    def ragged(self, interpreted: bool) -> list[Any]:
        """Sizes to check with every seed: full, short and missing blocks; for the interpreter, which is slow, fewer."""

    @abc.abstractmethod
    def variants(self) -> Iterator[tuple[str, Any]]:
        """(what is special, sizes) to check with one seed."""

    @abc.abstractmethod
    def shapes(self) -> list[Any]:
        """Sizes to time."""

    @abc.abstractmethod
    def layer_inputs(self, sizes: Any, device: torch.device) -> list[Tensor | None]:
        """Inputs as a layer gives them: activations in bf16, parameters in fp32."""

    @abc.abstractmethod
    def compile_time(self, dtype: torch.dtype) -> CompileTime:
        """The sizes that a record of `resources` shows, the kernels' constants, and the arguments of their `configs`.

        By default they are those of the sizes that are tested and tuned; operators add options for others.
        """

    def arguments(self, inputs: Sequence[Tensor | None], sizes: Any) -> Any:
        """The arguments of the custom op: the inputs with the options that belong to these sizes."""
        named = dict(zip(self.INPUTS, inputs, strict=True))
        return self.op.CUSTOM_OP.arguments(**named, **sizes.options)

    def kernels(self, arguments: Any, dout: Tensor, config: Any = None, backward_config: Any = None) -> list[Tensor]:
        """The output and each gradient, by the Triton kernels; None: the config of a launch without one."""
        out, states = self.triton_fwd.forward(arguments, True, config)
        kept = [{"out": out, "states": states}[name] for name in self.op.CUSTOM_OP.kept]
        return [out, *self.triton_bwd.backward(dout, *kept, arguments, backward_config)]

    def select(self, backend: str, sizes: Any, dtype: torch.dtype, device: Any) -> str:
        """The backend that runs for a request."""
        options = {name: getattr(sizes, name) for name in self.OPTIONS}
        return self.op.selected_backend(backend, device, dtype=dtype, **options)

    def configs(self, dtype: torch.dtype) -> tuple[list[triton.Config], list[triton.Config]]:
        """The candidates of the forward and of the backward kernel at TYPICAL."""
        first, *_, last = [configs(*self.compile_time(dtype)[2]) for configs, _, _ in self.KERNELS.values()]
        return first, last

    def tuners(self) -> list[tuple[Any, Any]]:
        """Each kernel that is tuned, with its tuner in bf16."""
        sizes = self.compile_time(torch.bfloat16)[2]
        found = dict.fromkeys((kernel, configs) for configs, kernel, _ in self.KERNELS.values())
        return [
            (kernel, tuned(kernel, candidates, *sizes)) for kernel, candidates in found if len(candidates(*sizes)) > 1
        ]

    def implementations(self, sizes: Any) -> list[str]:
        """The names of what is timed: our function on two backends, and other people's kernels."""
        return ["triton", "torch", *self.PEERS]

    def prepare(self, name: str, sizes: Any, device: torch.device) -> tuple[Callable[..., Tensor], list[Tensor | None]]:
        """The function of one of `implementations`, and its inputs."""
        return functools.partial(self.bind(sizes), backend=name), self.layer_inputs(sizes, device)

    def missing(self) -> str | None:
        """Why other people's kernels cannot run here, or None."""
        return None if self.PEER and importlib.util.find_spec(self.PEER) else self.PEER_MISSING

    def peer_checks(self, device: Any) -> Iterator[Check]:
        """Whether other people's kernels give the same."""
        yield from ()

    def compilations(self) -> Iterator[Compilation]:
        """What `resources` compiles: every kernel, dtype and config."""
        for name, (configs, _, _) in self.KERNELS.items():
            for options in self.COMPILED:
                for dtype in DTYPES:
                    candidates = configs(*self.compile_time(DTYPES[dtype], **options)[2])
                    yield from (self.compilation(name, dtype, number, **options) for number in range(len(candidates)))

    def compilation(self, name: str, dtype: str, number: int = 0, **options: Any) -> Compilation:
        """One of KERNELS in one of its configs, of which 0 is the default; the options are those of `compile_time`."""
        configs, kernel, own = self.KERNELS[name]
        sizes, constants, candidates = self.compile_time(DTYPES[dtype], **options)
        return Compilation(
            name=name,
            kernel=kernel,
            operands=self.OPERANDS,
            types=self.TYPES,
            constants={key: value for key, value in constants.items() if key in kernel.arg_names} | own,
            config=configs(*candidates)[number],
            dtype=dtype,
            sizes=sizes,
            default=number == 0,
        )


def normal_drawer(seed: int, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
    """A function of a shape, `scale` and `mean` that draws from one stream of random numbers."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return normal
