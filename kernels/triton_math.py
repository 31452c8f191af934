"""Scalar functions for Triton kernels."""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def invert(x):
    """Return 1/x of a positive normal number, nearly to rounding; a division would also test for denormal numbers."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e⁻ˣ); `tl.exp` would also test for denormal numbers."""
    return invert(1.0 + tl.exp2(x * -LOG2E))
