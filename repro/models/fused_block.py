"""A block of Vittt in some ten launches: what `VitttBlock` computes, with the kernels of `kernels.around` in place of
plain PyTorch.

At 1280 x 1280 pixels the scan moves a tenth of a block's bytes, and the operations around it decide. Here each of them
reads its input and writes its output once: the convolution with the norm after it, one projection for gate, keys,
values and learning rates, both causal convolutions, the sum of the directions with norm and gate, SwiGLU's two products
with their activation; residuals are added by the products before them. On CPUs, for inference, numba's loops take the
places of the kernels up to the scan's norm. It is for the default reading of the paper, without class tokens;
`VitttBlock.forward` is the reference, and what runs everywhere else.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import around, ttt_linear_bidir
from kernels import selected_backend as selected_scan
from kernels.around.op import selected_backend
from kernels.around.reference import ONES

Grid = tuple[int, int]
ROWS = 256  # tokens that a CPU takes together after the scan


class Constants(NamedTuple):
    """What the launches take of a block's weights, each made once for these weights.

    in_weight (5D+P,D) and in_bias (5D+P,): rows of gate, keys, values and learning rates, and zeros up to a multiple of
    d; token_scale (2,chunk_size), with the base of the learning rates; up_weight (2F,D), up_bias (2F,): of SwiGLU;
    down_weight (D,F+8): with its bias in the first of the further columns; W0, b0, gamma, mu: of
    both directions, in fp32.
    """

    in_weight: Tensor
    in_bias: Tensor
    token_scale: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    W0: Tensor
    b0: Tensor
    gamma: Tensor
    mu: Tensor


KEPT = tuple(f"kept_{name}" for name in Constants._fields)  # the buffers that `freeze` makes


def can_fuse(block: Any, tokens: Tensor) -> bool:
    """Whether a `VitttBlock` is of a kind that the launches compute, and the kernels run here; numba's loops only in
    eager inference.
    """
    mixer, dtype = block.mixer, product_dtype(tokens)
    is_vittts = block.pool in ("mean", "max") and block.dwconv is not None and block.is_fusible and mixer.step == "own"
    if not is_vittts or mixer.backend not in ("auto", "triton", "numba"):
        return False
    chosen = _choose_backend(mixer.backend, tokens.device, dtype, mixer.head_dim, mixer.built_chunk)
    if chosen == "torch":
        return False
    is_inference = not (torch.is_grad_enabled() or block.training or torch.compiler.is_compiling())
    # a hook is called with the mixer
    return chosen == "triton" or (is_inference and not mixer._forward_hooks and not mixer._forward_pre_hooks)


@torch.compiler.assume_constant_result
def _choose_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_size: int) -> str:
    """The backend that runs both the operators around the scan and the scan, or `torch` where there is none.

    A compiler takes the answer, and does not follow the search for a GPU and a C compiler, which breaks a graph.
    """
    try:
        around_scan = selected_backend(backend, device, dtype=dtype)
        scan = selected_scan(backend, device, head_dim=head_dim, chunk_size=chunk_size, dtype=dtype)
    except ValueError:  # the mixer says why when it runs
        return "torch"
    return scan if scan == around_scan else "torch"


def product_dtype(tokens: Tensor) -> torch.dtype:
    """The dtype of a block's products: the tokens' own, or that of autocast."""
    device = tokens.device.type
    available = torch.amp.is_autocast_available(device)
    return torch.get_autocast_dtype(device) if available and torch.is_autocast_enabled(device) else tokens.dtype


def forward(block: Any, tokens_BTD: Tensor, grid: Grid) -> Tensor:
    """(B, T, D) on an (h, w) grid -> (B, T, D), as `VitttBlock.forward`."""
    mixer, dtype = block.mixer, product_dtype(tokens_BTD)
    D, H, d = mixer.dim, mixer.num_heads, mixer.head_dim
    backend = _choose_backend(mixer.backend, tokens_BTD.device, dtype, d, mixer.built_chunk)
    stream, x = around.conv_norm(
        tokens_BTD,
        block.dwconv.weight[:, 0],
        block.norm1.weight,
        block.norm1.bias,
        height=grid[0],
        eps=block.norm1.eps,
        backend=backend,
    ).unbind(0)
    if backend == "numba":
        gate, shared, v = mixer.in_proj(x).split(mixer.split_sizes, -1)
        lr, scale, state = mixer.learning_rate(x), mixer.scale_per_token(mixer.chunk_size or x.shape[1]), _state(mixer)
    else:
        known = find_constants(block, x.shape[1])
        projected = F.linear(x, known.in_weight, known.in_bias)
        gate, shared, v, rates = projected.split([D, 2 * D, 2 * D, projected.shape[-1] - 5 * D], -1)
        lr, scale, state = torch.sigmoid(rates[..., :H].float()), known.token_scale, known[6:]
    convolutions = (getattr(mixer, name) for name in ("conv_k", "conv_q"))
    taps = [each for conv in convolutions for each in (conv.weight[:, 0], conv.bias)]
    k, q = around.scan_convs(shared, *taps, backend=backend).unbind(0)
    q, k, v = (each.unflatten(-1, (2, H, d)) for each in (q, k, v))
    z = ttt_linear_bidir(q, k, v, lr, scale, *state, chunk_size=scale.shape[1], eps=mixer.eps, backend=backend)
    norm = mixer.post_norm
    y = around.gated_norm(z.flatten(3), gate, norm.weight, norm.bias, eps=norm.eps, backend=backend)
    if backend == "numba":
        return _finish_by_rows(block, stream, y)
    tokens_BTD = _add_product(block, stream, y, mixer.out_proj.weight)
    x = block.norm2(tokens_BTD).to(dtype)
    hidden = around.gated_linear(x, known.up_weight, known.up_bias, backend=backend)
    return _add_product(block, tokens_BTD, hidden, known.down_weight)


def _add_product(block: Any, stream_BTD: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """stream + x Wᵀ: in one launch, in place, where no gradient is wanted.

    Else it is a copy and a product. It is a product and a sum where samples drop the branch, and where the stream is of
    a higher precision.
    """
    if (
        (block.training and not isinstance(block.drop_path, nn.Identity))
        or x.dtype != stream_BTD.dtype
        or x.dtype != weight.dtype
    ):
        return stream_BTD + block.drop_path(F.linear(x, weight))
    rows = stream_BTD.flatten(0, 1)
    add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_
    return add(rows, x.flatten(0, 1), weight.T).view_as(stream_BTD)


def _finish_by_rows(block: Any, stream_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """The last projection and SwiGLU, added in place to some tokens after others, whose hidden units stay in a CPU's
    cache.
    """
    for tokens, y in zip(stream_BTD.flatten(0, 1).split(ROWS), y_BTD.flatten(0, 1).split(ROWS), strict=True):
        tokens += block.mixer.out_proj(y)
        tokens += block.mlp(block.norm2(tokens))
    return stream_BTD


def _state(mixer: Any) -> tuple[Tensor, ...]:
    """W0, b0, γ and μ of both directions."""
    H, d = mixer.num_heads, mixer.head_dim
    parts = (mixer.W0, (2, H, d, d)), *((each, (2, H, d)) for each in (mixer.b0, mixer.ln_weight, mixer.ln_bias))
    return tuple(each.expand(shape) for each, shape in parts)


def find_constants(block: Any, tokens: int) -> Constants:
    """The `Constants` of a block: those that `freeze` has kept, where no gradient is wanted, else new ones."""
    if not torch.is_grad_enabled() and KEPT[0] in block._buffers:
        kept = Constants(*(block._buffers[name] for name in KEPT))
        if kept.token_scale.shape[1] == (block.mixer.chunk_size or tokens):
            return kept
    return make_constants(block, tokens)


def freeze(block: Any, tokens: int) -> None:
    """Keep a block's constants until it is trained, moved, cast or loaded again; a write to a weight in between is not
    seen.

    They are buffers that are not saved, which a compiled graph reads where they lie.
    """
    with torch.inference_mode(False), torch.no_grad():
        for name, value in zip(KEPT, make_constants(block, tokens), strict=True):
            block.register_buffer(name, value, persistent=False)


def thaw(block: Any) -> None:
    """Forget what `freeze` has kept."""
    for name in KEPT:
        block._buffers.pop(name, None)
        block._non_persistent_buffers_set.discard(name)


def make_constants(block: Any, tokens: int) -> Constants:
    """Arrange a block's weights for the launches."""
    mixer, mlp = block.mixer, block.mlp
    D, H, d = mixer.dim, mixer.num_heads, mixer.head_dim
    missing = -H % d
    in_weight = F.pad(torch.cat([mixer.in_proj.weight, mixer.lr_proj.weight]), (0, 0, 0, missing))
    in_bias = F.pad(mixer.lr_proj.bias, (5 * D, missing))
    scale = mixer.scale_per_token(mixer.chunk_size or tokens).float() * (mixer.eta_base / d)
    up_weight = torch.cat([mlp.fc1_g.weight, mlp.fc1_x.weight])
    up_bias = torch.cat([mlp.fc1_g.bias, mlp.fc1_x.bias])
    down_weight = F.pad(torch.cat([mlp.fc2.weight, mlp.fc2.bias[:, None]], 1), (0, ONES - 1))
    state = tuple(each.float().contiguous() for each in _state(mixer))
    return Constants(in_weight, in_bias, scale, up_weight, up_bias, down_weight, *state)
