"""Starts the tests under Triton's interpreter in a process of their own, since the interpreter is chosen when Triton is
imported.

`make test` starts those that are not slow, which run every kernel once; `make test-all` starts the others and those of
every operator.
"""

from pathlib import Path

import pytest

from tests.conftest import run_python
from tests.slow import slow

FOLDER = Path(__file__).parent
KERNELS = ["interpreted", "test_ms_deform_attn.py"]


@pytest.mark.parametrize(
    ("tests", "chosen"), [(KERNELS, "not slow"), slow(KERNELS, "slow"), slow(["test_every_op.py"], "")]
)
def test_under_the_interpreter(tests, chosen):
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-m", chosen]
    done = run_python("-m", "pytest", *options, *(str(FOLDER / name) for name in tests), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
