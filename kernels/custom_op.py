"""Registration of operators with PyTorch: custom ops for forward and backward, with fake kernels and FLOP formulas.

To torch.compile(fullgraph=True), inference mode, autocast, checkpointing and FlopCounterMode, an operator is one opaque
operation. Inside it, the backend `torch`, `triton` or `numba` is chosen by device, dtype and sizes. Triton and numba,
and the modules for them, are imported only when they are chosen.

The backend `reference` consists of plain operations under autograd. It also runs under forward-mode AD and the
transforms of torch.func (jvp, grad, vmap, ...). A custom op has no rules for these: its output would have no tangent,
which is a wrong derivative without an error.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from .dispatch import Load, check_backend, compute_dtype, no_autocast

NAMESPACE = "vision_ttt"


# Python type of an argument -> its name in the schemas of torch.library
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    Sequence[int]: "SymInt[]",
    Sequence[bool]: "bool[]",
    bool: "bool",
}


class CustomOp:
    """An operator, registered as `vision_ttt::<name>`; a call returns the operator's output.

    `forward` is the custom op: (*arguments, backend, keep_states) -> (out, states), with states for the backward pass.
    An operator that keeps no states has (*arguments, backend) -> out. `backward` is `vision_ttt::<name>_backward`:
    (dout, *kept, *arguments, backend) -> the gradient of each tensor argument, which is empty for an argument that is
    None. `backward` has no derivative: a second one raises a RuntimeError.

    A backend's module has `forward`, (x, keep_states) or (x), and `backward`, (dout, *kept, x), where x is one object
    with all arguments. out has the leading argument's dtype, or `x.out_dtype` where the arguments have one; each
    gradient has its argument's shape and dtype. If an operator keeps nothing, its module may lack `backward`: then
    `forward` runs again, under autograd.

    Args:
        name: the operator's name in torch.ops.
        arguments: a NamedTuple class; the annotations of its fields give the schema.
        leading: the argument that sets the output's device, and its dtype unless the arguments have an `out_dtype`.
        select: (backend, x) -> the backend that runs, `torch`, `triton` or `numba`; may raise a ValueError. It is also
            called with fake tensors and symbolic sizes, since the shape of the states depends on the backend.
        reference: x -> the output, by plain operations under autograd.
        torch_path: the module of the backend `torch`.
        load_triton: imports the modules of the backend `triton`.
        load_loops: imports the modules of the backend `numba`, for an operator that has it.
        result_shapes: (module, x, keep_states) -> the shapes of out and states; or (module, x) -> (shape of out,).
        forward_flops, backward_flops: x, with a shape in place of each tensor -> the FLOPs of a pass.
        kept: which results of `forward` are passed to `backward`, of `out` and `states`, in this order. Without
            `states`, `forward` takes no `keep_states` and returns out alone.
    """

    def __init__(
        self,
        name: str,
        arguments: type,
        *,
        leading: str,
        select: Callable[[str, Any], str],
        reference: Callable[[Any], Tensor],
        torch_path: ModuleType,
        load_triton: Load,
        load_loops: Load | None = None,
        result_shapes: Callable[..., Sequence[Sequence[int]]],
        forward_flops: Callable[[Any], int],
        backward_flops: Callable[[Any], int],
        kept: Sequence[str] = ("states",),
    ):
        declared = {argument: _SCHEMA_TYPES[type_] for argument, type_ in get_type_hints(arguments).items()}
        self.name, self.arguments, self.leading, self.kept = name, arguments, leading, kept
        self._is_tensor = [type_.startswith("Tensor") for type_ in declared.values()]
        self._has_states = "states" in kept
        self._select, self._reference, self._torch_path, self._load_triton = select, reference, torch_path, load_triton
        self._load_loops, self._result_shapes = load_loops, result_shapes

        inputs = ", ".join(f"{type_} {argument}" for argument, type_ in declared.items()) + ", str backend"
        more, results = (", bool keep_states", "(Tensor, Tensor)") if self._has_states else ("", "Tensor")
        self.forward = self._register(name, f"({inputs}{more}) -> {results}", self._run_forward, self._fake_forward)
        given = "".join(f"Tensor {result}, " for result in ("dout", *kept))
        gradients = ", ".join(["Tensor"] * sum(self._is_tensor))
        self.backward = self._register(
            f"{name}_backward", f"({given}{inputs}) -> ({gradients})", self._run_backward, self._fake_backward
        )
        self.forward.register_autograd(self._differentiate, setup_context=self._save_for_backward)
        self.backward.register_autograd(self._refuse_second_derivative)
        operations = getattr(torch.ops, NAMESPACE)
        register_flop_formula(getattr(operations, name))(
            lambda *shapes, **_: forward_flops(self._split_forward(shapes)[0])
        )
        register_flop_formula(getattr(operations, f"{name}_backward"))(
            lambda *shapes, **_: backward_flops(self._split_backward(shapes)[1])
        )

    def _register(self, name: str, schema: str, run: Callable, fake: Callable) -> Any:
        """Register a custom op that writes to none of its inputs; `fake` computes shapes and dtypes alone."""
        operation = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema)
        operation.register_fake(fake)
        return operation

    def __call__(self, x: Any, backend: str) -> Tensor:
        """Return the output for these arguments on the requested backend.

        Raises:
            ValueError: the backend is unknown, or cannot run these arguments.
        """
        check_backend(backend)
        if backend == "reference" or _is_transformed(x):
            with no_autocast(getattr(x, self.leading).device.type):
                return self._reference(x)
        if is_plain(x):  # PyTorch's dispatcher takes more of the host's time than the operator itself
            result = self._compute(x, backend, *[False] * self._has_states)  # keep_states, where the operator has it
            return result[0] if self._has_states else result
        if not self._has_states:
            return self.forward(*x, backend)
        keep_states = torch.is_grad_enabled() and any(value.requires_grad for value in x if isinstance(value, Tensor))
        return self.forward(*x, backend, keep_states)[0]

    def _modules(self, backend: str, x: Any) -> tuple[ModuleType, ModuleType]:
        """Return the modules that run, one with `forward` and one with `backward`."""
        try:
            chosen = self._select(backend, x)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if chosen == "triton":
            return self._load_triton()
        if chosen == "numba":
            return self._load_loops()
        return self._torch_path, self._torch_path

    def _split_forward(self, values: Sequence[Any]) -> tuple[Any, str, Sequence[bool]]:
        """Return the arguments, the backend, and keep_states where the operator has it."""
        count = len(self._is_tensor)
        return self.arguments(*values[:count]), values[count], values[count + 1 :]

    def _split_backward(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any, str]:
        """Return dout with the kept results, the arguments, and the backend."""
        count = 1 + len(self.kept)
        return values[:count], self.arguments(*values[count:-1]), values[-1]

    def _tensors(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the tensor arguments, from one value for each argument; a tensor may be None."""
        return [value for value, is_tensor in zip(values, self._is_tensor, strict=True) if is_tensor]

    def _run_forward(self, *values: Any) -> Any:
        """Compute the custom op `forward`, see the class."""
        x, backend, keep_states = self._split_forward(values)
        return self._compute(x, backend, *keep_states)

    def _compute(self, x: Any, backend: str, *keep_states: bool) -> Any:
        """Return the results of the backend's `forward`; operators without states give no `keep_states`."""
        module, _ = self._modules(backend, x)
        with no_autocast(getattr(x, self.leading).device.type):
            return module.forward(x, *keep_states)

    def _fake_forward(self, *values: Any) -> Any:
        """Return empty results of `forward`, contiguous, as the backends must return theirs."""
        x, backend, keep_states = self._split_forward(values)
        module, _ = self._modules(backend, x)
        out_shape, *states_shape = self._result_shapes(module, x, *keep_states)
        if states_shape and torch.compiler.is_exporting() and isinstance(states_shape[0][0], torch.SymInt):
            # the number of states depends on the batch size, which a guard on that number would fix in the graph
            states_shape = [(torch.library.get_ctx().new_dynamic_size(), *states_shape[0][1:])]
        leading = getattr(x, self.leading)
        out = leading.new_empty(out_shape, dtype=getattr(x, "out_dtype", leading.dtype))
        return (
            (out, leading.new_empty(states_shape[0], dtype=compute_dtype(leading.dtype))) if self._has_states else out
        )

    def _run_backward(self, *values: Any) -> Any:
        """Compute the custom op `backward`; a schema has no optional results, so a missing gradient is empty."""
        results, x, backend = self._split_backward(values)
        _, module = self._modules(backend, x)
        with no_autocast(results[0].device.type):
            gradients = module.backward(*results, x) if hasattr(module, "backward") else _repeat(module, *results, x)
        return _unpack_one(tuple(results[0].new_empty(0) if gradient is None else gradient for gradient in gradients))

    def _fake_backward(self, *values: Any) -> Any:
        """Return empty gradients, contiguous, each in the shape and dtype of its argument."""
        results, x, _ = self._split_backward(values)
        return _unpack_one(
            tuple(
                results[0].new_empty(0) if value is None else value.new_empty(value.shape) for value in self._tensors(x)
            )
        )

    def _save_for_backward(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Keep the arguments and the results named in `kept`; only tensors may go through `save_for_backward`."""
        x, ctx.backend, _ = self._split_forward(inputs)
        results = dict(zip(("out", "states"), output, strict=True)) if self._has_states else {"out": output}
        if self._has_states:
            ctx.mark_non_differentiable(results["states"])
        ctx.others = [None if is_tensor else value for value, is_tensor in zip(x, self._is_tensor, strict=True)]
        ctx.save_for_backward(*(results[name] for name in self.kept), *self._tensors(x))

    def _differentiate(self, ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return a gradient or None for each input of `forward`, from what `_save_for_backward` kept."""
        saved = iter(ctx.saved_tensors)
        results = [next(saved) for _ in self.kept]
        arguments = [
            next(saved) if is_tensor else other for other, is_tensor in zip(ctx.others, self._is_tensor, strict=True)
        ]
        found = self.backward(dout, *results, *arguments, ctx.backend)
        gradients: Iterator[Tensor] = iter([found] if isinstance(found, Tensor) else found)
        aligned = [next(gradients) if is_tensor else None for is_tensor in self._is_tensor]
        # the last inputs, which are the backend and keep_states, have no gradient
        return tuple(x if needed else None for x, needed in itertools.zip_longest(aligned, ctx.needs_input_grad))

    def _refuse_second_derivative(self, ctx: Any, *_: Any) -> None:
        """Raise; without this derivative of `backward`, a second derivative would silently be missing."""
        raise RuntimeError(f"{self.name}: this backend has no second derivative; backend='reference' has one")


def _is_transformed(x: Sequence[Any]) -> bool:
    """Tell whether a tensor has a tangent, or is inside a transform of torch.func."""
    if torch.compiler.is_compiling():  # the compiler traces transforms itself
        return False
    if not _in_transform():
        return False
    tensors = [value for value in x if isinstance(value, Tensor)]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(value) for value in tensors):
        return True
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(value).tangent is not None for value in tensors
    )


