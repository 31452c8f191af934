"""Bi-WKV's Triton kernels compiled for three GPUs, without a GPU: no spills. Not for Triton's interpreter."""

import pytest

from kernels.bi_wkv import triton_bwd, triton_fwd
from kernels.tools.bi_wkv_cases import compilation

# every dtype and every target, the most used pair with every kernel
CASES = [("forward", "bf16", 90), ("forward_keeping_states", "fp16", 80), ("backward", "bf16", 90), ("backward", "fp32", 89)]


@pytest.mark.parametrize(("name", "dtype", "target"), CASES)
def test_default_config_compiles_without_spills(name, dtype, target):
    found = compilation(f"bi_wkv_{name}", dtype).read(target)
    assert found["loops"]  # the disassembly was read
    assert (found["stack_bytes"], found["instructions"]["LDL"], found["instructions"]["STL"]) == (0, 0, 0)
    assert found["registers"] <= 128 and found["shared_bytes"] == 0
    # a channel is one thread's: nothing passes between threads but the one decision at the start
    assert sum(loop[kind] for loop in found["loops"] for kind in ("BAR", "SHFL")) == 0


@pytest.mark.parametrize("module", [triton_fwd, triton_bwd])
def test_configs_differ_and_give_a_channel_to_a_thread(module):
    found = [str(config) for config in module.configs()]
    assert 1 < len(set(found)) == len(found) <= 4
    assert all(config.kwargs["BLOCK_C"] == 32 * config.num_warps for config in module.configs())
