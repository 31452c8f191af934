"""The Triton kernels on this GPU: right in every config, dtype and size, and of the memory that they promise."""

import pytest
import torch

from kernels.tools import check
from kernels.tools.operators import OPERATORS
from kernels.tools.ttt_linear_cases import CASES, Sizes
from repro.bench.kernels import format_check


@pytest.mark.parametrize("name", OPERATORS)
def test_every_check_passes(device, name):
    """What `repro kernels check` does."""
    cases = OPERATORS[name]
    rows = [check.check_one(cases, *each) for each in check.planned(cases, device)]
    failed = [format_check(row) for row in rows if row["passed"] is False]
    assert rows and not failed, "\n".join(failed)


def peak_bytes(tokens, device, backend="auto"):
    """Of a forward and backward pass of `ttt_linear_bidir` above its inputs and their gradients."""
    sizes = Sizes(batch=1, tokens=tokens, heads=3)
    inputs = [x.requires_grad_() for x in CASES.layer_inputs(sizes, device)]
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    out = CASES.bind(sizes)(*inputs, backend=backend)
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held - sum(x.nbytes for x in gradients)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_peak_memory_is_linear_in_tokens(device, backend):
    peak_bytes(1024, device, backend)  # compiles, tunes, and allocates what stays
    peaks = {tokens: peak_bytes(tokens, device, backend) for tokens in (8192, 16384, 32768)}
    first, second = peaks[16384] - peaks[8192], peaks[32768] - peaks[16384]
    assert first > 0 and second == pytest.approx(2 * first, rel=0.2), peaks
