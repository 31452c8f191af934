"""Which backends run in this process: under Triton's interpreter its kernels alone, else all others; their errors.

`test_interpreted.py` starts the files that use this a second time, with TRITON_INTERPRET=1.
"""

import pytest
import torch

from kernels.tools import check
from kernels.tools.operators import INTERPRETED

# the highest precision that the backend has, for gradients that are compared
EXACT = torch.float32 if INTERPRETED else torch.float64
# what is compared with the reference, and that with the reference itself
BACKEND = ["triton"] if INTERPRETED else ["torch"]
ANY_BACKEND = [*BACKEND, "reference"]
# what lies around the backends is the same for all of them, and the interpreter is slow
once = pytest.mark.skipif(INTERPRETED, reason="tested on the torch backend, and the same for every backend")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a limit of Triton's interpreter: TRITON_INTERPRET=1")


def find_errors(cases, inputs, sizes, backend, expected=None, floor=0.0):
    """Return the errors of the output and every gradient, in memory full of NaN, against the reference in fp64."""
    expected = expected or check.differentiate(cases, [x.double() for x in inputs], sizes, "reference")
    with check.poisoned_memory():
        found = check.differentiate(cases, inputs, sizes, backend)
    return check.relative_errors(found, expected, floor)
