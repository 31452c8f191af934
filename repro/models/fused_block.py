"""A block of Vittt in some ten launches: `VitttBlock` by the kernels of `kernels.around` in place of plain PyTorch.

At 1280 x 1280 pixels the scan moves a tenth of a block's bytes, so the operations around it decide the time. Here each
of them reads its input and writes its output once: the convolution with the norm after it; one projection for gate,
keys, values and learning rates; both causal convolutions; the sum of the directions with norm and gate; and SwiGLU's
two products with their activation. The products add the residuals. On CPUs, numba's loops replace the kernels, for
inference only.

In inference a block is one operation. It runs without PyTorch's dispatcher if nothing has to see it, and is an operator
to a compiler, a profiler or a dispatch mode. Only the default reading of the paper, without class tokens, is fused.
`VitttBlock.forward_plainly` is the reference, and runs in all other cases.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension.
"""

import weakref
from operator import is_
from typing import Any

import torch
from timm.layers import DropPath, SwiGLU
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from kernels import selected_backend as selected_scan
from kernels.around.op import selected_backend
from kernels.custom_op import is_plain, may_be_node, may_be_opaque
from kernels.dispatch import compute_dtype, has_autocast

from . import fused_launches, fused_loops
from .as_built import Built, are_as_built, built_conv, is_watched
from .fused_launches import BlockWeights, LaunchConstants, Masks, arrange, arrange_taps, join_projections, run_launches
from .fused_loops import ALIGNED, PRODUCTS, LoopConstants, run_loops

Grid = tuple[int, int]
# layers whose weights are read, while the layer itself is not called
_LINEAR, _BIASED, _NORM = (
    Built((nn.Linear,), False),
    Built((nn.Linear,), True),
    Built((nn.LayerNorm,), True, {"elementwise_affine": True}),
)
_CONV = built_conv(nn.Conv1d, 4, 0, bias=True)
_DROPOUT = Built((nn.Dropout,), None, {"p": 0.0})
# the child layers of a block, its mixer and its MLP that may go uncalled, as `are_as_built` wants them
_OF_BLOCK = {
    "dwconv": built_conv(nn.Conv2d, 3, 1, bias=False),
    "norm1": _NORM,
    "norm2": _NORM,
    "mlp": Built((SwiGLU,)),
    "drop_path": Built((nn.Identity, DropPath)),
}
_OF_MIXER = {"in_proj": _LINEAR, "lr_proj": _BIASED, "conv_k": _CONV, "conv_q": _CONV}
_OF_MIXER |= {"post_norm": _NORM, "out_proj": _LINEAR}
_OF_MLP = {"fc1_g": _BIASED, "fc1_x": _BIASED, "act": Built((nn.SiLU,)), "drop1": _DROPOUT}
_OF_MLP |= {"norm": Built((nn.Identity,)), "fc2": _BIASED, "drop2": _DROPOUT}


class Frozen:
    """The constants of a block that `freeze` keeps, with the state of its weights, which shows later writes.

    A compiled graph reads the constants at their addresses. `graphs` watches a whole model by it, without constants.

    Args:
        block: the module whose parameters, buffers and submodules are compared.
        constants: what is kept for it, a `LaunchConstants` or `LoopConstants`; None for nothing.
    """

    def __init__(self, block: Any, constants: Any):
        self.constants, self._block = constants, weakref.ref(block)
        slots = [
            (table, name, value)
            for module in block.modules()
            for table in (module._modules, module._parameters, module._buffers)
            for name, value in table.items()
        ]
        self._tables, self._names, self._values = zip(*slots, strict=True)
        self.weights = [value for value in self._values if isinstance(value, Tensor)]
        self._plain = [x for x in self.weights if type(x) in (Tensor, nn.Parameter)]  # a fake tensor has no address
        self._matrices = [x for x in self._plain if x.ndim > 1]
        self._held = [x.data for x in self._plain]  # kept alive, so that no other tensor gets their addresses
        self._known = self._find_places(), self._find_versions()

    def is_fresh(self, block: Any) -> bool:
        """Tell whether the block is the same, and its weights are the same tensors, unwritten; takes about ten µs."""
        places, versions = self._known
        return (
            self._block() is block  # and no replica, which has the same attributes
            and all(map(is_, map(dict.get, self._tables, self._names), self._values))
            and places == self._find_places()
            # last: a tensor at another place may be an inference tensor, which has no version
            and versions == self._find_versions()
        )

    def _find_places(self) -> list[Any]:
        """Return addresses and strides: another tensor behind a weight, even its own transpose, changes them."""
        return [list(map(Tensor.data_ptr, self._plain)), list(map(Tensor.stride, self._matrices))]

    def _find_versions(self) -> list[int]:
        """Return the version counters of the weights: a write changes them."""
        return [x._version for x in self.weights]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None, so that a copy of a block, or a block from a file, is not frozen."""
        return type(None), ()


def find_backend(block: Any, tokens: Tensor) -> str | None:
    """Return the backend that runs a whole `VitttBlock`; numba's loops run only in inference.

    None means the plain path: the launches do not compute this kind of block, or no kernels run here.
    """
    dtype = product_dtype(tokens)
    chosen = _find_kernels(block, tokens.shape[1], tokens.device, dtype)
    if chosen is None:
        return None
    if may_be_opaque([tokens]) and not block.training:
        casts = not tokens.dtype == dtype == block.norm1.weight.dtype
        return None if chosen == "numba" and casts else chosen
    # loops are for inference; the kernels' products are padded, which FlopCounterMode would count: its hooks are global
    return None if chosen == "numba" or _has_any_global_hook() else chosen


def _find_kernels(block: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the backend whose kernels or loops compute this kind of block in a dtype, with or without gradients.

    `tokens` is the length of the sequence, see `find_constants`.
    """
    mixer = block.mixer
    has_no_token = block.pool in ("mean", "max")
    if not (has_no_token and block.dwconv is not None and block.is_fusible and type(mixer) is block.mixer_class):
        return None
    if mixer.step != "own" or mixer.backend not in ("auto", "triton", "numba") or not _is_as_built(block):
        return None
    chosen = _choose_backend(mixer.backend, device, dtype, mixer.head_dim, mixer.built_chunk)
    # kernels take some chunk sizes only, and were asked about `built_chunk`. With `chunk_size` 0 the chunk is the
    # sequence, whose length may be another here; they are not asked about it, because it is a symbol to a compiler
    is_another = not mixer.chunk_size and tokens != mixer.built_chunk
    return None if chosen == "triton" and is_another else chosen


