"""How PyTorch gets to know an operator: a custom op with a fake kernel, a backward pass that is a custom op itself, and FLOP formulas.

To torch.compile(fullgraph=True), inference mode, autocast, checkpointing and FlopCounterMode an operator is one opaque operation,
whatever backend runs inside.
"""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .dispatch import compute_dtype, no_autocast

NAMESPACE = "vision_ttt"


class CustomOp:
    """An operator, registered as `vision_ttt::<name>`; calling it gives the operator's output.

    `forward` is the operation itself: (*arguments, backend, keep_states) -> (out, states), where states are for the backward pass. If
    the backward pass needs nothing but the inputs, it is (*arguments, backend) -> out.
    `backward` is `vision_ttt::<name>_backward`: (dout, *kept, *arguments, backend) -> the gradient of each tensor argument, which is
    empty for an argument that is None. It has no derivative: a second one raises a RuntimeError.

    The functions below get the operator's arguments as attributes of one object, such as `x.q` and `x.chunk_size`.

    Args:
        name: of the operator.
        arguments: their types and names as torch.library's schemas write them, such as `Tensor q, SymInt chunk_size`.
        leading: the argument whose dtype and device the output has.
        find_modules: (backend, x) -> the modules that run, one with `forward` and one with `backward`; may raise a ValueError.
        result_shapes: (module, x, keep_states) -> the shapes of out and states; or (module, x) -> (that of out,).
        forward_flops, backward_flops: x, with a shape in place of each tensor -> the FLOPs of a pass.
        kept: the results of `forward` that `backward` takes, of `out` and `states`.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        *,
        leading: str,
        find_modules: Callable[[str, Any], tuple[ModuleType, ModuleType]],
        result_shapes: Callable[..., Sequence[Sequence[int]]],
        forward_flops: Callable[[Any], int],
        backward_flops: Callable[[Any], int],
        kept: Sequence[str] = ("states",),
    ):
        declared = [argument.split() for argument in arguments.split(", ")]
        self.name, self.leading, self.kept = name, leading, kept
        self._names = [argument for _, argument in declared]
        self._is_tensor = [type_.startswith("Tensor") for type_, _ in declared]
        self._has_states = "states" in kept
        self._find_modules, self._result_shapes = find_modules, result_shapes
        self._forward_flops, self._backward_flops = forward_flops, backward_flops

        inputs = f"{arguments}, str backend" + (", bool keep_states" if self._has_states else "")
        schema = f"({inputs}) -> " + ("(Tensor, Tensor)" if self._has_states else "Tensor")
        self.forward = torch.library.custom_op(f"{NAMESPACE}::{name}", self._run_forward, mutates_args=(), schema=schema)
        inputs = f"Tensor dout, {''.join(f'Tensor {result}, ' for result in kept)}{arguments}, str backend"
        schema = f"({inputs}) -> ({', '.join(['Tensor'] * sum(self._is_tensor))})"
        self.backward = torch.library.custom_op(f"{NAMESPACE}::{name}_backward", self._run_backward, mutates_args=(), schema=schema)
        self.forward.register_fake(self._fake_forward)
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=self._save_for_backward)
        self.backward.register_autograd(self._refuse_second_derivative)
        operations = getattr(torch.ops, NAMESPACE)
        register_flop_formula(getattr(operations, name))(self._count_forward)
        register_flop_formula(getattr(operations, f"{name}_backward"))(self._count_backward)

    def __call__(self, *arguments: Any, backend: str) -> Tensor:
        """The output for these arguments."""
        if not self._has_states:
            return self.forward(*arguments, backend)
        keep_states = torch.is_grad_enabled() and any(x.requires_grad for x in arguments if isinstance(x, Tensor))
        return self.forward(*arguments, backend, keep_states)[0]

    def _bundle(self, arguments: Sequence[Any]) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(self._names, arguments, strict=True)))

    def _modules(self, backend: str, arguments: Sequence[Any]) -> tuple[ModuleType, ModuleType]:
        try:
            return self._find_modules(backend, self._bundle(arguments))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _split_forward(self, values: Sequence[Any]) -> tuple[Sequence[Any], str, Sequence[bool]]:
        """The arguments, the backend, and keep_states where the operator has it."""
        count = len(self._names)
        return values[:count], values[count], values[count + 1 :]

    def _split_backward(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], str]:
        """dout with the kept results, the arguments, and the backend."""
        count = 1 + len(self.kept)
        return values[:count], values[count:-1], values[-1]

    def _tensors(self, values: Sequence[Any]) -> list[Any]:
        """Of one value per argument, those of the tensors; a tensor may be None."""
        return [value for value, is_tensor in zip(values, self._is_tensor, strict=True) if is_tensor]

    def _run_forward(self, *values: Any) -> Any:
        arguments, backend, keep_states = self._split_forward(values)
        module, _ = self._modules(backend, arguments)
        with no_autocast(arguments[0].device.type):
            return module.forward(*arguments, *keep_states)

    def _fake_forward(self, *values: Any) -> Any:
        arguments, backend, keep_states = self._split_forward(values)
        module, _ = self._modules(backend, arguments)
        x = self._bundle(arguments)
        out_shape, *states_shape = self._result_shapes(module, x, *keep_states)
        leading = getattr(x, self.leading)
        out = leading.new_empty(out_shape)
        return (out, leading.new_empty(states_shape[0], dtype=compute_dtype(leading.dtype))) if self._has_states else out

    def _run_backward(self, *values: Any) -> tuple[Tensor, ...]:
        results, arguments, backend = self._split_backward(values)
        _, module = self._modules(backend, arguments)
        with no_autocast(results[0].device.type):
            gradients = module.backward(*results, *arguments)
        return tuple(results[0].new_empty(0) if gradient is None else gradient for gradient in gradients)

    def _fake_backward(self, *values: Any) -> tuple[Tensor, ...]:
        results, arguments, _ = self._split_backward(values)
        return tuple(results[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in self._tensors(arguments))

    def _save_for_backward(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        arguments, ctx.backend, _ = self._split_forward(inputs)
        results = dict(zip(("out", "states"), output, strict=True)) if self._has_states else {"out": output}
        if self._has_states:
            ctx.mark_non_differentiable(results["states"])
        ctx.others = [None if is_tensor else value for value, is_tensor in zip(arguments, self._is_tensor, strict=True)]
        ctx.save_for_backward(*(results[name] for name in self.kept), *self._tensors(arguments))

    def _differentiate(self, ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        results = [next(saved) for _ in self.kept]
        arguments = [next(saved) if is_tensor else other for other, is_tensor in zip(ctx.others, self._is_tensor, strict=True)]
        gradients: Iterator[Tensor] = iter(self.backward(dout, *results, *arguments, ctx.backend))
        aligned = [next(gradients) if is_tensor else None for is_tensor in self._is_tensor]
        # the backend and keep_states have no gradient
        return *(x if needed else None for x, needed in zip(aligned, ctx.needs_input_grad, strict=False)), None, *[None] * self._has_states

    def _refuse_second_derivative(self, ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{self.name}: this backend has no second derivative; backend='reference' has one")

    def _count_forward(self, *shapes: Any, out_shape: Any = None) -> int:
        return self._forward_flops(self._bundle(self._split_forward(shapes)[0]))

    def _count_backward(self, *shapes: Any, out_shape: Any = None) -> int:
        return self._backward_flops(self._bundle(self._split_backward(shapes)[1]))
