"""The paper's formulas for multiply-adds and memory, exact, in units of 1e9. The expressions of ledger.yaml call them."""

from fractions import Fraction
from math import ceil

from ..identities import choose

_LAYERS, _HEAD_DIM, _CHUNK, _PATCH = 12, 64, 16, 16
VIM_LAYERS, VIM_STATE = 24, 16
TABLE3_WIDTH, TABLE3_TOKENS = 192, 196  # Vittt-T at 224x224
# designs of Table 3: D x D projections, directions of the scan, Conv1d of a direction, whether DWConv
PRINTED_DESIGNS = {
    "ttt_layer": (4, 1, 0, False),
    "share_qk": (3, 1, 0, False),
    "gating": (4, 1, 1, False),
    "conv1d": (4, 1, 2, False),
    "dual": (6, 2, 2, False),
    "conv2d": (6, 2, 2, True),
}


# what the paper says of the built models in its text; a test holds them equal to the models
_CONSTANTS = {"layers": _LAYERS, "head_dim": _HEAD_DIM, "chunk_size": _CHUNK, "vim_state": VIM_STATE}


def model_constant(name: str) -> int:
    """A size of the built models: layers, head_dim and chunk_size of Vittt-T, S and B, vim_state of Vim."""
    return _CONSTANTS[name]


def vit_g(width: int, tokens: int) -> Fraction:
    """A 12-layer ViT: Eq. 13, 4TD² + 2T²D per layer, with MLP (8TD²), patch convolution and head."""
    layer = 12 * tokens * width**2 + 2 * tokens**2 * width
    return Fraction(_LAYERS * layer + _ends(width, tokens - 1), 10**9)


def vim_blocks_g(width: int, tokens: int, scan: int) -> Fraction:
    """Vim's 24 blocks alone: Eq. 13, 6TD² + scan·T(2D)N with N = 16."""
    return Fraction(VIM_LAYERS * (6 * tokens * width**2 + scan * tokens * 2 * width * VIM_STATE), 10**9)


def vim_trivial_g(width: int, tokens: int) -> Fraction:
    """What Eq. 13 leaves out of a Vim of 24 blocks: Conv1d, small projections, patch convolution and head.

    Per token and block and in each of two directions, Conv1d has 4·2D, the projections to the rank R = ceil(D/16) and
    to B and C 2D·(R + 2N), and the one back from the rank R·2D. One of the tokens is the class token.
    """
    rank = ceil(width / 16)
    direction = 4 * 2 * width + 2 * width * (rank + 2 * VIM_STATE) + rank * 2 * width
    return Fraction(VIM_LAYERS * tokens * 2 * direction + _ends(width, tokens - 1), 10**9)


def vittt_g(width: int, tokens: int) -> Fraction:
    """A 12-layer Vittt: Eq. 13, 6TD² + 6TDd + 4bTD with d = 64, b = 16; SwiGLU (3TD·⌊8D/3⌋), convolution, head."""
    return Fraction(_vittt_layers("conv2d", width, tokens, _CHUNK * tokens) + _ends(width, tokens), 10**9)


def vittt_design_g(design: str, class_tokens: int = 0) -> Fraction:
    """A design of Table 3, or a class strategy of Table 4, by the terms of Eq. 13 alone.

    With n projections and R directions, a layer has nTD² + R·(3TDd + 2D·Σn²), where n are the lengths of the chunks;
    the last is shorter, so Σn² is a little less than the bT of Eq. 13. SwiGLU, patch convolution and head are added as
    in `vittt_g`. Class tokens pass through the layers but not through the patch convolution. A ValueError names an
    unknown design.
    """
    tokens = TABLE3_TOKENS + class_tokens
    squares = tokens // _CHUNK * _CHUNK**2 + (tokens % _CHUNK) ** 2
    return Fraction(_vittt_layers(design, TABLE3_WIDTH, tokens, squares) + _ends(TABLE3_WIDTH, TABLE3_TOKENS), 10**9)


def vittt_trivial_g(width: int, tokens: int) -> Fraction:
    """What Eq. 13 leaves out of a Vittt: Conv1d 2·8D, DWConv 9D and the learning rates D·D/64, per token and layer."""
    return Fraction(_LAYERS * tokens * (25 * width + width * width // _HEAD_DIM), 10**9)


def table3_weights(design: str) -> int:
    """The weights, without biases, of a design of Table 3 that meet every token: projections, Conv1d and DWConv."""
    projections, directions, conv1d, dwconv = choose(PRINTED_DESIGNS, design, "design of Table 3")
    return _LAYERS * (
        projections * TABLE3_WIDTH**2 + directions * conv1d * 4 * TABLE3_WIDTH + dwconv * 9 * TABLE3_WIDTH
    )


def table3_step_g(design: str) -> Fraction:
    """The multiply-adds that a step of Table 3 adds by its weights alone, of which each meets 196 tokens.

    `design` is where the step leads; a ValueError names one that is unknown or has no predecessor.
    """
    if design == next(iter(PRINTED_DESIGNS)):
        raise ValueError(f"{design} is the first design of Table 3; no step leads to it")
    weights = table3_weights(design)
    before = list(PRINTED_DESIGNS)[list(PRINTED_DESIGNS).index(design) - 1]
    return Fraction((weights - table3_weights(before)) * TABLE3_TOKENS, 10**9)


def score_tensors_gb(heads: int, tokens: int, tensors: int = 1, batch: int = 64) -> Fraction:
    """GB (1e9 bytes) of the fp16 attention scores of one layer; a softmax out of place holds two such `tensors`."""
    return Fraction(2 * tensors * batch * heads * tokens**2, 10**9)


def padded_tokens(width: int, height: int) -> int:
    """Patches of 16×16 of an image that is padded to multiples of 32, as detectors do: 4200 of 1333×800."""
    return ceil(width / 32) * ceil(height / 32) * (32 // _PATCH) ** 2


def _vittt_layers(design: str, width: int, tokens: int, squares: int) -> int:
    """`squares` is Σn² over the chunks of the scan."""
    projections, directions, _, _ = choose(PRINTED_DESIGNS, design, "design of Table 3")
    learner = directions * (3 * tokens * width * _HEAD_DIM + 2 * squares * width)
    return _LAYERS * (tokens * projections * width**2 + learner + 3 * tokens * width * (8 * width // 3))


def _ends(width: int, patches: int) -> int:
    """The convolution of 16×16 patches of RGB images, and the head of 1000 classes."""
    return patches * 3 * _PATCH**2 * width + 1000 * width