def _is_as_built(block: Any) -> bool:
    """Tell whether all modules of a block may go uncalled: they are as built, and no hook watches them."""
    mixer = block.mixer
    return (
        not is_watched(mixer)
        and are_as_built(block, _OF_BLOCK)
        and are_as_built(mixer, _OF_MIXER)
        and are_as_built(block.mlp, _OF_MLP)
    )


@torch.compiler.assume_constant_result
def _choose_backend(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, chunk_size: int
) -> str | None:
    """Return the backend that runs both the scan and the operators around it, or None.

    A compiler takes the answer as a constant: tracing the search for a GPU and a C compiler would break the graph.
    """
    try:
        around_scan = selected_backend(backend, device, dtype=dtype)
        scan = selected_scan(backend, device, head_dim=head_dim, chunk_size=chunk_size, dtype=dtype)
    except ValueError:  # the mixer reports the reason when it runs
        return None
    return scan if scan == around_scan != "torch" else None


def product_dtype(tokens: Tensor) -> torch.dtype:
    """Return the dtype of a block's products: that of autocast if it is enabled, else the tokens' own."""
    device = tokens.device.type
    is_on = has_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else tokens.dtype


def forward(block: Any, tokens_BTD: Tensor, grid: Grid, backend: str) -> Tensor:
    """Compute `VitttBlock.forward` by the backend of `find_backend`: (B, T, D) on an (h, w) grid -> (B, T, D).

    If a compiler, a profiler or a mode has to see inference, it sees one operator with bitwise the same result.
    """
    T, dtype = tokens_BTD.shape[1], product_dtype(tokens_BTD)
    eps = [block.norm1.eps, block.mixer.eps, block.mixer.post_norm.eps, block.norm2.eps]
    if backend == "numba":
        run, operator, constants = run_loops, fused_loops.OPERATOR, find_constants(block, T, LoopConstants)
    else:
        if may_be_node([tokens_BTD]):
            from .fused_training import run_node  # imported here because it imports Triton

            masks = _draw_masks(block, tokens_BTD, dtype)
            return run_node(tokens_BTD, read_weights(block, T), grid[0], eps, dtype, masks)
        run, operator, constants = run_launches, fused_launches.OPERATOR, find_constants(block, T, LaunchConstants)
        # a block that casts is no operator, because there is no autocast inside operators
        casts = not tokens_BTD.dtype == dtype == block.norm1.weight.dtype
        if block.training or casts or not may_be_opaque([tokens_BTD]):
            return run_launches(tokens_BTD, constants, grid[0], eps, _draw_masks(block, tokens_BTD, dtype))
    return (run if is_plain([tokens_BTD]) else operator)(tokens_BTD, list(constants), grid[0], eps)


def _draw_masks(block: Any, tokens: Tensor, dtype: torch.dtype) -> Masks:
    """Draw the factors of the samples by `drop_path`, for both residual branches; None if it drops none."""
    if not block.training or isinstance(block.drop_path, nn.Identity):
        return None
    ones = tokens.new_ones(len(tokens), 1, 1, dtype=dtype)
    return block.drop_path(ones), block.drop_path(ones)


def _state(mixer: Any) -> tuple[Tensor, ...]:
    """Return W0 (2,H,d,d), and b0, γ and μ (2,H,d), with both directions even if they share the parameters."""
    H, d = mixer.num_heads, mixer.head_dim
    parts = (mixer.W0, (2, H, d, d)), *((each, (2, H, d)) for each in (mixer.b0, mixer.ln_weight, mixer.ln_bias))
    return tuple(each if each.shape == shape else each.expand(shape) for each, shape in parts)


