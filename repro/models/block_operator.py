"""A block of Vittt as one operator to PyTorch, for inference; it has no derivative.

A compiler, a profiler or a mode finds one operation, which computes the bits of eager inference.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.custom_op import NAMESPACE
from kernels.ttt_linear.op import forward_flops

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_Run = Callable[[Tensor, list[Tensor], int, list[float]], Tensor]


def define_operator(name: str, run: _Run, measure: Callable[[list[Any]], tuple[int, int, int]]) -> Any:
    """Define `vision_ttt::<name>`: (tokens (B,T,D), constants, height of the grid, eps) -> (B,T,D).

    Args:
        name: of the operator.
        run: computes it. Gradients never come here: autograd has no rule, and `run` works on its own copy of tokens.
        measure: the shapes of the constants -> the learner's heads, its chunk, and the hidden units of the MLP.
    """
    _LIBRARY.define(
        f"{name}(Tensor tokens, Tensor[] constants, SymInt height, float[] eps) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),  # kernels and loops read by strides
    )
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    torch.library.register_fake(packet.default, _make_fake, lib=_LIBRARY)

    def count(tokens: tuple, constants: list[tuple], *_: Any, **__: Any) -> int:
        """Count those of the plain path."""
        (B, T, D), (H, chunk, hidden) = tokens, measure(constants)
        products, taps = 5 * D + H + D + 3 * hidden, 9 + 2 * 2 * 4
        return 2 * B * T * D * (products + taps) + forward_flops((B, T, 2, H, D // H), chunk)

    register_flop_formula(packet)(count)
    return packet.default


def _make_fake(tokens: Tensor, constants: list[Tensor], height: int, eps: list[float]) -> Tensor:
    return tokens.new_empty(tokens.shape)
