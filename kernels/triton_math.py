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
def mean(x, D: tl.constexpr):
    """Return the mean of each row of x over D channels; x is 0 in any channel beyond them."""
    return tl.sum(x, 1) / D


@triton.jit
def product(a, b):
    """Return a b in fp32. `ieee`: fp32 operands are not rounded to TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(total, a, b):
    """Return total + a b, see `product`."""
    return tl.dot(a, b, acc=total, input_precision="ieee")


@triton.jit
def invert(x):
    """Return 1/x of a positive normal number, nearly to rounding; a division would also test for denormal numbers."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e⁻ˣ); `tl.exp` would also test for denormal numbers."""
    return invert(1.0 + tl.exp2(x * -LOG2E))
