"""Observing and replacing the calls of TTT-Linear that a model makes, without changing, patching or copying the model.

To PyTorch the operator is one opaque operation, which a dispatch mode can intercept, as FlopCounterMode does. A model whose layers
run the reference backend makes no such calls.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.ttt_linear.reference import InnerLearning

from ..models.ttt_mixer import replay_inner_learning


class Operands(NamedTuple):
    """The first operands of the operator, by the names of its schema: those of `kernels.ttt_linear`, for R directions.

    q, k, v: (B,T,R,H,D). lr: (B,T,H). token_scale: (R,C). W0: (R,H,D,D). b0, ln_weight, ln_bias: (R,H,D). reverse: R flags.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lr: Tensor
    token_scale: Tensor
    W0: Tensor
    b0: Tensor
    ln_weight: Tensor
    ln_bias: Tensor
    chunk_size: int
    reverse: Sequence[bool]
    eps: float


Run = Callable[[Operands], Tensor]  # the operator itself: operands -> out (B,T,R,H,D)


class OverrideTTTLinear(TorchDispatchMode):
    """Within the context, `replacement(operands, run)` computes the output of every call of the operator; only without gradients.

    Args:
        replacement: (operands, the operator itself) -> out (B,T,R,H,D).
    """

    def __init__(self, replacement: Callable[[Operands, Run], Tensor]):
        super().__init__()
        self.replacement = replacement

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not torch.ops.vision_ttt.ttt_linear.default:
            return func(*args, **(kwargs or {}))
        count = len(Operands._fields)
        out = self.replacement(Operands(*args[:count]), lambda operands: func(*operands, *args[count:])[0])
        return out, out.new_empty(0)  # in place of the states, which only a backward pass would use


@torch.no_grad()
def reduce_layers(model: nn.Module, images: Tensor, reduce: Callable[[Operands, InnerLearning], Tensor], batch_size: int = 32) -> Tensor:
    """Run a model and reduce what the inner learners of each layer did.

    Args:
        model: in eval mode.
        images: its inputs (N,3,H,W).
        reduce: (operands, inner learning) of a layer -> (B, ...).
        batch_size: images per forward pass.

    Returns:
        (N, L, ...) for L layers.

    Raises:
        ValueError: the model never calls the operator.
    """
    layers: list[Tensor] = []

    def note(operands: Operands, run: Run) -> Tensor:
        layers.append(reduce(operands, replay_inner_learning(*operands)))
        return run(operands)

    batches = []
    for part in images.split(batch_size):
        layers.clear()
        with OverrideTTTLinear(note):
            model(part)
        if not layers:
            raise ValueError(f"{type(model).__name__} has no inner learner of Vision-TTT")
        batches.append(torch.stack(layers, 1))
    return torch.cat(batches)
