"""Functions of numbers in the registers of Triton kernels."""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def invert(x):
    """1/x of a normal number above 0, nearly to rounding: a division would also look for denormal numbers."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def sigmoid(x):
    """1 / (1 + e⁻ˣ); `tl.exp` would also look for denormal numbers."""
    return invert(1.0 + tl.exp2(x * -LOG2E))
