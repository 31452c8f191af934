"""The paper's formulas for multiply-adds and memory as exact fractions, in units of 1e9; ledger.yaml calls them."""

from fractions import Fraction
from math import ceil

from ..identities import choose

_LAYERS, _HEAD_DIM, _CHUNK, _PATCH = 12, 64, 16, 16
_VIM_LAYERS, _VIM_STATE = 24, 16
_TABLE3_WIDTH, _TABLE3_TOKENS = 192, 196  # Vittt-T at 224x224
# design of Table 3 -> (number of D x D projections, directions of the scan, Conv1d per direction, whether DWConv), in
# the order of the table: `table3_step_g` takes the one before for the start of a step
PRINTED_DESIGNS = {
    "ttt_layer": (4, 1, 0, False),
    "share_qk": (3, 1, 0, False),
    "gating": (4, 1, 1, False),
    "conv1d": (4, 1, 2, False),
    "dual": (6, 2, 2, False),
    "conv2d": (6, 2, 2, True),
}


def model_constant(name: str) -> int:
    """Return a size of the built models: `layers`, `head_dim` or `chunk_size` of Vittt, or `vim_state` of Vim.

    A test compares these with the models.
    """
    return {"layers": _LAYERS, "head_dim": _HEAD_DIM, "chunk_size": _CHUNK, "vim_state": _VIM_STATE}[name]


def vit_g(width: int, tokens: int) -> Fraction:
    """Return the multiply-adds (1e9) of a 12-layer ViT: Eq. 13, 4TD² + 2T²D per layer, with MLP (8TD²), patch
    convolution and head. One of the tokens is the class token.
    """
    layer = 12 * tokens * width**2 + 2 * tokens**2 * width
    return Fraction(_LAYERS * layer + _ends(width, tokens - 1), 10**9)


def vim_blocks_g(width: int, tokens: int, scan: int) -> Fraction:
    """Return the multiply-adds (1e9) of Vim's 24 blocks alone: Eq. 13, 6TD² + scan·T(2D)N with N = 16."""
    return Fraction(_VIM_LAYERS * (6 * tokens * width**2 + scan * tokens * 2 * width * _VIM_STATE), 10**9)


def vim_trivial_g(width: int, tokens: int) -> Fraction:
    """Return the multiply-adds (1e9) that Eq. 13 omits for a Vim of 24 blocks.

    These are Conv1d, small projections, patch convolution and head. Per token, block and direction (of two), Conv1d has
    4·2D, the projections to the rank R = ceil(D/16), B and C have 2D·(R + 2N), and the projection from the rank has
    R·2D. One of the tokens is the class token.
    """
    rank = ceil(width / 16)
    direction = 4 * 2 * width + 2 * width * (rank + 2 * _VIM_STATE) + rank * 2 * width
    return Fraction(_VIM_LAYERS * tokens * 2 * direction + _ends(width, tokens - 1), 10**9)


def vittt_g(width: int, tokens: int) -> Fraction:
    """Return the multiply-adds (1e9) of a 12-layer Vittt: Eq. 13, 6TD² + 6TDd + 4bTD with d = 64 and b = 16, with
    SwiGLU (3TD·⌊8D/3⌋), patch convolution and head.
    """
    return Fraction(_vittt_layers("conv2d", width, tokens, _CHUNK * tokens) + _ends(width, tokens), 10**9)


def vittt_design_g(design: str, class_tokens: int = 0) -> Fraction:
    """Return the multiply-adds (1e9) of a design of Table 3, or a class strategy of Table 4, by the terms of Eq. 13.

    With P projections and R directions, a layer has PTD² + R·(3TDd + 2D·Σn²), where n are the lengths of the chunks.
    The last chunk is shorter, so Σn² is a little less than the bT of Eq. 13. SwiGLU, patch convolution and head are
    added as in `vittt_g`. Class tokens pass through the layers but not through the patch convolution.

    Raises:
        ValueError: an unknown design.
    """
    tokens = _TABLE3_TOKENS + class_tokens
    squares = tokens // _CHUNK * _CHUNK**2 + (tokens % _CHUNK) ** 2
    return Fraction(_vittt_layers(design, _TABLE3_WIDTH, tokens, squares) + _ends(_TABLE3_WIDTH, _TABLE3_TOKENS), 10**9)


def vittt_trivial_g(width: int, tokens: int) -> Fraction:
    """Return the multiply-adds (1e9) that Eq. 13 omits for a Vittt.

    Per token and layer, the Conv1d have 2·8D, DWConv 9D, and the learning rates D·D/64.
    """
    return Fraction(_LAYERS * tokens * (25 * width + width * width // _HEAD_DIM), 10**9)


def table3_weights(design: str) -> int:
    """Count the weights of a design of Table 3 that are applied to every token: projections, Conv1d, DWConv, no biases.

    Raises:
        ValueError: an unknown design.
    """
    projections, directions, conv1d, dwconv = choose(PRINTED_DESIGNS, design, "design of Table 3")
    return _LAYERS * (
        projections * _TABLE3_WIDTH**2 + directions * conv1d * 4 * _TABLE3_WIDTH + dwconv * 9 * _TABLE3_WIDTH
    )


def table3_step_g(design: str) -> Fraction:
    """Return the multiply-adds (1e9) that the step of Table 3 to `design` adds by its weights, each used by 196 tokens.

    Raises:
        ValueError: an unknown design, or the first one, to which no step leads.
    """
    if design == next(iter(PRINTED_DESIGNS)):
        raise ValueError(f"{design} is the first design of Table 3; no step leads to it")
    weights = table3_weights(design)
    before = list(PRINTED_DESIGNS)[list(PRINTED_DESIGNS).index(design) - 1]
    return Fraction((weights - table3_weights(before)) * _TABLE3_TOKENS, 10**9)


def score_tensors_gb(heads: int, tokens: int, tensors: int = 1) -> Fraction:
    """Return the GB (1e9 bytes) of one layer's fp16 attention scores for the paper's 64 images of a batch.

    An out-of-place softmax holds two `tensors`.
    """
    return Fraction(2 * tensors * 64 * heads * tokens**2, 10**9)


def padded_tokens(width: int, height: int) -> int:
    """Count the 16×16 patches of an image that is padded to multiples of 32, as detectors do: 4200 for 1333×800."""
    return ceil(width / 32) * ceil(height / 32) * (32 // _PATCH) ** 2


def _vittt_layers(design: str, width: int, tokens: int, squares: int) -> int:
    """Count the multiply-adds of all layers; `squares` is Σn² over the lengths of the scan's chunks."""
    projections, directions, _, _ = choose(PRINTED_DESIGNS, design, "design of Table 3")
    learner = directions * (3 * tokens * width * _HEAD_DIM + 2 * squares * width)
    return _LAYERS * (tokens * projections * width**2 + learner + 3 * tokens * width * (8 * width // 3))


def _ends(width: int, patches: int) -> int:
    """Count the multiply-adds of the convolution of 16×16 RGB patches and of the head of 1000 classes."""
    return patches * 3 * _PATCH**2 * width + 1000 * width
