"""A block of Vittt as one custom operator for inference, without a derivative.

Compilers, profilers and dispatch modes see one operation. Its result is bitwise that of eager inference.
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
        name: name of the operator.
        run: its implementation, which must not write to `tokens`. The operator has no autograd rule.
        measure: maps the shapes of the constants to (heads of the learner, chunk size, hidden units of the MLP); the
            FLOP formula needs them.
    """
    _LIBRARY.define(
        f"{name}(Tensor tokens, Tensor[] constants, SymInt height, float[] eps) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),  # kernels and loops rely on the strides
    )
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    torch.library.register_fake(packet.default, _make_fake, lib=_LIBRARY)

    def count(tokens: tuple, constants: list[tuple], *_: Any, **__: Any) -> int:
        """Count the FLOPs of the plain path."""
        (B, T, D), (H, chunk, hidden) = tokens, measure(constants)
        # per channel: the outputs of all linear layers; 9 taps on the grid, and 4 for keys and queries in both directions
        products, taps = 5 * D + H + D + 3 * hidden, 9 + 2 * 2 * 4
        return 2 * B * T * D * (products + taps) + forward_flops((B, T, 2, H, D // H), chunk)

    register_flop_formula(packet)(count)
    return packet.default


def _make_fake(tokens: Tensor, constants: list[Tensor], height: int, eps: list[float]) -> Tensor:
    """Return a tensor like the result, contiguous, for a compiler that traces shapes."""
    return tokens.new_empty(tokens.shape)
