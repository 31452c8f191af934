"""Maps of the inner learner: the Gradient Magnitude Map (Fig. 3, 9 and 10) and the reconstruction loss (Fig. 11)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.custom_op import SeesParts
from kernels.ttt_linear.reference import Arguments, InnerLearning

from ..models.backbone import Grid, remove_tokens
from ..models.ttt_mixer import replay_inner_learning

TOP_SHARE = 0.3  # share of the tokens that the paper marks
_BATCH_SIZE = 32  # images per forward pass
Run = Callable[[Arguments], Tensor]  # the operator: arguments -> out (B,T,R,H,D)


class OverrideTTTLinear(SeesParts):
    """A context in which `replacement(arguments, run)` computes the output of TTT-Linear; for inference only.

    No model is changed, patched or copied: to PyTorch the operator is one opaque operation, which a dispatch mode can
    intercept, as FlopCounterMode does. Layers with the reference backend make no such calls.
    """

    def __init__(self, replacement: Callable[[Arguments, Run], Tensor]):
        super().__init__()
        self.replacement = replacement

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one operation of PyTorch; TTT-Linear through the replacement."""
        if func is not torch.ops.vision_ttt.ttt_linear.default:
            return func(*args, **(kwargs or {}))
        count = len(Arguments._fields)  # the operator's first arguments are these fields, in this order
        out = self.replacement(Arguments(*args[:count]), lambda arguments: func(*arguments, *args[count:])[0])
        return out, out.new_empty(0)  # stands for the states, which only a backward pass uses


@torch.no_grad()
def _reduce_layers(model: nn.Module, images: Tensor, reduce: Callable[[Arguments, InnerLearning], Tensor]) -> Tensor:
    """Run a model in eval mode on inputs (N,3,H,W), and reduce the inner learning of each of its L layers.

    `reduce` maps the arguments and the inner learning of a layer to (B, ...); the result is (N, L, ...).

    Raises:
        ValueError: the model never calls the operator, or calls it once for each direction of a layer.
    """
    layers: list[Tensor] = []

    def note(arguments: Arguments, run: Run) -> Tensor:
        """Note one layer's reduced inner learning, and return its unchanged output."""
        layers.append(reduce(arguments, replay_inner_learning(arguments)))
        return run(arguments)

    batches = []
    for part in images.split(_BATCH_SIZE):
        layers.clear()
        with OverrideTTTLinear(note):
            model(part)
        if not layers:
            raise ValueError(f"{type(model).__name__} has no inner learner of Vision-TTT")
        if len(layers) != len(model.blocks):
            raise ValueError(
                "the reading learning_rate=per_direction runs each direction by itself, which cannot be drawn"
            )
        batches.append(torch.stack(layers, 1))
    return torch.cat(batches)


def compute_gradient_maps(model: nn.Module, images: Tensor) -> Tensor:
    """Compute Gradient Magnitude Maps: ‖∂ℓ_t/∂W‖_F of each patch token at the start state W of its chunk.

    They are summed over heads and directions. ∂ℓ_t/∂W = K_tᵀ G_t has rank one, so its Frobenius norm is ‖K_t‖·‖G_t‖.
    The gradient G_t of the bias is not included, because Eq. 6 concerns W only.

    Args:
        model: a Vittt in eval mode with L layers.
        images: inputs (N,3,H,W).

    Returns:
        (N, L, h, w), without class tokens.

    Raises:
        ValueError: another model.
    """
    found = _reduce_layers(model, images, lambda o, inner: (o.k.norm(dim=-1) * inner.gradient.norm(dim=-1)).sum((2, 3)))
    grid = model.grid_of(*images.shape[-2:])
    patches = remove_tokens(found.flatten(0, 1).unsqueeze(-1), model.prefix_positions(grid[0] * grid[1]))
    return patches.reshape(*found.shape[:2], *grid)


def find_first_chunks(model: nn.Module, grid: Grid) -> Tensor:
    """Return a mask (h,w) of the patch tokens in a direction's first chunk, at whose state no token was learned."""
    positions = model.prefix_positions(grid[0] * grid[1])
    count = grid[0] * grid[1] + len(positions)
    place = torch.arange(count)
    first = place < (model.chunk_size or count)
    if model.blocks[0].mixer.directions == 2:
        first = first | first.flip(0)
    return remove_tokens(first[None, :, None], positions).view(grid)


def select_top_tokens(maps: Tensor, among: Tensor) -> Tensor:
    """Mask the largest 30 %, rounded, of the tokens in `among` (h,w) of maps (..., h, w), as bool of that shape."""
    values = maps.masked_fill(~among.to(maps.device), -torch.inf).flatten(-2)
    chosen = values.topk(round(TOP_SHARE * int(among.sum())), dim=-1).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, chosen, True).view_as(maps)


def mark_tokens(model: nn.Module, maps: Tensor) -> dict[str, Tensor]:
    """Mask the 30 % of the tokens with the largest mean over the layers of maps (N,L,h,w).

    `all` selects among all tokens, `later` among those after the first chunks. Gradients in the first chunk of a
    direction are taken at the initial state, and are large for any image.
    """
    everywhere = torch.ones(maps.shape[-2:], dtype=torch.bool)
    places = {"all": everywhere, "later": everywhere & ~find_first_chunks(model, tuple(maps.shape[-2:]))}
    return {name: select_top_tokens(maps.mean(1), among) for name, among in places.items()}


def compute_reconstruction_losses(model: nn.Module, images: Tensor) -> Tensor:
    """Compute ℓ_t = ½‖LN(K_t W + β) − (V_t − K_t)‖² at the start state of the token's chunk.

    Means over heads and images are taken, of the forward scan alone. Inputs and errors are those of
    `compute_gradient_maps`; the losses are (L, T) in scan order, including class tokens.
    """
    return _reduce_layers(model, images, lambda arguments, inner: inner.loss[:, :, 0].mean(-1)).mean(0)
