"""Cases of Bi-WKV. Shape letters: B samples, T tokens, C channels.

There is no peer: Vision-RWKV's own kernel computes something else, see `reference.bi_wkv_formula`.
"""

import dataclasses
import itertools

import torch
from torch import Tensor

from .. import triton_launch
from ..bi_wkv import bi_wkv, op
from ..bi_wkv.triton_fwd import configs
from . import cases
from .cases import IMAGE_TOKENS, ROUNDING, Random, long, ragged, special


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(cases.Sizes):
    """Sizes of a case: B samples, T tokens, C channels.

    `decay` and `keys` are the standard deviations of w and u (0: 1/T, as in models) and of k.
    """

    channels: int
    decay: float = 0.0
    keys: float = 1.0


def find_limit(name: str, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return the largest relative error of the output, or of an input's gradient.

    It is the kernels' own error plus a multiple of the results' rounding.

    The kernels' own error grows with the exponents and with T. On a GPU a power of two has an error of 2⁻²², and a
    state is multiplied by one for each block of tokens that it passes.

    The gradients of k, u and w are sums of v − out with the kept output, which is rounded. In those of w, terms
    weighted by distance cancel, most of all where a large decay leaves only a few.
    """
    times = {"out": 1, "v": 1, "k": 4, "u": 4, "w": 64 if sizes.decay else 16}
    step = 0.0 if triton_launch.INTERPRETED else 2.0**-21
    own = 2e-4 if sizes.decay else max(sizes.tokens * step, 1e-4 if sizes.tokens > 1000 else 1e-5)
    return own + ROUNDING[dtype] * times[name]


def make(sizes: Sizes, random: Random) -> list[Tensor]:
    """Draw w, u, k, v and dout; w and u of either sign."""
    rows = sizes.batch, sizes.tokens, sizes.channels
    w, u = (random.normal(sizes.channels, scale=sizes.decay or 1 / sizes.tokens) for _ in range(2))
    return [w, u, *(random.normal(*rows, scale=scale) for scale in (sizes.keys, 1.0, 1.0))]


def list_sizes(*lengths: int) -> list[Sizes]:
    """Return the sizes of two images for each number of tokens, with fewer channels than a program has, and with more."""
    return [Sizes(batch=2, tokens=tokens, channels=channels) for tokens in lengths for channels in (5, 35)]


CASES = cases.Cases(
    NAME="bi_wkv",
    op=op,
    CPU_BACKENDS=("numba", "torch"),
    ACTIVATIONS=("k", "v"),
    FLOOR=1.0,  # values and output gradients have that size; at one token the gradients of w, u and k are zero
    make=make,
    bind=lambda sizes: bi_wkv,
    limit=find_limit,
    configs=lambda dtype: (configs(dtype),) * 2,
    SMALL=Sizes(batch=2, tokens=9, channels=5),
    TYPICAL=Sizes(batch=2, tokens=197, channels=35),
    CASES=[
        *ragged(*list_sizes(1, 2, 7, 8, 9, 41)),
        *ragged(*list_sizes(196, 197, 784), on_gpu_alone=True),
        # of either sign, which need more than one exponent for a block
        *special("large decay", Sizes(batch=2, tokens=41, channels=35, decay=3.0)),
        # few channels, since the reference has fp64 values of all pairs of tokens
        *long(*(Sizes(batch=1, tokens=tokens, channels=2) for tokens in (4200, 6400))),
    ],
    # VRWKV-T, S, B
    SHAPES=[Sizes(tokens=T, channels=channels) for channels, T in itertools.product((192, 384, 768), IMAGE_TOKENS)],
    COMPARED=Sizes(tokens=6400, channels=192),
)
