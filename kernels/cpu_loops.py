"""Shared parts of the loops that numba compiles for CPUs: one pass over memory where batched operations make many.

A loop reads a few tokens at a time into the cache, in whole rows, the order of memory. It then goes through blocks of
channels, whose states stay in the cache. LLVM vectorises the innermost loops over channels as long as they use few
arrays, since it has to check at run time that these do not overlap. Sums may be reassociated, but nothing is assumed
about NaN and infinity. Tasks write disjoint memory. The number of threads changes no result but the last bits of the
selective scan's dB and dC, which are sums over the channels of a task and then over tasks.

The loops are in `cpu_scan`, `cpu_wkv`, `cpu_learner` and `cpu_around`. Arrays are contiguous, of one dtype, fp32 or
fp64. Indices are not checked: a loop reads and writes beyond the end of an array that is too small. An argument
`constant` is a tuple whose length, which the compiler knows, is the length of a row. Shape letters as in the operators'
references.
"""

import hashlib
import inspect
import math
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic, overload

BLOCK = 64  # channels that are scanned together
GROUP = 32  # tokens from one kept state to the next
# in numpy's error model a division by zero follows IEEE; in Python's it raises an error, for which a loop would test
OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz", "arcp"}}
OPTIONS |= {"no_cfunc_wrapper": True}  # the wrapper for calls from C is not needed, and takes time to compile
# Functions that loops call are inlined, for two reasons. LLVM does not vectorise a loop that contains a call. And a
# function that is not inlined gives other last bits in the process that compiles it than in those that load the loop
# from the cache. Loops and these functions never assign an array to an array: the error message for shapes that do not
# fit needs numba's strings, which take seconds to compile.
INLINE = OPTIONS | {"forceinline": True, "no_cpython_wrapper": True}
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


# numba splits only `prange` over threads, and none of the other operations that it could split
THREADS = dict.fromkeys(
    ("comprehension", "fusion", "inplace_binop", "numpy", "reduction", "setitem", "stencil"), False
) | {"prange": True}


class Loop:
    """A loop over tasks, `function(first, last, *constants, *arguments)`, compiled at its first call, without the GIL.

    numba's cache finds a function by its file and name. The name therefore gets hashes of the loop's file and of this
    one, whose functions are inlined: a change of either compiles the loop again.

    The hashes leave out values and functions from any third file. After a change of `bi_wkv.reference.EMPTY` the cache
    would return loops of `cpu_wkv` with the old value until `cpu_wkv.py` itself changes.
    """

    def __init__(self, function: Callable) -> None:
        """Rename the function by the hashes; nothing is compiled before its first call."""
        source = hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()[:12]
        function.__qualname__ += f"_{source}_{_SOURCE}"
        self.alone = _compile(function)  # the loop itself, for a call on one thread
        # (*lengths of the constants, dtype) -> (compiled call for them, address of the loop that it calls)
        self._shared: dict[Any, tuple[Callable, int]] = {}

    def share(self, parts: int, tasks: int, constants: Sequence[tuple[Any, ...]], arguments: Sequence[Any]) -> None:
        """Run the tasks on `parts` threads, each with a part of the tasks.

        The constants are tuples whose lengths the compiler knows. numba passes no tuples to its threads; they are
        globals of the call. All arrays of floats have one dtype.

        A compiled call is kept by the lengths and the dtype alone. A loop must therefore not read the elements of a
        constant, and an array without elements must have as many axes as one with them.
        """
        dtype = next(each.dtype for each in arguments if isinstance(each, np.ndarray) and each.dtype.kind == "f")
        key = (*map(len, constants), dtype)
        if (known := self._shared.get(key)) is not None:
            call, address = known
            call(address, parts, tasks, *arguments)
            return
        given = (numba.intp, numba.intp, *map(numba.typeof, (*constants, *arguments)))
        self.alone.compile(given)
        entry = self.alone.overloads[given]
        # called by its address: a loop that is called by name would be compiled again as part of the caller
        address = entry.library.get_pointer_to_function(entry.fndesc.llvm_func_name)
        names = {"numba": numba, "call_loop": _call_loop, "CONSTANTS": tuple(constants), "__name__": __name__}
        call = types.FunctionType(_go_through.__code__, names, "go_through")
        call.__qualname__ = "_".join(map(str, ("go_through", _SOURCE, *map(len, constants))))
        call = _compile(call, parallel=THREADS)
        call(address, parts, tasks, *arguments)
        call.disable_compile()  # the address is valid for these types alone
        self._shared[key] = call, address