class SeesParts(TorchDispatchMode):
    """A dispatch mode that has to see the operations within a model's blocks: under it, no block is one operation."""


def may_be_opaque(x: Sequence[Any]) -> bool:
    """Tell whether a block's operations may be one operation that has no derivative.

    They may if gradients are off, and no transform, export, trace, tensor subclass or `SeesParts` mode has to see them.
    """
    sees_parts = (
        not torch.compiler.is_compiling()
        and is_in_torch_dispatch_mode()
        and any(isinstance(mode, SeesParts) for mode in _get_current_dispatch_mode_stack())
    )
    return not (torch.is_grad_enabled() or sees_parts or _is_followed(x))


def may_be_node(x: Sequence[Any]) -> bool:
    """Tell whether operations with gradients may be one node of autograd.

    They may not under a compiler, a mode, a transform, an export, a trace or a tensor subclass, which could not look
    into that node.
    """
    is_seen = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return torch.is_grad_enabled() and not (is_seen or _is_followed(x))


def _is_followed(x: Sequence[Any]) -> bool:
    """Tell whether an export, a trace, a transform or a tensor subclass follows operations from tensor to tensor."""
    return (
        torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or _in_transform()
        or any(isinstance(value, Tensor) and type(value) not in (Tensor, Parameter) for value in x)
    )


