"""Tests of the Triton kernels under Triton's interpreter. It is chosen when Triton is imported, so they need a process
of their own.

`tests/kernels/test_interpreted.py` starts it; by hand: TRITON_INTERPRET=1 pytest -m "" tests/kernels/interpreted.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
