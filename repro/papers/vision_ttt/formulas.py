"""The paper's formulas for multiply-adds, exact, in units of 1e9. The expressions of ledger.yaml call them."""

from fractions import Fraction

LAYERS, HEAD_DIM, CHUNK = 12, 64, 16
VIM_LAYERS, VIM_STATE = 24, 16


def vit_g(width: int, tokens: int) -> Fraction:
    """A 12-layer ViT: Eq. 13, 4TD² + 2T²D per layer, with MLP (8TD²), patch convolution and head."""
    layer = 12 * tokens * width**2 + 2 * tokens**2 * width
    return Fraction(LAYERS * layer + _ends(width, tokens - 1), 10**9)


def vim_blocks_g(width: int, tokens: int, scan: int) -> Fraction:
    """Vim's 24 blocks alone: Eq. 13, 6TD² + scan·T(2D)N with N = 16."""
    return Fraction(VIM_LAYERS * (6 * tokens * width**2 + scan * tokens * 2 * width * VIM_STATE), 10**9)


def vittt_g(width: int, tokens: int) -> Fraction:
    """A 12-layer Vittt: Eq. 13, 6TD² + 6TDd + 4bTD with d = 64 and b = 16, SwiGLU (3TD·⌊8D/3⌋), patch convolution and head."""
    layer = tokens * (6 * width**2 + 6 * width * HEAD_DIM + 4 * CHUNK * width + 3 * width * (8 * width // 3))
    return Fraction(LAYERS * layer + _ends(width, tokens), 10**9)


def vittt_trivial_g(width: int, tokens: int) -> Fraction:
    """What Eq. 13 leaves out of a Vittt: Conv1d 2·8D, DWConv 9D and the learning rates D·D/64, per token and layer."""
    return Fraction(LAYERS * tokens * (25 * width + width * width // HEAD_DIM), 10**9)


def _ends(width: int, patches: int) -> int:
    """The convolution of 16×16 patches of RGB images, and the head of 1000 classes."""
    return patches * 3 * 16 * 16 * width + 1000 * width