def is_plain(x: Sequence[Any]) -> bool:
    """Tell whether an operator may be called past PyTorch's dispatcher.

    It may if `may_be_opaque` holds and no compiler, profiler or mode such as FlopCounterMode is active, since these
    have to see every operation.
    """
    is_seen = torch.compiler.is_compiling() or torch.autograd._profiler_enabled() or is_in_torch_dispatch_mode()
    return not is_seen and may_be_opaque(x)


@torch.compiler.assume_constant_result
def _in_transform() -> bool:
    """Tell whether a transform of torch.func or forward-mode AD is active; a compiler has guards for both."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record inside a custom op, which excludes autograd from its implementation."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _repeat(module: ModuleType, dout: Tensor, x: Any) -> list[Tensor]:
    """Return the gradients of x's tensors by running `forward` again, under autograd."""
    with recording():
        leaves = {
            name: value.detach().requires_grad_() for name, value in x._asdict().items() if isinstance(value, Tensor)
        }
        found = torch.autograd.grad(module.forward(x._replace(**leaves)), list(leaves.values()), dout)
    return [gradient.detach().contiguous() for gradient in found]


def _unpack_one(gradients: tuple[Tensor, ...]) -> Any:
    """Return a single gradient without its tuple, as a schema with one result requires; else the tuple."""
    return gradients[0] if len(gradients) == 1 else gradients