def find_constants(block: Any, tokens: int, kind: type) -> Any:
    """Return a block's constants, of class `kind`: those that `freeze` kept if no gradient is wanted, else new ones.

    `tokens` is the length of the sequence, which is the chunk size if the mixer has none.
    """
    if not torch.is_grad_enabled() and (frozen := find_frozen(block)) and isinstance(frozen.constants, kind):
        kept = frozen.constants
        if kept.token_scale.shape[1] == (block.mixer.chunk_size or tokens):
            return kept
    return make_loop_constants(block, tokens) if kind is LoopConstants else make_constants(block, tokens)


def find_frozen(block: Any) -> Frozen | None:
    """Return what `freeze` kept of a block, or None; if a weight has changed since, end the freeze.

    Under a compiler nothing is compared, because the graph would then hold for these weights alone. An exported program
    gets None, because it is given other weights.
    """
    if block.frozen is None or torch.compiler.is_exporting():
        return None
    if not torch.compiler.is_compiling() and not block.frozen.is_fresh(block):
        block.frozen = None
    return block.frozen


def freeze(block: Any, tokens: int) -> None:
    """Keep a block's constants until one of its weights changes, if kernels compute it; see `Vittt.freeze`.

    Raises:
        ValueError: a weight is an inference tensor.
    """
    weight = next(block.parameters())
    chosen = _find_kernels(block, tokens, weight.device, weight.dtype)
    if chosen is None:
        return
    for name, weight in [*block.named_parameters(), *block.named_buffers()]:
        if weight.is_inference():
            raise ValueError(
                f"{name} is an inference tensor, whose writes nobody counts; make the model outside of that mode"
            )
    with torch.inference_mode(False), torch.no_grad():
        if chosen == "numba":
            kept: Any = make_loop_constants(block, tokens)
        else:
            kept = arrange_taps(make_constants(block, tokens))
        block.frozen = Frozen(block, kept._make(x.data for x in kept))  # no views: a weight with one cannot be swapped


def make_constants(block: Any, tokens: int) -> LaunchConstants:
    """Arrange a block's weights for the launches."""
    return arrange(read_weights(block, tokens))


def read_weights(block: Any, tokens: int, *, widen_scale: bool = True) -> BlockWeights:
    """Return the weights of a block for a sequence of `tokens`, see `find_constants`.

    The token scale is computed in fp32, or in its own dtype if not `widen_scale`. The others are the layers' own
    tensors where shapes allow it, so gradients reach the layers.
    """
    mixer, mlp = block.mixer, block.mlp
    scale = mixer.scale_per_token(mixer.chunk_size or tokens)
    scale = (scale.float() if widen_scale else scale) * (mixer.eta_base / mixer.head_dim)
    norm1, post_norm, norm2 = ((norm.weight, norm.bias) for norm in (block.norm1, mixer.post_norm, block.norm2))
    rates, *convs = ((each.weight, each.bias) for each in (mixer.lr_proj, mixer.conv_k, mixer.conv_q))
    learner = *rates, *convs[0], *convs[1], scale, *_state(mixer)
    layers = ((each.weight, each.bias) for each in (mlp.fc1_g, mlp.fc1_x, mlp.fc2))
    before, after = (block.dwconv.weight, *norm1, mixer.in_proj.weight), (*post_norm, mixer.out_proj.weight, *norm2)
    return BlockWeights(*before, *learner, *after, *(each for pair in layers for each in pair))


def make_loop_constants(block: Any, tokens: int) -> LoopConstants:
    """Arrange a block's weights for numba's loops."""
    from kernels.around import numba_path as around
    from kernels.ttt_linear import numba_path as learner

    # the token scale is multiplied in its own dtype, as on the plain path, and widened below
    w = read_weights(block, tokens, widen_scale=False)
    wide = compute_dtype(w.in_weight.dtype)
    in_weight, in_bias, up_weight, up_bias = join_projections(w, ALIGNED)
    W0, b0, gamma, mu = (each.to(wide).contiguous() for each in (w.W0, w.b0, w.gamma, w.mu))
    state = learner.join_state(W0, b0)
    taps = learner.lay_taps(w.k_weight[:, 0], w.k_bias, w.q_weight[:, 0], w.q_bias, w.b0.shape)
    grid_taps = around.lay_grid_taps(w.grid_weight[:, 0])
    made = in_weight, in_bias, w.token_scale, up_weight, up_bias, gamma, mu, state, *taps, grid_taps
    norms = w.norm1_weight, w.norm1_bias, w.post_norm_weight, w.post_norm_bias
    constants = LoopConstants(*made, *norms, w.out_weight, w.norm2_weight, w.norm2_bias, w.down_weight, w.down_bias)
    widened = {name: each.to(wide) for name, each in constants._asdict().items() if name not in PRODUCTS}
    return constants._replace(**widened)
