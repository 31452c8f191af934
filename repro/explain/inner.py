"""The inner learner made visible: the Gradient Magnitude Map (Fig. 3, 9 and 10) and the reconstruction loss (Fig. 11)."""

import torch
from torch import Tensor, nn

from ..models.backbone import Grid, remove_tokens
from .operator import by_layer

TOP_SHARE = 0.3  # of the tokens that the paper marks


def gradient_maps(model: nn.Module, images: Tensor) -> Tensor:
    """Gradient Magnitude Map: ‖∂ℓ_t/∂W‖_F of each patch token at its chunk's start state W, summed over heads and directions.

    ∂ℓ_t/∂W = K_tᵀ G_t is of rank one, so its Frobenius norm is ‖K_t‖·‖G_t‖. The bias's gradient G_t is left out: Eq. 6 is about W.

    Args:
        model: a Vittt in eval mode.
        images: its inputs (N,3,H,W).

    Returns:
        (N, L, h, w) for L layers, class tokens left out.

    Raises:
        ValueError: a model without inner learner.
    """
    found = by_layer(model, images, lambda o, inner: (o.k.norm(dim=-1) * inner.gradient.norm(dim=-1)).sum((2, 3)))
    grid = model.grid_of(*images.shape[-2:])
    patches = remove_tokens(found.flatten(0, 1).unsqueeze(-1), model.prefix_positions(grid[0] * grid[1]))
    return patches.reshape(*found.shape[:2], *grid)


def first_chunks(model: nn.Module, grid: Grid) -> Tensor:
    """Which patch tokens (h,w) a direction meets in its first chunk, where it has not learned anything of the image yet."""
    positions = model.prefix_positions(grid[0] * grid[1])
    count = grid[0] * grid[1] + len(positions)
    place = torch.arange(count)
    first = place < (model.chunk_size or count)
    if model.blocks[0].mixer.directions == 2:
        first = first | first.flip(0)
    return remove_tokens(first[None, :, None], positions).view(grid)


def top_tokens(maps: Tensor, among: Tensor) -> Tensor:
    """The 30 % of the tokens `among` (h,w) with the largest values, rounded: maps (..., h, w) -> bool of that shape."""
    values = maps.masked_fill(~among.to(maps.device), -torch.inf).flatten(-2)
    chosen = values.topk(round(TOP_SHARE * int(among.sum())), dim=-1).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, chosen, True).view_as(maps)


def marked(model: nn.Module, maps: Tensor) -> dict[str, Tensor]:
    """The 30 % of the tokens with the largest mean over the layers of maps (N,L,h,w): of all, and of those beyond the first chunks.

    The first chunk of a direction is learned from the start state, so that its gradients are large whatever it shows.
    """
    everywhere = torch.ones(maps.shape[-2:], dtype=torch.bool)
    places = {"all": everywhere, "later": everywhere & ~first_chunks(model, tuple(maps.shape[-2:]))}
    return {name: top_tokens(maps.mean(1), among) for name, among in places.items()}


def reconstruction_losses(model: nn.Module, images: Tensor) -> Tensor:
    """ℓ_t = ½‖LN(K_t W + β) − (V_t − K_t)‖² at the chunk's start state: forth direction, mean over heads and images.

    Args, raises: as `gradient_maps`.

    Returns:
        (L, T) for L layers; tokens in scan order, class tokens in their places.
    """
    return by_layer(model, images, lambda operands, inner: inner.loss[:, :, 0].mean(-1)).mean(0)
