"""Device functions that several operators' Triton kernels share. Stores need no cast: Triton casts to the pointer's dtype."""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def load_fp32(pointer, mask):
    """Load numbers of any dtype as fp32, zeros where `mask` is false."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def invert(x):
    """Return 1/x of a positive normal number, nearly to rounding; a division would also test for denormal numbers."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e⁻ˣ); `tl.exp` would also test for denormal numbers."""
    return invert(1.0 + tl.exp2(x * -LOG2E))