def _go_through(address, parts, tasks, *arguments):
    """Call a loop on each of `parts` threads; `Loop.share` gives a copy of this function the two global names."""
    for part in numba.prange(parts):
        call_loop(address, tasks * part // parts, tasks * (part + 1) // parts, CONSTANTS + arguments)  # noqa: F821


@intrinsic
def _call_loop(context: Any, address: Any, first: Any, last: Any, arguments: Any) -> Any:
    """Call a compiled loop by its address. It returns nothing and must raise nothing, since its status is dropped."""
    own = (numba.intp, numba.intp, *arguments.types)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        convention = context.call_conv
        pointer = builder.inttoptr(values[0], convention.get_function_type(numba.none, own).as_pointer())
        given = [*values[1:3], *cgutils.unpack_tuple(builder, values[3], len(arguments.types))]
        convention.call_function(builder, pointer, numba.none, own, given)
        return context.get_dummy_value()

    return numba.void(numba.intp, numba.intp, numba.intp, arguments), generate


def _compile(function: Callable, **options: Any) -> Callable:
    """Return the function, which numba compiles at its first call and caches on disk if a folder can be written."""
    try:
        return numba.njit(cache=True, **OPTIONS, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return numba.njit(**OPTIONS, **options)(function)


def _kinds(x: Any) -> tuple[Any, Any, int, int] | None:
    """Return (float type, integer type of its size, exponent bias, mantissa bits) for a numba float type.

    None for a numba type other than float32 and float64.
    """
    known = {
        numba.types.float32: (np.float32, np.int32, 127, 23),
        numba.types.float64: (np.float64, np.int64, 1023, 52),
    }
    return known.get(x)


def _fit(function: Callable, low: float, high: float, degree: int, kind: Any) -> tuple[Any, ...]:
    """Return the coefficients, highest first, of a polynomial that is close to a function's best on [low, high].

    The polynomial interpolates the function at the interval's Chebyshev points.
    """
    fitted = np.polynomial.Chebyshev.interpolate(function, degree, (low, high)).convert(kind=np.polynomial.Polynomial)
    return tuple(kind(each) for each in fitted.coef[::-1])


def exp2(x: Any) -> Any:
    """Return 2ˣ to rounding, at least the smallest normal number, and infinity above the largest.

    2ˣ is computed as a polynomial on [−½, ½] times a power of two. Only compiled loops can call it: `overload` below
    gives numba the code.
    """
    raise NotImplementedError("numba compiles it")


@overload(exp2, jit_options=INLINE)
def _exp2(x: Any) -> Callable | None:
    """Return the code of `exp2` for a type of x; None where it is no float, as `overload` requires."""
    if (kinds := _kinds(x)) is None:
        return None
    kind, integer, bias, mantissa = kinds
    lowest, highest, half, shift, offset = kind(1 - bias), kind(bias + 1), kind(0.5), integer(mantissa), integer(bias)
    coefficients = _fit(np.exp2, -0.5, 0.5, 6 if kind == np.float32 else 12, kind)

    def compute(x: Any) -> Any:
        x = lowest if x < lowest else x
        x = highest if x > highest else x
        whole = np.floor(x + half)
        rest = x - whole
        power = coefficients[0]
        for k in numba.literal_unroll(coefficients[1:]):
            power = power * rest + k
        # the exponent's bits are the power of two; for `highest` they are those of infinity
        return power * integer((integer(whole) + offset) << shift).view(kind)

    return compute


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e⁻ˣ)."""
    raise NotImplementedError("numba compiles it")


@overload(sigmoid, jit_options=INLINE)
def _sigmoid(x: Any) -> Callable | None:
    """Return the code of `sigmoid`, as `_exp2`."""
    if (kinds := _kinds(x)) is None:
        return None
    one, log2e = kinds[0](1), kinds[0](-1 / math.log(2))

    def compute(x: Any) -> Any:
        return one / (one + exp2(x * log2e))

    return compute


def softplus(x: Any) -> Any:
    """Return log(1 + eˣ) = max(x, 0) + log(1 + e), e = e^−|x|, by a polynomial for log(1 + e) / e on [0, 1]."""
    raise NotImplementedError("numba compiles it")


@overload(softplus, jit_options=INLINE)
def _softplus(x: Any) -> Callable | None:
    """Return the code of `softplus`, as `_exp2`."""
    if (kinds := _kinds(x)) is None:
        return None
    kind = kinds[0]
    nothing, log2e = kind(0), kind(-1 / math.log(2))
    coefficients = _fit(lambda e: np.log1p(e) / e, 0.0, 1.0, 9 if kind == np.float32 else 20, kind)

    def compute(x: Any) -> Any:
        e = exp2(abs(x) * log2e)
        ratio = coefficients[0]
        for k in numba.literal_unroll(coefficients[1:]):
            ratio = ratio * e + k
        return (x if x > nothing else nothing) + e * ratio

    return compute


@numba.njit(**INLINE)
def copy_row(constant, source, target):
    """Copy the row `source` to `target`."""
    for c in range(len(constant)):
        target[c] = source[c]


@numba.njit(**INLINE)
def add_scaled(constant, total, weight, row):
    """Compute total += weight * row, element by element, for three rows."""
    for c in range(len(constant)):
        total[c] += weight[c] * row[c]


@numba.njit(**INLINE)
def dot_rows(constant, a, b):
    """Return the dot product of two rows."""
    total = a.dtype.type(0)
    for c in range(len(constant)):
        total += a[c] * b[c]
    return total
