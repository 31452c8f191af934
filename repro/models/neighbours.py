"""Neighbourhood attention: softmax attention of each token to a square window around it, at linear cost."""

import torch
from torch import Tensor

from .image_model import Grid


def attend_to_neighbours(q: Tensor, k: Tensor, v: Tensor, grid: Grid, window: int) -> Tensor:
    """Attend from every query to the keys in its window, with scores ⟨q, k⟩·d^-½ and without position bias.

    At a border the window moves inwards, so every query has window² keys, or fewer if the grid is narrower than the
    window. Time and memory are O(N·window²).

    Args:
        q, k, v: (B, h, N, d), row-major on the (rows, columns) grid.
        grid: rows and columns, whose product is N.
        window: side of the window in tokens, an odd number.

    Returns:
        (B, h, N, d), in the dtype of v.
    """
    index = find_neighbours(grid, window, q.device)
    # (B, h, N, window², d)
    keys, values = (each.index_select(2, index.flatten()).unflatten(2, index.shape) for each in (k, v))
    scores = (keys @ q.unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
    return (scores.softmax(-1).to(v.dtype).unsqueeze(-2) @ values).squeeze(-2)


def find_neighbours(grid: Grid, window: int, device: torch.device | None = None) -> Tensor:
    """Return the token indices in each token's window, row-major: (N, window²), fewer columns on a narrower grid."""
    rows, columns = (_find_neighbours_of_axis(length, min(window, length), device) for length in grid)
    return (rows[:, None, :, None] * grid[1] + columns[None, :, None, :]).flatten(2).flatten(0, 1)


def _find_neighbours_of_axis(length: int, window: int, device: torch.device | None) -> Tensor:
    """Return (length, window) indices along an axis; token i's window starts at i - window // 2, clamped."""
    first = (torch.arange(length, device=device) - window // 2).clamp(0, length - window)
    return first[:, None] + torch.arange(window, device=device)
